// Package seal makes and opens sealed envelopes with curve keys (nkeys xkeys:
// X25519, XSalsa20-Poly1305). It guarantees that only the holder of the
// recipient's key reads an envelope and that a changed one does not open. It
// does not say who sealed it: the sender's key is new, made for one envelope
// (SealTo) or for many (Box), so what is inside must prove its sender by
// itself.
package seal

import (
	"errors"
	"fmt"
	"io"

	"github.com/nats-io/nkeys"
)

// MaxPayload is the largest payload in bytes that Seal takes.
const MaxPayload = 512 << 10

// Overhead is how many bytes longer an envelope is than its payload.
const Overhead = 1 + publicLen + boxOverhead

const (
	version     = 1
	publicLen   = 56          // text form of a curve key, "X..."
	boxOverhead = 4 + 24 + 16 // "xkv1", nonce, tag
	minSealed   = Overhead    // an empty payload
	maxSealed   = MaxPayload + Overhead
)

// Errors of this package. ErrOpen says no more on purpose.
var (
	ErrKey      = errors.New("not a curve key")
	ErrTooLarge = errors.New("payload too large to seal")
	ErrOpen     = errors.New("envelope cannot be opened")
)

// Public is the public half of a curve key in its text form ("X...").
type Public string

// ParsePublic reads a public curve key.
func ParsePublic(s string) (Public, error) {
	if len(s) != publicLen || !nkeys.IsValidPublicCurveKey(s) {
		// Not quoted: it may be the seed instead.
		return "", fmt.Errorf("%w: a text of %d characters is not that of a public curve key (X and 55 characters)", ErrKey, len(s))
	}
	return Public(s), nil
}

func (p Public) String() string { return string(p) }

// XKey is a curve key pair. It never prints its secret half.
type XKey struct {
	pair   nkeys.KeyPair
	public Public
}

// NewKey makes a key; random is crypto/rand.Reader outside tests.
func NewKey(random io.Reader) (XKey, error) {
	pair, err := nkeys.CreateCurveKeysWithRand(random)
	if err != nil {
		return XKey{}, fmt.Errorf("make curve key: %w", err)
	}
	return fromPair(pair)
}

// ParseSeed reads a key from its seed ("SX...") in its one canonical form.
func ParseSeed(seed string) (XKey, error) {
	pair, err := nkeys.FromCurveSeed([]byte(seed))
	if err == nil {
		var again []byte
		if again, err = pair.Seed(); err == nil && string(again) != seed {
			err = ErrKey
		}
	}
	if err != nil {
		return XKey{}, fmt.Errorf("%w: the seed cannot be read", ErrKey)
	}
	return fromPair(pair)
}

func fromPair(pair nkeys.KeyPair) (XKey, error) {
	pub, err := pair.PublicKey()
	if err != nil {
		return XKey{}, fmt.Errorf("%w: %w", ErrKey, err)
	}
	return XKey{pair, Public(pub)}, nil
}

// Public returns the public half.
func (k XKey) Public() Public { return k.public }

// Seed returns the secret half in its text form, to be stored.
func (k XKey) Seed() (string, error) {
	if k.pair == nil {
		return "", ErrKey
	}
	seed, err := k.pair.Seed()
	return string(seed), err
}

// String returns the public half.
func (k XKey) String() string { return string(k.public) }

// GoString returns the public half, so that %#v prints no secret either.
func (k XKey) GoString() string { return "seal.XKey(" + string(k.public) + ")" }

// SealTo seals a payload for the holder of recipient. The envelope is
// version (1 byte), the sender's one-time public key, and the sealed box.
func SealTo(recipient Public, payload []byte, random io.Reader) ([]byte, error) {
	if len(payload) > MaxPayload {
		return nil, fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrTooLarge, len(payload), MaxPayload)
	}
	if _, err := ParsePublic(string(recipient)); err != nil {
		return nil, err
	}
	sender, err := NewKey(random)
	if err != nil {
		return nil, err
	}
	box, err := sender.pair.SealWithRand(payload, string(recipient), random)
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	out := make([]byte, 0, 1+publicLen+len(box))
	out = append(out, version)
	out = append(out, sender.public...)
	return append(out, box...), nil
}

// Open opens an envelope that was sealed to k. Every failure is ErrOpen.
func (k XKey) Open(envelope []byte) ([]byte, error) {
	if k.pair == nil {
		return nil, ErrKey
	}
	if len(envelope) < minSealed || len(envelope) > maxSealed || envelope[0] != version {
		return nil, ErrOpen
	}
	sender, err := ParsePublic(string(envelope[1 : 1+publicLen]))
	if err != nil {
		return nil, ErrOpen
	}
	payload, err := k.pair.Open(envelope[1+publicLen:], string(sender))
	if err != nil {
		return nil, ErrOpen
	}
	return payload, nil
}
