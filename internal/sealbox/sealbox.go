// Package sealbox seals what services say to each other, and what a service
// answers to many clients, with a key that the process keeps. It speaks the
// formats of schemas/seal and of nkeys xkeys, and guarantees the same; it only
// saves work: the shared key of two services is computed once, and an answer
// to a client needs no new key pair. Who opens a box of Seal knows that the
// sender held the key named.
package sealbox

import (
	"bytes"
	"crypto/rand"
	"sync"

	"github.com/nats-io/nkeys"
	"golang.org/x/crypto/nacl/box"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/seal"
)

const (
	magic     = "xkv1"
	nonceLen  = 24
	envelope  = 1 // version byte of schemas/seal
	maxShared = 64
)

// Key is a curve key pair that remembers the keys it shares with others. It
// never prints its secret half and is safe for concurrent use.
type Key struct {
	secret [32]byte
	public string
	open   seal.XKey

	mu     sync.Mutex
	shared map[string]*[32]byte
}

// New makes the key of a secret of 32 bytes.
func New(secret []byte) (*Key, error) {
	if len(secret) != 32 {
		return nil, errs.Errorf("make curve key", errkind.Invalid, "the secret is %d bytes long, it must be 32", len(secret))
	}
	open, err := seal.NewKey(bytes.NewReader(secret))
	if err != nil {
		return nil, errs.E("make curve key", errkind.Invalid, "", err)
	}
	k := &Key{public: string(open.Public()), open: open, shared: map[string]*[32]byte{}}
	copy(k.secret[:], secret)
	return k, nil
}

// Random makes a new key.
func Random() (*Key, error) {
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails: crypto/rand ends the process instead
	return New(secret[:])
}

// Public returns the public half in its text form.
func (k *Key) Public() string { return k.public }

// String returns the public half.
func (k *Key) String() string { return k.public }

// GoString returns the public half, so that %#v prints no secret either.
func (k *Key) GoString() string { return "sealbox.Key(" + k.public + ")" }

// Seal seals for another service, whose key is worth remembering.
func (k *Key) Seal(to string, payload []byte) ([]byte, error) {
	shared, err := k.with(to)
	if err != nil {
		return nil, err
	}
	return seal1(nil, payload, shared), nil
}

// Open opens what the holder of from sealed with Seal.
func (k *Key) Open(from string, sealed []byte) ([]byte, error) {
	shared, err := k.with(from)
	if err != nil {
		return nil, err
	}
	if len(sealed) < len(magic)+nonceLen+box.Overhead || string(sealed[:len(magic)]) != magic {
		return nil, errs.E("open sealed message", errkind.Invalid, "", seal.ErrOpen)
	}
	nonce := [nonceLen]byte(sealed[len(magic):])
	out, ok := box.OpenAfterPrecomputation(nil, sealed[len(magic)+nonceLen:], &nonce, shared)
	if !ok {
		return nil, errs.E("open sealed message", errkind.Invalid, "", seal.ErrOpen)
	}
	return out, nil
}

// Envelope seals for a client whose key is used once: the format of
// schemas/seal, with this key as its sender.
func (k *Key) Envelope(to string, payload []byte) ([]byte, error) {
	if len(payload) > seal.MaxPayload {
		return nil, errs.E("seal envelope", errkind.TooLarge, "", seal.ErrTooLarge)
	}
	shared, err := k.precompute(to)
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, seal.Overhead+len(payload))
	out = append(out, envelope)
	out = append(out, k.public...)
	return seal1(out, payload, shared), nil
}

// OpenEnvelope opens what schemas/seal sealed to this key.
func (k *Key) OpenEnvelope(sealed []byte) ([]byte, error) {
	out, err := k.open.Open(sealed)
	if err != nil {
		return nil, errs.E("open envelope", errkind.Invalid, "", err)
	}
	return out, nil
}

func seal1(out, payload []byte, shared *[32]byte) []byte {
	var nonce [nonceLen]byte
	_, _ = rand.Read(nonce[:]) // never fails: crypto/rand ends the process instead
	out = append(out, magic...)
	out = append(out, nonce[:]...)
	return box.SealAfterPrecomputation(out, payload, &nonce, shared)
}

// with returns the key shared with peer, from memory if it is there.
func (k *Key) with(peer string) (*[32]byte, error) {
	k.mu.Lock()
	shared := k.shared[peer]
	k.mu.Unlock()
	if shared != nil {
		return shared, nil
	}
	shared, err := k.precompute(peer)
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.shared) >= maxShared {
		clear(k.shared)
	}
	k.shared[peer] = shared
	return shared, nil
}

func (k *Key) precompute(peer string) (*[32]byte, error) {
	if _, err := seal.ParsePublic(peer); err != nil {
		return nil, errs.E("read curve key", errkind.Invalid, "", err)
	}
	raw, err := nkeys.Decode(nkeys.PrefixByteCurve, []byte(peer))
	if err != nil || len(raw) != 32 {
		return nil, errs.E("read curve key", errkind.Invalid, "", seal.ErrKey)
	}
	var shared [32]byte
	box.Precompute(&shared, (*[32]byte)(raw), &k.secret)
	return &shared, nil
}
