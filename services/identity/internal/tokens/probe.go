package tokens

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/go-jose/go-jose/v4"
)

// Probe gets an issuer's keys now, whatever is cached, and names those that can verify a token of it
// ("RS256 key-1"). Kinds: Invalid when the issuer cannot be used as it is registered, Unavailable when its
// keys cannot be fetched. It is for an operator who asks; nothing paces it.
func Probe(ctx context.Context, i Issuer) ([]string, error) {
	v, err := New([]Issuer{i}, nil)
	if err != nil {
		return nil, err
	}
	t := v.issuers[i.URL]
	var keys []jose.JSONWebKey
	switch set := t.keys.(type) {
	case static:
		keys = set.keys
	case *remote:
		if keys, err = set.fetch(ctx); err != nil {
			return nil, errs.E("fetch keys", errkind.Unavailable, "", err)
		}
	}
	algs := i.Algs
	if len(algs) == 0 {
		algs = Algs
	}
	var out []string
	for _, k := range keys {
		if k.Algorithm == "" || slices.Contains(algs, k.Algorithm) {
			out = append(out, fmt.Sprintf("%s %s", cmp.Or(k.Algorithm, fmt.Sprintf("%T", k.Key)), cmp.Or(k.KeyID, "(no name)")))
		}
	}
	if len(out) == 0 {
		return nil, errs.Errorf("fetch keys", errkind.Invalid, "none of its %d keys is for an algorithm that is allowed", len(keys))
	}
	return out, nil
}
