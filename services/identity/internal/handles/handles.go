// Package handles names sessions to people who must not learn their keys. It
// guarantees that a handle says nothing of tenant, session, user or name to
// whoever does not have the key, that a session of another generation has
// another handle, and that a handle opens nothing: whoever gets one still has
// to say whose session it is. It does no I/O.
package handles

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// Keys makes and knows handles.
type Keys struct {
	secrets [][]byte
	cursors []cipher.AEAD
}

// New takes the live versions of the key, newest first.
func New(secrets [][]byte) (*Keys, error) {
	k := &Keys{secrets: secrets}
	for _, s := range secrets {
		block, err := aes.NewCipher(mac(s, "cursor"))
		if err != nil {
			return nil, errs.E("read the key of handles", errkind.Internal, "", err)
		}
		aead, err := cipher.NewGCM(block)
		if err != nil {
			return nil, errs.E("read the key of handles", errkind.Internal, "", err)
		}
		k.cursors = append(k.cursors, aead)
	}
	if len(secrets) == 0 {
		return nil, errs.E("read the key of handles", errkind.Invalid, "", "there is no key")
	}
	return k, nil
}

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// mac is HMAC-SHA256 over the fields, each with its length before it.
func mac(secret []byte, fields ...string) []byte {
	h := hmac.New(sha256.New, secret)
	for _, f := range fields {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(f))))
		h.Write([]byte(f))
	}
	return h.Sum(nil)
}

func handle(secret []byte, ref *corev1.SessionRef) string {
	g := binary.BigEndian.AppendUint32(nil, ref.GetGeneration().GetIncarnation())
	g = binary.BigEndian.AppendUint64(g, ref.GetGeneration().GetIndex())
	return "h" + encoding.EncodeToString(mac(secret, "handle", ref.GetTenant(), ref.GetSession(), string(g)))
}

// Of is the handle of a session's generation.
func (k *Keys) Of(ref *corev1.SessionRef) string { return handle(k.secrets[0], ref) }

// Is reports whether h is the handle of a session's generation, under any
// live version of the key.
func (k *Keys) Is(h string, ref *corev1.SessionRef) bool {
	found := false
	for _, s := range k.secrets {
		found = hmac.Equal([]byte(h), []byte(handle(s, ref))) || found
	}
	return found
}

// Pause is the opaque word with which a list of a tenant's sessions goes on
// after a session.
func (k *Keys) Pause(t ids.Tenant, after ids.SessionKey) (string, error) {
	nonce := make([]byte, k.cursors[0].NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return "", errs.E("pause a list", errkind.Internal, "", err)
	}
	return encoding.EncodeToString(k.cursors[0].Seal(nonce, nonce, []byte(after), []byte(t))), nil
}

// Resume reads what Pause made for the same tenant; the empty word is the
// beginning.
func (k *Keys) Resume(t ids.Tenant, word string) (ids.SessionKey, error) {
	if word == "" {
		return "", nil
	}
	bad := errs.E("resume a list", errkind.Invalid, "", "this is no place to go on from")
	raw, err := encoding.DecodeString(word)
	if err != nil {
		return "", bad
	}
	for _, c := range k.cursors {
		if len(raw) < c.NonceSize() {
			return "", bad
		}
		if plain, err := c.Open(nil, raw[:c.NonceSize()], raw[c.NonceSize():], []byte(t)); err == nil {
			key, err := ids.ParseSessionKey(string(plain))
			if err != nil {
				return "", bad
			}
			return key, nil
		}
	}
	return "", bad
}
