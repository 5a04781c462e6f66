package tokens

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
)

const (
	// keysFresh is how long fetched keys are used without asking again, so
	// that a key which the issuer withdrew stops working.
	keysFresh = 10 * time.Minute
	// keysUsable is how long they are used while the issuer cannot be reached.
	keysUsable = time.Hour
	// fetchPause is the shortest time between two fetches.
	fetchPause = time.Second
)

// fetchFault tells Verify, through the context, that it was not the token
// that failed.
type fetchFault struct{ err error }

type faultKey struct{}

func noteFault(ctx context.Context, err error) {
	if f, ok := ctx.Value(faultKey{}).(*fetchFault); ok {
		f.err = err
	}
}

// remote is the key set of an issuer found by discovery.
type remote struct {
	url    string
	client *http.Client

	mu      sync.Mutex
	keys    *oidc.RemoteKeySet
	at      time.Time // when keys was made
	failing error     // of the last discovery
	tried   time.Time
}

func newRemote(url string, client *http.Client) *remote {
	paced := *client
	paced.Transport = &pace{next: client.Transport}
	return &remote{url: url, client: &paced}
}

// VerifySignature is called by go-oidc.
func (r *remote) VerifySignature(ctx context.Context, jwt string) ([]byte, error) {
	keys, age, err := r.current(ctx)
	if err != nil {
		noteFault(ctx, err)
		return nil, err
	}
	if age < keysFresh {
		return r.try(ctx, keys, jwt)
	}
	next, err := r.discover(ctx)
	if err == nil {
		var payload []byte
		if payload, err = next.VerifySignature(ctx, jwt); err == nil || !isFetch(err) {
			r.replace(next)
			return payload, err
		}
	}
	if age < keysUsable {
		return r.try(ctx, keys, jwt)
	}
	noteFault(ctx, err)
	return nil, err
}

func (r *remote) try(ctx context.Context, keys *oidc.RemoteKeySet, jwt string) ([]byte, error) {
	payload, err := keys.VerifySignature(ctx, jwt)
	if err != nil && isFetch(err) && !errors.Is(err, errTooSoon) {
		noteFault(ctx, err)
	}
	// Fetched less than a second ago and the key was not there: it is not the
	// issuer's.
	return payload, err
}

// isFetch tells go-oidc's failure to get keys from its failure to verify.
func isFetch(err error) bool { return strings.HasPrefix(err.Error(), "fetching keys") }

func (r *remote) replace(keys *oidc.RemoteKeySet) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys, r.at = keys, time.Now()
}

// current returns the keys, after a discovery if there are none yet.
func (r *remote) current(ctx context.Context) (*oidc.RemoteKeySet, time.Duration, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keys != nil {
		return r.keys, time.Since(r.at), nil
	}
	if r.failing != nil && time.Since(r.tried) < fetchPause {
		return nil, 0, r.failing
	}
	keys, err := r.discover(ctx)
	r.failing, r.tried = err, time.Now()
	if err != nil {
		return nil, 0, err
	}
	r.keys, r.at = keys, time.Now()
	return keys, 0, nil
}

// discover reads the issuer's discovery document, which must name the issuer
// byte for byte.
func (r *remote) discover(ctx context.Context) (*oidc.RemoteKeySet, error) {
	ctx = oidc.ClientContext(ctx, r.client)
	p, err := oidc.NewProvider(ctx, r.url)
	if err != nil {
		return nil, err
	}
	var doc struct {
		JWKS string `json:"jwks_uri"`
	}
	if err := p.Claims(&doc); err != nil {
		return nil, err
	}
	if err := checkURL(doc.JWKS); err != nil {
		return nil, err
	}
	return oidc.NewRemoteKeySet(oidc.ClientContext(context.Background(), r.client), doc.JWKS), nil
}

var (
	errTooSoon = errors.New("the keys were fetched a moment ago")
	errFailing = errors.New("fetching the keys failed a moment ago")
)

// pace lets one request to each address through per fetchPause. In between it
// says whether the last one went well.
type pace struct {
	next http.RoundTripper
	mu   sync.Mutex
	last map[string]fetched
}

type fetched struct {
	at time.Time
	ok bool
}

func (p *pace) RoundTrip(r *http.Request) (*http.Response, error) {
	address := r.URL.String()
	p.mu.Lock()
	last := p.last[address]
	if soon := time.Since(last.at) < fetchPause; soon {
		p.mu.Unlock()
		if last.ok {
			return nil, errTooSoon
		}
		return nil, errFailing
	}
	p.note(address, fetched{time.Now(), false})
	p.mu.Unlock()
	next := p.next
	if next == nil {
		next = http.DefaultTransport
	}
	resp, err := next.RoundTrip(r)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.note(address, fetched{time.Now(), err == nil && resp.StatusCode == http.StatusOK})
	return resp, err
}

func (p *pace) note(address string, f fetched) {
	if p.last == nil {
		p.last = map[string]fetched{}
	}
	p.last[address] = f
}
