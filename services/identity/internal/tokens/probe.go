package tokens

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/go-jose/go-jose/v4"
)

// Probed is an issuer with its keys of just now. It is for an operator who asks; nothing paces it.
type Probed struct {
	// Keys names those that can verify a token of the issuer ("RS256 key-1").
	Keys []string

	issuer string
	keys   []jose.JSONWebKey
	algs   []string
	verify *Verifier
}

// Steps of Examine.
const (
	StepToken     = "token"     // it is a JWT that can be read in one way
	StepIssuer    = "issuer"    // it names the issuer that was probed
	StepSignature = "signature" // it is signed with a key of the issuer
	StepClaims    = "claims"    // what is signed can be used
)

// Probe gets an issuer's keys now, whatever is cached. Kinds: Invalid when the issuer cannot be used as it is
// registered, Unavailable when its keys cannot be fetched.
func Probe(ctx context.Context, i Issuer) (*Probed, error) {
	v, err := New([]Issuer{i}, nil)
	if err != nil {
		return nil, err
	}
	p := &Probed{issuer: i.URL, algs: i.Algs, verify: v}
	switch set := v.issuers[i.URL].keys.(type) {
	case static:
		p.keys = set.keys
	case *remote:
		if p.keys, err = set.fetch(ctx); err != nil {
			return nil, errs.E("fetch keys", errkind.Unavailable, "", err)
		}
	}
	if len(p.algs) == 0 {
		p.algs = Algs
	}
	for _, k := range p.keys {
		if k.Algorithm == "" || slices.Contains(p.algs, k.Algorithm) {
			p.Keys = append(p.Keys, fmt.Sprintf("%s %s", cmp.Or(k.Algorithm, fmt.Sprintf("%T", k.Key)), cmp.Or(k.KeyID, "(no name)")))
		}
	}
	if len(p.Keys) == 0 {
		return nil, errs.Errorf("fetch keys", errkind.Invalid, "none of its %d keys is for an algorithm that is allowed", len(p.keys))
	}
	return p, nil
}

// Examine verifies a token as Verify does, and with an error says which step failed. No error quotes anything of
// the token but the algorithm and the name of the key in its header.
func (p *Probed) Examine(ctx context.Context, raw string) (tok Token, step string, err error) {
	const op = "examine token"
	iss, _, err := unverified(raw)
	switch {
	case errors.Is(err, errUnsigned):
		return Token{}, StepSignature, errs.E(op, errkind.Unauthenticated, "", err)
	case err != nil:
		return Token{}, StepToken, errs.E(op, errkind.Unauthenticated, "", err)
	case iss != p.issuer:
		return Token{}, StepIssuer, errs.E(op, errkind.Unauthenticated, "", "the token names another issuer than the one that is tested")
	}
	tok, err = p.verify.Verify(ctx, raw)
	switch {
	case err == nil:
		return tok, StepClaims, nil
	case !errors.Is(err, errUnsigned) && !errs.Is(err, errkind.Unavailable):
		return Token{}, StepClaims, err
	}
	if why := p.unfit(raw); why != "" {
		return Token{}, StepSignature, errs.E(op, errkind.Unauthenticated, "", why)
	}
	if errs.Is(err, errkind.Unavailable) {
		return Token{}, StepSignature, err
	}
	return Token{}, StepClaims, errs.E(op, errkind.Unauthenticated, "", "the token is signed by its issuer, and its claims are malformed")
}

// unfit says why no key fits the signature of a token; it is empty when one does.
func (p *Probed) unfit(raw string) string {
	var h struct{ Alg, Kid string }
	head, _, _ := strings.Cut(raw, ".")
	part, err := base64.RawURLEncoding.DecodeString(head)
	if err != nil || json.Unmarshal(part, &h) != nil {
		return "the token's header names algorithm or key by something that is no text"
	}
	said := fmt.Sprintf("the token's header says alg %s and kid %s", quoted(h.Alg), quoted(h.Kid))
	if !slices.Contains(p.algs, h.Alg) {
		return fmt.Sprintf("%s; allowed are %s", said, strings.Join(p.algs, ", "))
	}
	jws, err := jose.ParseSigned(raw, []jose.SignatureAlgorithm{jose.SignatureAlgorithm(h.Alg)})
	if err != nil {
		return said + "; the token is malformed"
	}
	if _, ok := fits(p.keys, jws); ok {
		return ""
	}
	switch of := slices.IndexFunc(p.keys, func(k jose.JSONWebKey) bool { return k.KeyID == h.Kid }); {
	case h.Kid == "":
		return said + "; none of the issuer's keys fits the signature"
	case of < 0:
		return said + "; the issuer's key set has no key of that kid"
	case p.keys[of].Algorithm != "" && p.keys[of].Algorithm != h.Alg:
		return fmt.Sprintf("%s; the issuer's key of that kid is for %s", said, p.keys[of].Algorithm)
	}
	return said + "; the issuer's key set has that kid, but the signature is not by it"
}

// quoted is a short text of a header, made fit for a screen.
func quoted(s string) string {
	const most = 100
	if s == "" {
		return "(none)"
	}
	if len(s) > most {
		return fmt.Sprintf("%q and more", s[:most])
	}
	return fmt.Sprintf("%q", s)
}
