package seal

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"fmt"
	"sync"

	"github.com/nats-io/nkeys"
	"golang.org/x/crypto/nacl/box"
	"golang.org/x/crypto/salsa20/salsa"
)

const (
	boxMagic  = "xkv1" // begins a bare box of nkeys
	nonceLen  = 24
	secretLen = 32
	// maxShared is how many shared keys a Box remembers at most.
	maxShared = 2048
)

// Box is a curve key that seals in its own name and remembers the keys that
// it shares with others, so that X25519 is computed once for each of them and
// not for each message. What it makes has the formats of SealTo and of nkeys;
// the nonce of each message is random (24 bytes). The memory is bounded: who
// was not heard of for long is computed again. It never prints its secret half
// and is safe for concurrent use.
//
// Two directions must not use the same pair of keys: a sealed message opens
// on both sides, and could be sent back to who made it.
type Box struct {
	secret *ecdh.PrivateKey
	public Public

	mu        sync.Mutex
	now, last map[Public]*[secretLen]byte // two generations
}

// NewBox makes the box of a key.
func NewBox(k XKey) (*Box, error) {
	if k.pair == nil {
		return nil, ErrKey
	}
	seed, err := k.pair.Seed()
	if err != nil {
		return nil, fmt.Errorf("%w: the seed cannot be read", ErrKey)
	}
	raw, err := nkeys.Decode(nkeys.PrefixByteSeed, seed)
	if err == nil && len(raw) < secretLen {
		err = ErrKey
	}
	if err != nil {
		return nil, fmt.Errorf("%w: the seed cannot be read", ErrKey)
	}
	b := &Box{public: k.public, now: map[Public]*[secretLen]byte{}}
	if b.secret, err = ecdh.X25519().NewPrivateKey(raw[len(raw)-secretLen:]); err != nil {
		return nil, fmt.Errorf("%w: the seed cannot be read", ErrKey)
	}
	return b, nil
}

// BoxOf makes the box of a secret of 32 bytes.
func BoxOf(secret []byte) (*Box, error) {
	if len(secret) != secretLen {
		return nil, fmt.Errorf("%w: the secret is %d bytes long, it must be %d", ErrKey, len(secret), secretLen)
	}
	k, err := NewKey(bytes.NewReader(secret))
	if err != nil {
		return nil, err
	}
	return NewBox(k)
}

// RandomBox makes a box of a new key.
func RandomBox() (*Box, error) {
	k, err := NewKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	return NewBox(k)
}

// Public returns the public half in its text form.
func (b *Box) Public() string { return string(b.public) }

// String returns the public half.
func (b *Box) String() string { return string(b.public) }

// GoString returns the public half, so that %#v prints no secret either.
func (b *Box) GoString() string { return "seal.Box(" + string(b.public) + ")" }

// Envelope seals for the holder of to: the format of SealTo, with this key as
// the sender. Errors: ErrKey, ErrTooLarge.
func (b *Box) Envelope(to string, payload []byte) ([]byte, error) {
	if len(payload) > MaxPayload {
		return nil, fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrTooLarge, len(payload), MaxPayload)
	}
	shared, err := b.with(to)
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, Overhead+len(payload))
	out = append(out, version)
	out = append(out, b.public...)
	return appendBox(out, payload, shared), nil
}

// OpenEnvelope opens what SealTo or another Box sealed to this key. Every
// failure is ErrOpen.
func (b *Box) OpenEnvelope(envelope []byte) ([]byte, error) {
	if len(envelope) < minSealed || len(envelope) > maxSealed || envelope[0] != version {
		return nil, ErrOpen
	}
	return b.Open(string(envelope[1:1+publicLen]), envelope[1+publicLen:])
}

// Seal makes a bare box of nkeys: for two who know each other's key. Who opens
// it knows that the sender held the key named. Error: ErrKey.
func (b *Box) Seal(to string, payload []byte) ([]byte, error) {
	shared, err := b.with(to)
	if err != nil {
		return nil, err
	}
	return appendBox(make([]byte, 0, boxOverhead+len(payload)), payload, shared), nil
}

// Open opens what the holder of from sealed with Seal. Every failure is
// ErrOpen.
func (b *Box) Open(from string, sealed []byte) ([]byte, error) {
	if len(sealed) < boxOverhead || string(sealed[:len(boxMagic)]) != boxMagic {
		return nil, ErrOpen
	}
	shared, err := b.with(from)
	if err != nil {
		return nil, ErrOpen
	}
	nonce := [nonceLen]byte(sealed[len(boxMagic):])
	out, ok := box.OpenAfterPrecomputation(nil, sealed[len(boxMagic)+nonceLen:], &nonce, shared)
	if !ok {
		return nil, ErrOpen
	}
	return out, nil
}

func appendBox(out, payload []byte, shared *[secretLen]byte) []byte {
	var nonce [nonceLen]byte
	_, _ = rand.Read(nonce[:]) // never fails: crypto/rand ends the process instead
	out = append(out, boxMagic...)
	out = append(out, nonce[:]...)
	return box.SealAfterPrecomputation(out, payload, &nonce, shared)
}

// with returns the key shared with peer, from memory if it is there.
func (b *Box) with(peer string) (*[secretLen]byte, error) {
	p := Public(peer)
	if shared := b.recall(p); shared != nil {
		return shared, nil
	}
	p, err := ParsePublic(peer)
	if err != nil {
		return nil, err
	}
	raw, err := nkeys.Decode(nkeys.PrefixByteCurve, []byte(p))
	if err != nil || len(raw) != secretLen {
		return nil, fmt.Errorf("%w: the text cannot be read", ErrKey)
	}
	shared, err := b.share(raw)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.keep(p, shared)
	return shared, nil
}

// share is box.Precompute, which makes the secret's public half anew for each
// key, at half of the whole cost. A key that shares nothing with anybody, of low
// order, is refused.
func (b *Box) share(raw []byte) (*[secretLen]byte, error) {
	peer, err := ecdh.X25519().NewPublicKey(raw)
	if err != nil {
		return nil, fmt.Errorf("%w: the text cannot be read", ErrKey)
	}
	point, err := b.secret.ECDH(peer)
	if err != nil {
		return nil, fmt.Errorf("%w: it is of low order", ErrKey)
	}
	shared := [secretLen]byte(point)
	salsa.HSalsa20(&shared, new([16]byte), &shared, &salsa.Sigma)
	return &shared, nil
}

func (b *Box) recall(p Public) *[secretLen]byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if shared := b.now[p]; shared != nil {
		return shared
	}
	shared := b.last[p]
	if shared != nil {
		b.keep(p, shared)
	}
	return shared
}

// keep remembers; the older generation goes when the newer one is full.
func (b *Box) keep(p Public, shared *[secretLen]byte) {
	if len(b.now) >= maxShared/2 {
		b.now, b.last = map[Public]*[secretLen]byte{}, b.now
	}
	b.now[p] = shared
}
