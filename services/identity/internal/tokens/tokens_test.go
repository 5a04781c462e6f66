package tokens

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// idp is a real OIDC issuer on a loopback address.
type idp struct {
	*httptest.Server
	keys    atomic.Pointer[jose.JSONWebKeySet]
	fetches atomic.Int32
	down    atomic.Bool
	claimed string // issuer in the discovery document, default its URL
}

func newIDP(t *testing.T, keys ...jose.JSONWebKey) *idp {
	t.Helper()
	p := &idp{}
	p.keys.Store(&jose.JSONWebKeySet{Keys: keys})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		iss := p.claimed
		if iss == "" {
			iss = p.URL
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"issuer": iss, "jwks_uri": p.URL + "/jwks"})
	})
	mux.HandleFunc("GET /jwks", func(w http.ResponseWriter, _ *http.Request) {
		p.fetches.Add(1)
		if p.down.Load() {
			http.Error(w, "down", http.StatusServiceUnavailable)
			return
		}
		_ = json.NewEncoder(w).Encode(p.keys.Load())
	})
	p.Server = httptest.NewServer(mux)
	t.Cleanup(p.Close)
	return p
}

func public(kid string, key crypto.PublicKey) jose.JSONWebKey {
	return jose.JSONWebKey{Key: key, KeyID: kid, Use: "sig"}
}

func mint(t *testing.T, alg jose.SignatureAlgorithm, kid string, key any, claims map[string]any) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: jose.JSONWebKey{Key: key, KeyID: kid}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(claims)
	if err != nil {
		t.Fatal(err)
	}
	jws, err := signer.Sign(raw)
	if err != nil {
		t.Fatal(err)
	}
	token, err := jws.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func claims(iss string) map[string]any {
	return map[string]any{"iss": iss, "sub": "alice", "aud": []string{"a", "b"}, "exp": 2000000000, "iat": 1900000000, "nbf": 1900000001}
}

func verifier(t *testing.T, issuers ...Issuer) *Verifier {
	t.Helper()
	v, err := New(issuers, nil)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func wantKind(t *testing.T, err error, want errkind.Kind) {
	t.Helper()
	if got := errs.Kind(err); got != want {
		t.Errorf("kind %v (%v), want %v", got, err, want)
	}
}

func TestEveryAllowedAlgorithm(t *testing.T) {
	rk, _ := rsa.GenerateKey(rand.Reader, 2048)
	ek, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	dp, dk, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("r", &rk.PublicKey), public("e", &ek.PublicKey), public("d", dp))
	v := verifier(t, Issuer{URL: p.URL})
	for _, c := range []struct {
		alg jose.SignatureAlgorithm
		kid string
		key any
	}{{jose.RS256, "r", rk}, {jose.ES256, "e", ek}, {jose.EdDSA, "d", dk}} {
		tok, err := v.Verify(t.Context(), mint(t, c.alg, c.kid, c.key, claims(p.URL)))
		if err != nil {
			t.Fatalf("%s: %v", c.alg, err)
		}
		if tok.Issuer != p.URL || tok.Subject != "alice" || len(tok.Audience) != 2 || tok.Expires.Unix() != 2000000000 ||
			tok.IssuedAt.Unix() != 1900000000 || tok.NotBefore.Unix() != 1900000001 {
			t.Errorf("%s: %+v", c.alg, tok)
		}
	}
	_, err := v.Verify(t.Context(), mint(t, jose.PS256, "r", rk, claims(p.URL)))
	wantKind(t, err, errkind.Unauthenticated)
	_, err = v.Verify(t.Context(), mint(t, jose.HS256, "r", []byte(strings.Repeat("k", 32)), claims(p.URL)))
	wantKind(t, err, errkind.Unauthenticated)
}

func TestForeignTokens(t *testing.T) {
	dp, dk, _ := ed25519.GenerateKey(rand.Reader)
	_, evil, _ := ed25519.GenerateKey(rand.Reader)
	p, other := newIDP(t, public("d", dp)), newIDP(t, public("d", dp))
	v := verifier(t, Issuer{URL: p.URL})
	good := mint(t, jose.EdDSA, "d", dk, claims(p.URL))
	for name, token := range map[string]string{
		"another key":           mint(t, jose.EdDSA, "d", evil, claims(p.URL)),
		"unknown key":           mint(t, jose.EdDSA, "x", evil, claims(p.URL)),
		"unregistered issuer":   mint(t, jose.EdDSA, "d", dk, claims(other.URL)),
		"issuer with a slash":   mint(t, jose.EdDSA, "d", dk, claims(p.URL+"/")),
		"no issuer":             mint(t, jose.EdDSA, "d", dk, map[string]any{"sub": "a"}),
		"nbf is text":           mint(t, jose.EdDSA, "d", dk, map[string]any{"iss": p.URL, "nbf": "soon"}),
		"not a JWT":             "hello",
		"empty":                 "",
		"cut":                   good[:len(good)-3],
		"claims of other token": strings.Split(good, ".")[0] + "." + strings.Split(mint(t, jose.EdDSA, "d", evil, map[string]any{"iss": p.URL, "sub": "bob"}), ".")[1] + "." + strings.Split(good, ".")[2],
		"too large":             strings.Repeat("a", MaxBytes+1),
		"alg none":              "eyJhbGciOiJub25lIn0." + strings.Split(good, ".")[1] + ".",
	} {
		_, err := v.Verify(t.Context(), token)
		if errs.Kind(err) != errkind.Unauthenticated {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && len(token) > 10 && strings.Contains(err.Error(), token) {
			t.Errorf("%s: the error quotes the token", name)
		}
	}
	if _, err := v.Verify(t.Context(), good); err != nil {
		t.Errorf("a good token after them: %v", err)
	}
}

func TestForgedKeyNamesDoNotFloodTheIssuer(t *testing.T) {
	dp, dk, _ := ed25519.GenerateKey(rand.Reader)
	_, evil, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("d", dp))
	v := verifier(t, Issuer{URL: p.URL})
	good, forged := mint(t, jose.EdDSA, "d", dk, claims(p.URL)), mint(t, jose.EdDSA, "x", evil, claims(p.URL))
	for range 50 {
		if _, err := v.Verify(t.Context(), good); err != nil {
			t.Fatal(err)
		}
		_, err := v.Verify(t.Context(), forged)
		wantKind(t, err, errkind.Unauthenticated)
	}
	if n := p.fetches.Load(); n > 2 {
		t.Errorf("the key set was fetched %d times", n)
	}
}

func TestAnIssuerThatIsDownIsUnavailableNotAForgery(t *testing.T) {
	dp, dk, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("d", dp))
	p.down.Store(true)
	v := verifier(t, Issuer{URL: p.URL}, Issuer{URL: "http://127.0.0.1:1"})
	token := mint(t, jose.EdDSA, "d", dk, claims(p.URL))
	for range 2 {
		_, err := v.Verify(t.Context(), token)
		wantKind(t, err, errkind.Unavailable)
	}
	_, err := v.Verify(t.Context(), mint(t, jose.EdDSA, "d", dk, claims("http://127.0.0.1:1")))
	wantKind(t, err, errkind.Unavailable)
}

func TestRotatedKeyIsFetched(t *testing.T) {
	p1, k1, _ := ed25519.GenerateKey(rand.Reader)
	p2, k2, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("one", p1))
	v := verifier(t, Issuer{URL: p.URL})
	if _, err := v.Verify(t.Context(), mint(t, jose.EdDSA, "one", k1, claims(p.URL))); err != nil {
		t.Fatal(err)
	}
	p.keys.Store(&jose.JSONWebKeySet{Keys: []jose.JSONWebKey{public("one", p1), public("two", p2)}})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for {
		_, err := v.Verify(ctx, mint(t, jose.EdDSA, "two", k2, claims(p.URL)))
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
}

func TestDiscoveryMustNameTheIssuer(t *testing.T) {
	dp, dk, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("d", dp))
	p.claimed = "https://somebody-else"
	_, err := verifier(t, Issuer{URL: p.URL}).Verify(t.Context(), mint(t, jose.EdDSA, "d", dk, claims(p.URL)))
	wantKind(t, err, errkind.Unavailable)
}

func TestStaticKeySet(t *testing.T) {
	dp, dk, _ := ed25519.GenerateKey(rand.Reader)
	raw, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{public("d", dp)}})
	path := filepath.Join(t.TempDir(), "jwks.json")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	v := verifier(t, Issuer{URL: "https://idp.example", JWKSFile: path})
	if _, err := v.Verify(t.Context(), mint(t, jose.EdDSA, "d", dk, claims("https://idp.example"))); err != nil {
		t.Fatal(err)
	}
}

func TestNewRefuses(t *testing.T) {
	private, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: []byte("secret"), KeyID: "s"}}})
	path := filepath.Join(t.TempDir(), "jwks.json")
	_ = os.WriteFile(path, private, 0o600)
	for name, i := range map[string]Issuer{
		"plain http":        {URL: "http://idp.example"},
		"no URL":            {URL: "idp"},
		"with a password":   {URL: "https://u:p@idp.example"},
		"shared secret alg": {URL: "https://idp.example", Algs: []string{"HS256"}},
		"alg none":          {URL: "https://idp.example", Algs: []string{"none"}},
		"no such file":      {URL: "https://idp.example", JWKSFile: "/does/not/exist"},
		"no public key":     {URL: "https://idp.example", JWKSFile: path},
	} {
		if _, err := New([]Issuer{i}, nil); errs.Kind(err) != errkind.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func BenchmarkVerifyEdDSA(b *testing.B) { benchmark(b, jose.EdDSA) }
func BenchmarkVerifyRS256(b *testing.B) { benchmark(b, jose.RS256) }

func benchmark(b *testing.B, alg jose.SignatureAlgorithm) {
	t := &testing.T{}
	dp, dk, _ := ed25519.GenerateKey(rand.Reader)
	rk, _ := rsa.GenerateKey(rand.Reader, 2048)
	raw, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{public("d", dp), public("d", &rk.PublicKey)}})
	path := filepath.Join(b.TempDir(), "jwks.json")
	_ = os.WriteFile(path, raw, 0o600)
	v, err := New([]Issuer{{URL: "https://idp.example", JWKSFile: path}}, nil)
	if err != nil {
		b.Fatal(err)
	}
	var key any = dk
	if alg == jose.RS256 {
		key = rk
	}
	token := mint(t, alg, "d", key, claims("https://idp.example"))
	for b.Loop() {
		if _, err := v.verify(context.Background(), token); err != nil {
			b.Fatal(err)
		}
	}
}

func TestAVerificationCountsForAWhileOnlyForThatToken(t *testing.T) {
	dp, dk, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("d", dp))
	v := verifier(t, Issuer{URL: p.URL})
	token := mint(t, jose.EdDSA, "d", dk, claims(p.URL))
	for range 2 {
		if _, err := v.Verify(t.Context(), token); err != nil {
			t.Fatal(err)
		}
	}
	changed := []byte(token)
	if i := len(changed) - 20; changed[i] == 'A' { // within the signature
		changed[i] = 'B'
	} else {
		changed[i] = 'A'
	}
	_, err := v.Verify(t.Context(), string(changed))
	wantKind(t, err, errkind.Unauthenticated)
}
