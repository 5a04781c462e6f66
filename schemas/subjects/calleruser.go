package subjects

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
)

// userPrefix begins the names of frontends that are users; nobody may register a frontend of such a name.
const userPrefix = "u-"

var userEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// UserFrontend is the frontend that a user is who logs in to the bus with its own token: "u-" and 26
// characters, which are the lower-case base32 of the first 16 bytes of SHA-256 over LP(issuer)
// LP(subject), where LP is the length as 4 bytes, big endian, before the bytes. Nothing else enters.
func UserFrontend(issuer, subject string) ids.Frontend {
	h := sha256.New()
	for _, s := range []string{issuer, subject} {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(s))))
		h.Write([]byte(s))
	}
	return ids.Frontend(userPrefix + userEncoding.EncodeToString(h.Sum(nil)[:16]))
}

// IsUserFrontend reports whether a frontend's name is one of a user.
func IsUserFrontend(f ids.Frontend) bool { return strings.HasPrefix(string(f), userPrefix) }
