package vault

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"

	"github.com/berth-dev/berth/services/credentials/internal/platform"
)

// The first byte of what is stored. Append only.
const (
	// formatDirect: version of the key file (4), then AES-256-GCM with it.
	formatDirect = 1
	// formatWrapped: by (1), sum (8), length of the wrapped key (2), the
	// wrapped key, then AES-256-GCM with that key.
	formatWrapped = 2
	// formatNote: text in the clear.
	formatNote = 3
)

const (
	directHead  = 1 + 4
	sumBytes    = 8
	wrappedHead = 1 + 1 + sumBytes + 2
	directAAD   = "berth/v1/record/"
	recordAAD   = "berth/v2/record/"
	maxRecord   = 32 << 10
)

var (
	errFormat  = errors.New("it has no known format")
	errChanged = errors.New("it was changed, or encrypted with another platform key")
)

// record is one of formatWrapped.
type record struct {
	by            platform.By
	wrapped, body []byte
}

func (r record) encode() []byte {
	out := make([]byte, wrappedHead, wrappedHead+len(r.wrapped)+len(r.body))
	out[0], out[1] = formatWrapped, byte(r.by)
	binary.BigEndian.PutUint16(out[2+sumBytes:], uint16(len(r.wrapped))) // bounded by package platform
	out = append(append(out, r.wrapped...), r.body...)
	copy(out[2:], sum(out))
	return out
}

// sum is over all but itself. It is no protection, which AES-GCM is: it tells
// bytes that rotted from a key service that refuses, without asking it.
func sum(raw []byte) []byte {
	h := sha256.New()
	h.Write(raw[:2])
	h.Write(raw[2+sumBytes:])
	return h.Sum(nil)[:sumBytes]
}

func decode(raw []byte) (record, error) {
	if len(raw) < wrappedHead || len(raw) > maxRecord || raw[0] != formatWrapped {
		return record{}, errFormat
	}
	if !bytes.Equal(raw[2:2+sumBytes], sum(raw)) {
		return record{}, errChanged
	}
	n := int(binary.BigEndian.Uint16(raw[2+sumBytes:]))
	rest := raw[wrappedHead:]
	if n == 0 || n > len(rest) {
		return record{}, errFormat
	}
	return record{platform.By(raw[1]), rest[:n], rest[n:]}, nil
}
