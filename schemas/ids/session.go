package ids

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// SessionKey identifies a session: "s" and 52 characters of lower-case base32.
type SessionKey string

const sessionKeyLen = 53

func (k SessionKey) String() string { return string(k) }

// ParseSessionKey reads a session key in its one canonical form.
func ParseSessionKey(s string) (SessionKey, error) {
	if len(s) != sessionKeyLen || s[0] != 's' {
		return "", fmt.Errorf("%w: session key %.64q must be \"s\" and 52 characters of lower-case base32", ErrInvalid, s)
	}
	raw, err := lower32.DecodeString(s[1:])
	if err != nil || lower32.EncodeToString(raw) != s[1:] {
		return "", fmt.Errorf("%w: session key %q is not lower-case base32 of 32 bytes", ErrInvalid, s)
	}
	return SessionKey(s), nil
}

// DeriveSessionKey derives the key of one principal's session under key:
// "s" + lower-case base32 of HMAC-SHA256(key, LP("session") LP(issuer)
// LP(tenant) LP(subject) LP(name)), where LP is a 4-byte big-endian length and
// the bytes. issuer and subject are those of the verified token, byte-exact.
func DeriveSessionKey(key []byte, issuer string, tenant Tenant, subject string, name SessionName) SessionKey {
	mac := hmac.New(sha256.New, key)
	for _, field := range [...]string{"session", issuer, string(tenant), subject, string(name)} {
		var n [4]byte
		binary.BigEndian.PutUint32(n[:], uint32(len(field)))
		mac.Write(n[:])
		mac.Write([]byte(field))
	}
	return SessionKey("s" + lower32.EncodeToString(mac.Sum(nil)))
}
