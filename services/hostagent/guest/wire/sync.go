package wire

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// magic starts a sync record. It has no border (no prefix that is also a
// suffix), does not contain the lead byte, and 0xF5 is never part of UTF-8.
var magic = [16]byte{0xF5, 'B', 'E', 'R', 'T', 'H', '-', 'S', 'Y', 'N', 'C', '-', 'v', '1', '\r', '\n'}

// SyncSize is the length of a sync record, in bytes.
const SyncSize = 44

// Marker is the random part of a sync record.
type Marker [16]byte

// NewMarker returns a random marker.
func NewMarker() (Marker, error) {
	var m Marker
	if _, err := rand.Read(m[:]); err != nil {
		return m, fmt.Errorf("wire: random marker: %w", err)
	}
	return m, nil
}

// Sync is a sync record: the host sends it to attach, the guest echoes it.
type Sync struct {
	Marker   Marker
	AttachID uint64
}

// AppendSync appends the encoding of s to dst.
func AppendSync(dst []byte, s Sync) []byte {
	at := len(dst)
	dst = append(dst, magic[:]...)
	dst = append(dst, s.Marker[:]...)
	dst = binary.BigEndian.AppendUint64(dst, s.AttachID)
	return binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[at:], castagnoli))
}

// decodeSync reads a record of SyncSize bytes that begins with the magic.
func decodeSync(b []byte) (Sync, bool) {
	var s Sync
	if crc32.Checksum(b[:40], castagnoli) != binary.BigEndian.Uint32(b[40:]) {
		return s, false
	}
	copy(s.Marker[:], b[16:32])
	s.AttachID = binary.BigEndian.Uint64(b[32:])
	return s, true
}
