package grant

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
)

// Domains keep a signature made for one purpose from serving another.
const (
	domainOpening = "berth/v1/proof/opening"
	domainRenewal = "berth/v1/proof/renewal"
)

// Opening is what a client signs to open a data-plane stream.
type Opening struct {
	// Subject is the bus subject that the request goes to. A host fills in
	// the subject that the message really came by.
	Subject string
	// Nonce is 16 random bytes, never used twice.
	Nonce []byte
	Time  time.Time
	// Operation is the encoded operation, byte for byte.
	Operation []byte
	// Deliver is the subject that frames are published on.
	Deliver string
	// ReplyKey is the curve key that the answer is sealed to.
	ReplyKey string
	Grant    string
}

// Renewal is what a client signs to renew a grant.
type Renewal struct {
	RequestID string
	Grant     string
	// Time is that of the envelope which carries the renewal.
	Time time.Time
}

// SigningInput returns the bytes that are signed: domain, subject, nonce,
// time, SHA-256 of the operation, deliver subject, reply key and SHA-256 of
// the grant, each with its length before it.
func (o Opening) SigningInput() []byte {
	op, grant := sha256.Sum256(o.Operation), sha256.Sum256([]byte(o.Grant))
	return prefixed([]byte(domainOpening), []byte(o.Subject), o.Nonce, nanos(o.Time), op[:],
		[]byte(o.Deliver), []byte(o.ReplyKey), grant[:])
}

// SigningInput returns the bytes that are signed: domain, request id,
// SHA-256 of the grant and time, each with its length before it.
func (r Renewal) SigningInput() []byte {
	grant := sha256.Sum256([]byte(r.Grant))
	return prefixed([]byte(domainRenewal), []byte(r.RequestID), grant[:], nanos(r.Time))
}

// Sign makes the proof of an opening.
func (o Opening) Sign(key ed25519.PrivateKey) []byte { return ed25519.Sign(key, o.SigningInput()) }

// Sign makes the proof of a renewal.
func (r Renewal) Sign(key ed25519.PrivateKey) []byte { return ed25519.Sign(key, r.SigningInput()) }

// Verify checks the proof and its age at now. It does not check the grant
// nor whether the nonce is new: Verifier.Open does all of it.
func (o Opening) Verify(key ed25519.PublicKey, proof []byte, now time.Time) error {
	if len(o.Nonce) != NonceBytes {
		return refuse(errkind.Invalid, "the nonce is %d bytes long, it must be %d", len(o.Nonce), NonceBytes)
	}
	return verifyProof(key, o.SigningInput(), proof, o.Time, now)
}

// Verify checks the proof and its age at now.
func (r Renewal) Verify(key ed25519.PublicKey, proof []byte, now time.Time) error {
	return verifyProof(key, r.SigningInput(), proof, r.Time, now)
}

// Open checks all that an opening must satisfy: the grant, its exact match
// with want, the proof by the key that the grant names, its age, and that the
// nonce was not seen before. The nonce is spent only when all else is good.
func (v *Verifier) Open(o Opening, proof []byte, want Binding, seen *Replay, now time.Time) (Claims, error) {
	c, err := v.Verify(o.Grant, want, now)
	if err != nil {
		return Claims{}, err
	}
	key, err := c.ProofKey()
	if err != nil {
		return Claims{}, err
	}
	if err := o.Verify(key, proof, now); err != nil {
		return Claims{}, err
	}
	if err := seen.Spend(string(c.Session), o.Nonce, now); err != nil {
		return Claims{}, err
	}
	return c, nil
}

func verifyProof(key ed25519.PublicKey, input, proof []byte, at, now time.Time) error {
	if len(key) != ed25519.PublicKeySize || len(proof) != ed25519.SignatureSize || !ed25519.Verify(key, input, proof) {
		return refuse(errkind.Unauthenticated, "the request is not signed with the key that the grant names")
	}
	if at.After(now.Add(Skew)) {
		return refuse(errkind.Unauthenticated, "the request is dated in the future")
	}
	if now.Sub(at) > MaxProofAge {
		return refuse(errkind.Expired, "the request is older than %s", MaxProofAge)
	}
	return nil
}

func nanos(t time.Time) []byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(t.Unix()))
	return binary.BigEndian.AppendUint32(b, uint32(t.Nanosecond()))
}

func prefixed(fields ...[]byte) []byte {
	n := 0
	for _, f := range fields {
		n += 4 + len(f)
	}
	out := make([]byte, 0, n)
	for _, f := range fields {
		out = binary.BigEndian.AppendUint32(out, uint32(len(f)))
		out = append(out, f...)
	}
	return out
}

// replayWindow is the longest time in which a proof can be used again: its
// own age and a clock that runs ahead.
const replayWindow = MaxProofAge + Skew

// Replay remembers nonces for as long as a proof with them could be accepted
// again: at least 150 s, at most twice that. It is bounded, for each scope
// and in all; when full it refuses, so that no proof is ever accepted twice.
type Replay struct {
	mu        sync.Mutex
	max       int
	maxScope  int
	turned    time.Time
	now, last bucket
}

type nonce [NonceBytes]byte

type bucket struct {
	n      int
	scopes map[string]map[nonce]struct{}
}

func newBucket() bucket { return bucket{scopes: map[string]map[nonce]struct{}{}} }

func (b bucket) has(scope string, n nonce) bool {
	_, ok := b.scopes[scope][n]
	return ok
}

// NewReplay makes a memory of at most max nonces, at most perScope of them
// for one scope (a session), so that one user cannot lock out another.
func NewReplay(max, perScope int) *Replay {
	return &Replay{max: max, maxScope: perScope, now: newBucket(), last: newBucket()}
}

// Spend records a nonce, or refuses it: Unauthenticated if it was seen
// before, Exhausted if the memory is full.
func (r *Replay) Spend(scope string, raw []byte, now time.Time) error {
	if len(raw) != NonceBytes {
		return refuse(errkind.Invalid, "the nonce is %d bytes long, it must be %d", len(raw), NonceBytes)
	}
	n := nonce(raw)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turn(now)
	if r.now.has(scope, n) || r.last.has(scope, n) {
		return refuse(errkind.Unauthenticated, "this very request was made before")
	}
	if len(r.now.scopes[scope])+len(r.last.scopes[scope]) >= r.maxScope || r.now.n+r.last.n >= r.max {
		return refuse(errkind.Exhausted, "too many streams were opened in the last minutes; try again later")
	}
	if r.now.scopes[scope] == nil {
		r.now.scopes[scope] = map[nonce]struct{}{}
	}
	r.now.scopes[scope][n] = struct{}{}
	r.now.n++
	return nil
}

// turn starts a new bucket when the current one is a window old. A clock
// that jumps back only makes it remember longer.
func (r *Replay) turn(now time.Time) {
	switch age := now.Sub(r.turned); {
	case r.turned.IsZero():
		r.turned = now
	case age >= 2*replayWindow:
		r.now, r.last, r.turned = newBucket(), newBucket(), now
	case age >= replayWindow:
		r.last, r.now, r.turned = r.now, newBucket(), now
	}
}
