package archive

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"errors"

	"lukechampine.com/blake3"
)

const (
	nonceSize = 12
	tagSize   = 16
	// overhead of a sealed chunk: nonce, form, tag.
	overhead = nonceSize + 1 + tagSize
	maxChunk = ChunkSize + overhead

	formRaw  = 0
	formZstd = 1
)

var errSealed = errors.New("it does not open with this disk's key")

// keys are what one generation's data key becomes: one key for each purpose, bound to the disk.
type keys struct {
	disk     string
	hash     []byte
	chunk    cipher.AEAD
	manifest cipher.AEAD
}

func deriveKeys(disk Disk, key Key) (*keys, error) {
	k := &keys{disk: disk.String()}
	var raw [3][]byte
	for i, purpose := range []string{"chunk hash", "chunk seal", "manifest seal"} {
		out, err := hkdf.Key(sha256.New, key[:], nil, "berth/archive/v1/"+purpose+"\x00"+k.disk, 32)
		if err != nil {
			return nil, err
		}
		raw[i] = out
	}
	k.hash = raw[0]
	var err error
	if k.chunk, err = gcm(raw[1]); err != nil {
		return nil, err
	}
	k.manifest, err = gcm(raw[2])
	return k, err
}

func gcm(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// sum is a chunk's keyed hash: without the key it tells nothing of the content.
func (k *keys) sum(raw []byte) (out [32]byte) {
	h := blake3.New(32, k.hash)
	_, _ = h.Write(raw)
	h.Sum(out[:0])
	return out
}

func (k *keys) bind(sum *[32]byte) []byte {
	return append(append(make([]byte, 0, len(k.disk)+40), k.disk...), sum[:]...)
}

// sealChunk compresses and seals raw into buf, which it may grow, and returns it.
func (d *Depot) sealChunk(k *keys, buf, raw []byte, sum *[32]byte) []byte {
	buf = append(buf[:0], make([]byte, nonceSize+1)...)
	_, _ = rand.Read(buf[:nonceSize]) // never fails
	buf[nonceSize] = formZstd
	buf = d.enc.EncodeAll(raw, buf)
	if len(buf)-nonceSize-1 > len(raw)-len(raw)/32 {
		buf = append(buf[:nonceSize+1], raw...)
		buf[nonceSize] = formRaw
	}
	return k.chunk.Seal(buf[:nonceSize], buf[:nonceSize], buf[nonceSize:], k.bind(sum))
}

// openChunk returns the content of a sealed chunk, in out or in sealed itself, which it overwrites.
func (d *Depot) openChunk(k *keys, sealed, out []byte, want int, sum *[32]byte) ([]byte, error) {
	if len(sealed) < overhead {
		return nil, errShort
	}
	plain, err := k.chunk.Open(sealed[nonceSize:nonceSize], sealed[:nonceSize], sealed[nonceSize:], k.bind(sum))
	if err != nil {
		return nil, errSealed
	}
	raw := plain[1:]
	switch plain[0] {
	case formRaw:
	case formZstd:
		if raw, err = d.dec.DecodeAll(raw, out[:0:ChunkSize]); err != nil {
			return nil, err
		}
	default:
		return nil, errors.New("it is in a form that this version does not know")
	}
	if len(raw) != want {
		return nil, errors.New("it has another length than the snapshot says")
	}
	if k.sum(raw) != *sum {
		return nil, errors.New("its content is not what the snapshot says")
	}
	return raw, nil
}

var zeros [ChunkSize]byte

func isZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }
