// Package grant holds what a grant is, how it is checked, and how its holder
// proves that it is the one the grant was made for.
//
// A grant is a compact JWS (EdDSA over Ed25519, type berth-grant+jwt) for one
// session, generation, epoch, host and set of verbs, and names the proof key of
// the client that asked (RFC 7800). The package guarantees: a token is read only after
// its signature was checked with a key of the key set; no algorithm but EdDSA
// and no header parameter but alg, kid and typ is accepted; every match of
// tenant, session, generation, epoch and host is exact; and a grant without
// the proof key opens nothing. All functions are safe for concurrent use and
// do no I/O, except Feed, which calls the function that it was given.
//
// Releases: a host of a release without verbs refuses grants that have them, so
// hosts are replaced before credentials. A grant without verbs, of a credentials
// that is not replaced yet, is read as one for exec, files and ports.
package grant

import (
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	// Type is the typ header of a grant.
	Type = "berth-grant+jwt"
	// Issuer is the iss claim of every grant.
	Issuer = "urn:berth:credentials"
	// MaxBytes bounds a grant in its compact form.
	MaxBytes = 4096
	// Skew is how far a clock may run ahead of ours.
	Skew = 30 * time.Second
	// MaxProofAge is how old a proof may be when it is checked.
	MaxProofAge = 2 * time.Minute
	// NonceBytes is the length of the nonce of an opening.
	NonceBytes = 16
)

// Error is a refusal: a kind for programs, a sentence for people. It quotes
// nothing of the token.
type Error struct {
	Kind   errkind.Kind
	Reason string
}

// Error returns the sentence.
func (e *Error) Error() string { return e.Reason }

// ErrKind returns the kind, for whoever classifies errors by it.
func (e *Error) ErrKind() errkind.Kind { return e.Kind }

// KindOf returns the kind of an error of this package, Internal for any
// other and OK for nil.
func KindOf(err error) errkind.Kind {
	if err == nil {
		return errkind.OK
	}
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Kind
	}
	return errkind.Internal
}

func refuse(kind errkind.Kind, format string, args ...any) error {
	return &Error{Kind: kind, Reason: fmt.Sprintf(format, args...)}
}
