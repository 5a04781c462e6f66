package tokens

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4"
)

// pace is how often keys are fetched and how long they are used.
type pace struct {
	// fresh is how long fetched keys are used without asking again, so that a
	// key which the issuer withdrew stops working; at half of it they are
	// fetched again beside the requests.
	fresh time.Duration
	// usable is how long they are used while the issuer cannot be reached.
	usable time.Duration
	// pause is the shortest time between two fetches; it doubles with each
	// that fails, up to longest.
	pause, longest time.Duration
	// fetch bounds one fetch, wait how long a token waits for one, waiting how
	// many tokens wait at once, and names how many names of unknown keys they
	// may have: everybody's tokens name one new key when an issuer changes its
	// own, only forged ones name many.
	fetch, wait    time.Duration
	waiting, names int
}

var usual = pace{
	fresh: 10 * time.Minute, usable: time.Hour, pause: time.Second, longest: 30 * time.Second,
	fetch: 5 * time.Second, wait: 3 * time.Second, waiting: 256, names: 64,
}

// fetchFault tells Verify, through the context, that it was not the token
// that failed.
type fetchFault struct{ err error }

type faultKey struct{}

func noteFault(ctx context.Context, err error) error {
	if f, ok := ctx.Value(faultKey{}).(*fetchFault); ok {
		f.err = err
	}
	return err
}

// remote is the key set of an issuer found by discovery. However many tokens
// with unknown keys come, one fetch runs at a time, and at most one begins per
// pause; a token with a key that was just published waits for the next.
type remote struct {
	url    string
	client *http.Client
	algs   []jose.SignatureAlgorithm
	pace   pace

	mu      sync.Mutex
	keys    []jose.JSONWebKey
	at      time.Time // when the fetch of keys began
	missing map[string]bool
	flight  *flight   // the fetch under way or the one to come, if there is one
	last    time.Time // when the last fetch began
	ended   time.Time // when the last one that has ended began
	failed  int       // fetches in a row
	err     error     // of the last fetch
	waiting int
	unknown map[string]int // how many wait for the key of this name
	jwks    string         // address of the keys
	found   time.Time
}

// flight is one fetch.
type flight struct{ done chan struct{} }

var (
	errForged  = errors.New("no key of the issuer fits")
	errPacing  = errors.New("the keys are fetched, and too many tokens wait for them")
	errWaiting = errors.New("fetching the keys takes too long")
)

// VerifySignature is called by go-oidc.
func (r *remote) VerifySignature(ctx context.Context, jwt string) ([]byte, error) {
	jws, err := jose.ParseSigned(jwt, r.algs)
	if err != nil {
		return nil, errForged
	}
	keys, err := r.current(ctx)
	if err != nil {
		return nil, noteFault(ctx, err)
	}
	if payload, ok := fits(keys, jws); ok {
		return payload, nil
	}
	return r.search(ctx, jws)
}

// fits tries the keys that a signature may be of.
func fits(keys []jose.JSONWebKey, jws *jose.JSONWebSignature) ([]byte, bool) {
	h := jws.Signatures[0].Header
	for i := range keys {
		k := &keys[i]
		if h.KeyID != "" && k.KeyID != "" && k.KeyID != h.KeyID || k.Algorithm != "" && k.Algorithm != h.Algorithm {
			continue
		}
		if payload, err := jws.Verify(k.Key); err == nil {
			return payload, true
		}
	}
	return nil, false
}

// current returns the keys. It waits for a fetch if there are none that may be
// used, and once if they are no longer fresh.
func (r *remote) current(ctx context.Context) ([]jose.JSONWebKey, error) {
	r.mu.Lock()
	age := time.Since(r.at)
	had, usable := r.keys, r.keys != nil && age < r.pace.usable
	if usable && age < r.pace.fresh/2 {
		r.mu.Unlock()
		return had, nil
	}
	if r.failed > 0 && time.Since(r.last) < r.backoff() {
		err := r.err
		r.mu.Unlock()
		if usable {
			return had, nil
		}
		return nil, err
	}
	tried := r.failed > 0
	f := r.fly()
	r.mu.Unlock()
	if usable && (tried || age < r.pace.fresh) {
		return had, nil
	}
	err := r.await(ctx, f)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.keys != nil && time.Since(r.at) < r.pace.usable:
		return r.keys, nil
	case err != nil:
		return nil, err
	}
	return nil, r.err
}

// search looks for the key of a signature that no key at hand fits, in a
// fetch that begins after now. Who signs with a key before it is published has
// to wait or to try again.
func (r *remote) search(ctx context.Context, jws *jose.JSONWebSignature) ([]byte, error) {
	kid := jws.Signatures[0].Header.KeyID
	asked := time.Now()
	var tried time.Time
	for {
		r.mu.Lock()
		if r.at.After(tried) { // keys of a fetch that began earlier may hold it as well
			keys := r.keys
			tried = r.at
			r.mu.Unlock()
			if payload, ok := fits(keys, jws); ok {
				return payload, nil
			}
			continue
		}
		if r.ended.After(asked) {
			err := r.err
			if err == nil && len(r.missing) < maxMissing {
				r.missing[kid] = true
			}
			r.mu.Unlock()
			if err != nil {
				return nil, noteFault(ctx, err)
			}
			return nil, errForged
		}
		soon := r.flight == nil && time.Since(r.last) < r.backoff()
		if soon && r.failed > 0 {
			err := r.err
			r.mu.Unlock()
			return nil, noteFault(ctx, err)
		}
		if soon && (r.missing[kid] || r.has(kid)) {
			// It was not there a moment ago, or it is and does not fit.
			r.mu.Unlock()
			return nil, errForged
		}
		if r.unknown[kid] == 0 && len(r.unknown) >= r.pace.names {
			r.mu.Unlock()
			return nil, noteFault(ctx, errPacing)
		}
		r.unknown[kid]++
		f := r.fly()
		r.mu.Unlock()
		err := r.await(ctx, f)
		r.mu.Lock()
		if r.unknown[kid]--; r.unknown[kid] == 0 {
			delete(r.unknown, kid)
		}
		r.mu.Unlock()
		if err != nil {
			return nil, noteFault(ctx, err)
		}
	}
}

// maxMissing bounds the names of keys that are known not to exist.
const maxMissing = 1024

func (r *remote) has(kid string) bool {
	for i := range r.keys {
		if k := r.keys[i].KeyID; k == kid || k == "" {
			return true
		}
	}
	return false
}

// backoff is how long after the last fetch the next may begin.
func (r *remote) backoff() time.Duration {
	d := r.pace.pause
	for range min(r.failed, 16) {
		d = min(2*d, r.pace.longest)
	}
	return d
}

// fly joins the fetch under way, or has one begin as soon as it may.
func (r *remote) fly() *flight {
	if r.flight != nil {
		return r.flight
	}
	f := &flight{done: make(chan struct{})}
	r.flight = f
	go func() {
		r.mu.Lock()
		wait := r.backoff() - time.Since(r.last)
		r.mu.Unlock()
		time.Sleep(wait)
		r.mu.Lock()
		began := time.Now()
		r.last = began
		r.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), r.pace.fetch)
		defer cancel()
		keys, err := r.fetch(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ended = began
		if r.err = err; err != nil {
			r.failed++
		} else {
			r.failed, r.keys, r.at, r.missing = 0, keys, began, map[string]bool{}
		}
		r.flight = nil
		close(f.done)
	}()
	return f
}

// await waits for a fetch to end, however it ends.
func (r *remote) await(ctx context.Context, f *flight) error {
	r.mu.Lock()
	if r.waiting >= r.pace.waiting {
		r.mu.Unlock()
		return errPacing
	}
	r.waiting++
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.waiting--
		r.mu.Unlock()
	}()
	timer := time.NewTimer(r.pace.wait)
	defer timer.Stop()
	select {
	case <-f.done:
		return nil
	case <-timer.C:
		return errWaiting
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fetch gets the keys, after a discovery if the last is no longer fresh.
func (r *remote) fetch(ctx context.Context) ([]jose.JSONWebKey, error) {
	if r.jwks == "" || time.Since(r.found) >= r.pace.fresh {
		address, err := r.discover(ctx)
		if err != nil {
			r.jwks = ""
			return nil, brief(err)
		}
		r.jwks, r.found = address, time.Now()
	}
	raw, err := get(ctx, r.client, r.jwks)
	if err == nil {
		var keys []jose.JSONWebKey
		if keys, err = parseJWKS(raw); err == nil {
			return keys, nil
		}
	}
	r.jwks = "" // it may have moved
	return nil, brief(err)
}

// discover reads the issuer's discovery document, which must name the issuer
// byte for byte, and returns where its keys are.
func (r *remote) discover(ctx context.Context) (string, error) {
	p, err := oidc.NewProvider(oidc.ClientContext(ctx, r.client), r.url)
	if err != nil {
		return "", err
	}
	var doc struct {
		JWKS string `json:"jwks_uri"`
	}
	if err := p.Claims(&doc); err != nil {
		return "", err
	}
	return doc.JWKS, checkFetch(doc.JWKS)
}

// brief cuts what an error quotes of an answer.
func brief(err error) error {
	const most = 200
	if s := err.Error(); len(s) > most {
		return fmt.Errorf("%.200q and so on", s)
	}
	return err
}
