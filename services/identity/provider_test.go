package identity_test

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity"
)

// provider is an issuer whose every answer and token the test chooses.
type provider struct {
	*httptest.Server
	key *rsa.PrivateKey

	mu      sync.Mutex
	jwks    http.HandlerFunc
	fetches int
}

func newProvider(t testing.TB) *provider {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	must(t, err)
	p := &provider{key: key}
	p.jwks = p.good
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"issuer": p.URL, "jwks_uri": p.URL + "/jwks"})
	})
	mux.HandleFunc("GET /jwks", func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		p.fetches++
		h := p.jwks
		p.mu.Unlock()
		h(w, r)
	})
	p.Server = httptest.NewServer(mux)
	t.Cleanup(p.Close)
	return p
}

func (p *provider) good(w http.ResponseWriter, _ *http.Request) {
	_ = json.NewEncoder(w).Encode(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: p.key.Public(), KeyID: "one", Use: "sig"}}})
}

func (p *provider) answers(h http.HandlerFunc) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.jwks = h
}

func (p *provider) fetched() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.fetches
}

// entry registers the provider for acme.
func (p *provider) entry() identity.Issuer {
	return identity.Issuer{Issuer: p.URL, Audience: "berth", Tenant: "acme", Plan: "default"}
}

// claims are those of a good token, with changes; a nil change takes one away.
func (p *provider) claims(change map[string]any) map[string]any {
	now := time.Now()
	c := map[string]any{"iss": p.URL, "sub": "alice", "aud": "berth", "iat": now.Unix(), "exp": now.Add(time.Hour).Unix()}
	for name, v := range change {
		if c[name] = v; v == nil {
			delete(c, name)
		}
	}
	return c
}

// token is a genuine token of the provider.
func (p *provider) token(t testing.TB, change map[string]any) string {
	t.Helper()
	return signWith(t, jose.RS256, "one", p.key, p.claims(change))
}

func signWith(t testing.TB, alg jose.SignatureAlgorithm, kid string, key any, claims map[string]any) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: jose.JSONWebKey{Key: key, KeyID: kid}}, nil)
	must(t, err)
	raw, err := json.Marshal(claims)
	must(t, err)
	jws, err := signer.Sign(raw)
	must(t, err)
	token, err := jws.CompactSerialize()
	must(t, err)
	return token
}

// byHand signs header and payload byte for byte, with RS256.
func (p *provider) byHand(t testing.TB, header, payload string) string {
	t.Helper()
	in := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))
	h := crypto.SHA256.New()
	h.Write([]byte(in))
	sig, err := rsa.SignPKCS1v15(nil, p.key, crypto.SHA256, h.Sum(nil))
	must(t, err)
	return in + "." + base64.RawURLEncoding.EncodeToString(sig)
}

// records are the audit records as they are stored.
type records struct {
	sub  *nats.Subscription
	seen []*identityv1.Audit
	raw  [][]byte
	on   []string
}

func (w *world) records(t testing.TB) *records {
	t.Helper()
	sub, err := w.operator.NATS().SubscribeSync("berth.v1.audit.identity.*.*")
	must(t, err)
	must(t, w.operator.NATS().Flush())
	return &records{sub: sub}
}

// find waits for a record that fits and returns its place.
func (r *records) find(t testing.TB, what string, fits func(*identityv1.Audit) bool) int {
	t.Helper()
	for i, a := range r.seen {
		if fits(a) {
			return i
		}
	}
	for deadline := time.Now().Add(20 * time.Second); ; {
		msg, err := r.sub.NextMsg(time.Until(deadline))
		if err != nil {
			t.Fatalf("%s: no audit record, %v", what, err)
		}
		a := &identityv1.Audit{}
		must(t, bus.Decode(msg.Data, bus.Protobuf, a))
		r.seen, r.raw, r.on = append(r.seen, a), append(r.raw, msg.Data), append(r.on, msg.Subject)
		if fits(a) {
			return len(r.seen) - 1
		}
	}
}

// newWorldWith is a world with a provider in acme's registry.
func newWorldWith(t testing.TB, p ...*provider) *world {
	t.Helper()
	entries := make([]identity.Issuer, 0, len(p))
	for _, p := range p {
		entries = append(entries, p.entry())
	}
	return newWorldAnd(t, entries...)
}

func newWorldAnd(t testing.TB, entries ...identity.Issuer) *world {
	t.Helper()
	e := bustest.Start(t, frontends...)
	return newWorldOn(t, func(c subjects.Caller) *bus.Conn { return bustest.Connect(t, e, c) }, entries...)
}
