package tokens

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// raw is an issuer whose key set is answered by a function.
type raw struct {
	*httptest.Server
	fetches atomic.Int32
	mu      sync.Mutex
	answer  http.HandlerFunc
}

func (p *raw) answers(h http.HandlerFunc) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = h
}

func newRaw(t testing.TB, answer http.HandlerFunc) *raw {
	t.Helper()
	p := &raw{answer: answer}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"issuer": p.URL, "jwks_uri": p.URL + "/jwks?p=1"})
	})
	mux.HandleFunc("GET /jwks", func(w http.ResponseWriter, r *http.Request) {
		p.fetches.Add(1)
		p.mu.Lock()
		h := p.answer
		p.mu.Unlock()
		h(w, r)
	})
	p.Server = httptest.NewServer(mux)
	t.Cleanup(p.Close)
	return p
}

func serves(keys ...jose.JSONWebKey) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(jose.JSONWebKeySet{Keys: keys})
	}
}

// paced is a verifier of one issuer with short times.
func paced(t testing.TB, url string, change func(*pace)) *Verifier {
	t.Helper()
	v, err := New([]Issuer{{URL: url}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	change(&v.issuers[url].keys.(*remote).pace)
	return v
}

// eventually waits for a condition that has to come true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 20 s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// TestFloodOfUnknownKeysFetchesAtMostOncePerPause: however many forged tokens
// with however many key names come at once, fetches stay bounded by time, a
// known key is not held up, and most of the flood does not even wait.
func TestFloodOfUnknownKeysFetchesAtMostOncePerPause(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	_, evil, _ := ed25519.GenerateKey(rand.Reader)
	p := newRaw(t, serves(public("d", pub)))
	v := paced(t, p.URL, func(p *pace) { p.pause, p.wait = 100*time.Millisecond, 20*time.Second })
	good := mint(t, jose.EdDSA, "d", key, claims(p.URL))
	if _, err := v.verify(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	p.answers(func(w http.ResponseWriter, r *http.Request) {
		<-release
		serves(public("d", pub))(w, r)
	})
	const flood = 300
	began := time.Now()
	var wg sync.WaitGroup
	var busy, forged atomic.Int32
	for i := range flood {
		token := mint(t, jose.EdDSA, fmt.Sprint("x", i), evil, claims(p.URL))
		wg.Go(func() {
			switch _, err := v.verify(t.Context(), token); errs.Kind(err) {
			case errkind.Unauthenticated:
				forged.Add(1)
			case errkind.Unavailable:
				busy.Add(1)
			}
		})
	}
	eventually(t, "all but those that may wait were sent away", func() bool { return busy.Load() == int32(flood-usual.names) })
	if _, err := v.verify(t.Context(), good); err != nil {
		t.Errorf("a good token amid the flood: %v", err)
	}
	close(release)
	wg.Wait()
	if most := int32(2 + time.Since(began)/(100*time.Millisecond)); p.fetches.Load() > most {
		t.Errorf("%d fetches within %s, want at most %d", p.fetches.Load(), time.Since(began), most)
	}
	if forged.Load() != int32(usual.names) {
		t.Errorf("%d were found forged, want the %d that waited", forged.Load(), usual.names)
	}
}

// TestManyUsersOfANewKeyAllWait: when an issuer changes its key, or identity
// has just started, nobody is sent away because many come at once.
func TestManyUsersOfANewKeyAllWait(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	next, newer, _ := ed25519.GenerateKey(rand.Reader)
	release := make(chan struct{})
	held := func(keys ...jose.JSONWebKey) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			<-release
			serves(keys...)(w, r)
		}
	}
	p := newRaw(t, held(public("one", pub)))
	v := paced(t, p.URL, func(p *pace) { p.wait = 20 * time.Second })
	set := v.issuers[p.URL].keys.(*remote)
	crowd := func(kid string, key ed25519.PrivateKey) {
		t.Helper()
		const users = 200
		failed := make(chan error, users)
		for i := range users {
			c := claims(p.URL)
			c["sub"] = fmt.Sprint("user", i)
			token := mint(t, jose.EdDSA, kid, key, c)
			go func() {
				_, err := v.verify(t.Context(), token)
				failed <- err
			}()
		}
		eventually(t, "all wait", func() bool {
			set.mu.Lock()
			defer set.mu.Unlock()
			return set.waiting == users
		})
		close(release)
		for range users {
			if err := <-failed; err != nil {
				t.Errorf("key %s: %v", kid, err)
			}
		}
	}
	crowd("one", key)
	release = make(chan struct{})
	p.answers(held(public("two", next)))
	crowd("two", newer)
}

// TestRotationWithoutAGap: a token that is signed with a key which was
// published a moment ago is good at once, also right after a fetch that did
// not have it, and while forged tokens keep the fetches busy.
func TestRotationWithoutAGap(t *testing.T) {
	p1, k1, _ := ed25519.GenerateKey(rand.Reader)
	p2, k2, _ := ed25519.GenerateKey(rand.Reader)
	_, evil, _ := ed25519.GenerateKey(rand.Reader)
	p := newRaw(t, serves(public("one", p1)))
	v := verifier(t, Issuer{URL: p.URL})
	if _, err := v.verify(t.Context(), mint(t, jose.EdDSA, "one", k1, claims(p.URL))); err != nil {
		t.Fatal(err)
	}
	_, err := v.verify(t.Context(), mint(t, jose.EdDSA, "x", evil, claims(p.URL))) // has the keys fetched just now
	wantKind(t, err, errkind.Unauthenticated)
	p.answers(serves(public("one", p1), public("two", p2)))
	for kid, key := range map[string]ed25519.PrivateKey{"one": k1, "two": k2} {
		if _, err := v.verify(t.Context(), mint(t, jose.EdDSA, kid, key, claims(p.URL))); err != nil {
			t.Errorf("key %s: %v", kid, err)
		}
	}
	p.answers(serves(public("two", p2)))
	if _, err := v.verify(t.Context(), mint(t, jose.EdDSA, "two", k2, claims(p.URL))); err != nil {
		t.Error(err)
	}
}

// TestWithdrawnKeyStopsWorking: without any token that names a new key.
func TestWithdrawnKeyStopsWorking(t *testing.T) {
	p1, k1, _ := ed25519.GenerateKey(rand.Reader)
	p2, _, _ := ed25519.GenerateKey(rand.Reader)
	p := newRaw(t, serves(public("one", p1)))
	v := paced(t, p.URL, func(p *pace) { p.fresh, p.pause = 100*time.Millisecond, time.Millisecond })
	token := mint(t, jose.EdDSA, "one", k1, claims(p.URL))
	if _, err := v.verify(t.Context(), token); err != nil {
		t.Fatal(err)
	}
	p.answers(serves(public("two", p2)))
	eventually(t, "the withdrawn key is refused", func() bool {
		_, err := v.verify(t.Context(), token)
		return errs.Kind(err) == errkind.Unauthenticated
	})
}

// TestIssuerOutage: its users go on while their keys are usable, nobody waits
// for the issuer, and once the keys are not, the answer is that it cannot be
// reached, not that the token is forged.
func TestIssuerOutage(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	p := newRaw(t, serves(public("d", pub)))
	v := paced(t, p.URL, func(p *pace) {
		p.fresh, p.usable, p.pause, p.longest = 10*time.Millisecond, time.Hour, time.Millisecond, 5*time.Millisecond
	})
	token := mint(t, jose.EdDSA, "d", key, claims(p.URL))
	if _, err := v.verify(t.Context(), token); err != nil {
		t.Fatal(err)
	}
	p.answers(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "down", http.StatusBadGateway) })
	before := p.fetches.Load()
	eventually(t, "the keys are asked for again and again", func() bool {
		if _, err := v.verify(t.Context(), token); err != nil {
			t.Fatalf("a user was locked out by an outage: %v", err)
		}
		return p.fetches.Load() >= before+3
	})
	set := v.issuers[p.URL].keys.(*remote)
	set.mu.Lock()
	set.pace.usable = time.Millisecond
	set.mu.Unlock()
	eventually(t, "keys too old are not used", func() bool {
		_, err := v.verify(t.Context(), token)
		return errs.Kind(err) == errkind.Unavailable
	})
	p.answers(serves(public("d", pub)))
	set.mu.Lock()
	set.pace.usable = time.Hour
	set.mu.Unlock()
	eventually(t, "the issuer is back", func() bool {
		_, err := v.verify(t.Context(), token)
		return err == nil
	})
}

// TestSlowKeySetDelaysNobodyWhoseKeyIsKnown, and others for a bounded time.
func TestSlowKeySetDelaysNobodyWhoseKeyIsKnown(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	_, evil, _ := ed25519.GenerateKey(rand.Reader)
	p := newRaw(t, serves(public("d", pub)))
	v := paced(t, p.URL, func(p *pace) {
		p.fresh, p.pause, p.wait, p.fetch = time.Millisecond, time.Millisecond, 50*time.Millisecond, 20*time.Second
	})
	good := mint(t, jose.EdDSA, "d", key, claims(p.URL))
	if _, err := v.verify(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	asked := make(chan struct{}, 16)
	p.answers(func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	defer close(release)
	eventually(t, "a fetch hangs", func() bool {
		if _, err := v.verify(t.Context(), good); err != nil {
			t.Fatal(err)
		}
		return len(asked) > 0
	})
	_, err := v.verify(t.Context(), mint(t, jose.EdDSA, "x", evil, claims(p.URL)))
	wantKind(t, err, errkind.Unavailable)
	if _, err := v.verify(t.Context(), good); err != nil {
		t.Errorf("a known key while a fetch hangs: %v", err)
	}
	if n := len(asked); n != 1 {
		t.Errorf("%d fetches hang at once", n)
	}
}

// TestBadKeySets: whatever an issuer answers, its tokens are not believed, the
// answer is that its keys cannot be had now, in one short sentence, and no
// more than the bound is read.
func TestBadKeySets(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	weak, _ := rsa.GenerateKey(rand.Reader, 1024)
	good, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{public("d", pub)}})
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(s)) }
	}
	var served atomic.Int64
	many := make([]jose.JSONWebKey, maxKeys+1)
	for i := range many {
		many[i] = public("d", pub)
	}
	for name, answer := range map[string]http.HandlerFunc{
		"not JSON":         text("<html>sign in</html>"),
		"a list":           text("[]"),
		"null":             text("null"),
		"no keys":          text(`{"keys":[]}`),
		"keys are no list": text(`{"keys":{}}`),
		"keys stand twice": text(`{"keys":[],` + string(good[1:])),
		"cut":              text(string(good[:len(good)-2])),
		"two documents":    text(string(good) + "{}"),
		"deep":             text(strings.Repeat("[", 200_000)),
		"a shared secret":  text(`{"keys":[{"kty":"oct","kid":"d","k":"c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA"}]}`),
		"a private key":    serves(jose.JSONWebKey{Key: key, KeyID: "d"}),
		"for encryption":   serves(jose.JSONWebKey{Key: pub, KeyID: "d", Use: "enc"}),
		"a short RSA key":  serves(public("d", &weak.PublicKey)),
		"too many keys":    serves(many...),
		"huge":             text(string(good[:len(good)-1]) + `,"x":"` + strings.Repeat("x", maxAnswer) + `"}`),
		"an error page":    func(w http.ResponseWriter, _ *http.Request) { http.Error(w, string(good), http.StatusNotFound) },
		"elsewhere in clear": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://192.0.2.1/", http.StatusFound)
		},
		"round in circles": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.String(), http.StatusFound) },
		"endless": func(w http.ResponseWriter, _ *http.Request) {
			for {
				n, err := w.Write(bytes.Repeat([]byte(" "), 1<<16))
				if served.Add(int64(n)); err != nil {
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newRaw(t, answer)
			_, err := verifier(t, Issuer{URL: p.URL}).Verify(t.Context(), mint(t, jose.EdDSA, "d", key, claims(p.URL)))
			wantKind(t, err, errkind.Unavailable)
			if err != nil && len(err.Error()) > 600 {
				t.Errorf("the error is %d bytes long", len(err.Error()))
			}
		})
	}
	if n := served.Load(); n > 64<<20 { // what the sockets hold comes on top of the bound
		t.Errorf("%d bytes of an endless answer were taken", n)
	}
}

// TestKeySetWithStrangersIsUsed: keys of kinds that are unknown here do not
// spoil the others.
func TestKeySetWithStrangersIsUsed(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	good, _ := json.Marshal(public("d", pub))
	p := newRaw(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"keys":[{"kty":"OKP","crv":"Ed448","x":"AA"},{"kty":"PQ"},{"kty":"EC","crv":"P-256","x":"","y":""},7,%s]}`, good)
	})
	if _, err := verifier(t, Issuer{URL: p.URL}).Verify(t.Context(), mint(t, jose.EdDSA, "d", key, claims(p.URL))); err != nil {
		t.Error(err)
	}
}

// TestChangedRegistryKeepsKeys: an issuer that is down when the registry
// changes elsewhere keeps its users; one that is removed loses them at once.
func TestChangedRegistryKeepsKeys(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	p := newRaw(t, serves(public("d", pub)))
	v := verifier(t, Issuer{URL: p.URL})
	token := mint(t, jose.EdDSA, "d", key, claims(p.URL))
	if _, err := v.Verify(t.Context(), token); err != nil {
		t.Fatal(err)
	}
	p.answers(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "down", http.StatusBadGateway) })
	next, err := v.With([]Issuer{{URL: p.URL}, {URL: "https://other.example"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := next.Verify(t.Context(), token); err != nil {
		t.Errorf("after a change elsewhere: %v", err)
	}
	strict, err := next.With([]Issuer{{URL: p.URL, Algs: []string{"RS256"}}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = strict.Verify(t.Context(), token)
	wantKind(t, err, errkind.Unauthenticated)
	gone, err := next.With(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = gone.Verify(t.Context(), token)
	wantKind(t, err, errkind.Unauthenticated)
}
