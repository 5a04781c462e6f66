package identity_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/zitadel/oidc/v3/example/server/storage"
	"github.com/zitadel/oidc/v3/pkg/op"

	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// zitadel is a whole OpenID provider, the one of zitadel/oidc with the storage
// of its example, whose signing key can be rotated.
type zitadel struct {
	*httptest.Server
	*storage.Storage

	mu   sync.Mutex
	keys []signingKey // the first signs, all are published
}

type signingKey struct {
	id  string
	key *rsa.PrivateKey
}

func (k signingKey) ID() string                                  { return k.id }
func (k signingKey) SignatureAlgorithm() jose.SignatureAlgorithm { return jose.RS256 }
func (k signingKey) Key() any                                    { return k.key }

type publicKey struct{ signingKey }

func (k publicKey) Algorithm() jose.SignatureAlgorithm { return jose.RS256 }
func (k publicKey) Use() string                        { return "sig" }
func (k publicKey) Key() any                           { return k.key.Public() }

// SigningKey stands before the storage's own.
func (z *zitadel) SigningKey(context.Context) (op.SigningKey, error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.keys[0], nil
}

// KeySet stands before the storage's own.
func (z *zitadel) KeySet(context.Context) ([]op.Key, error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	out := make([]op.Key, 0, len(z.keys))
	for _, k := range z.keys {
		out = append(out, publicKey{k})
	}
	return out, nil
}

// rotate signs with a new key from now on; keep says whether tokens of those
// before still count.
func (z *zitadel) rotate(t testing.TB, id string, keep bool) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	must(t, err)
	z.mu.Lock()
	defer z.mu.Unlock()
	keys := []signingKey{{id, key}}
	if keep {
		keys = append(keys, z.keys...)
	}
	z.keys = keys
}

const redirect = "http://localhost:9999/auth/callback"

func newZitadel(t testing.TB) *zitadel {
	t.Helper()
	z := &zitadel{}
	z.rotate(t, "first", false)
	z.Server = httptest.NewUnstartedServer(nil)
	issuer := "http://" + z.Listener.Addr().String()
	z.Storage = storage.NewStorageWithClients(storage.NewUserStore(issuer), map[string]*storage.Client{
		"berth": storage.WebClient("berth", "client-secret"), "other": storage.WebClient("other", "client-secret"),
	})
	provider, err := op.NewProvider(&op.Config{CryptoKey: [32]byte{1}, CryptoKeyId: "crypto"}, z, op.StaticIssuer(issuer), op.WithAllowInsecure())
	must(t, err)
	z.Config.Handler = provider
	z.Start()
	t.Cleanup(z.Close)
	return z
}

// answer is what a token endpoint answers.
type answer struct {
	Access string `json:"access_token"`
	ID     string `json:"id_token"`
}

// hop asks without following, and returns where the answer points to.
func hop(t testing.TB, address string) *url.URL {
	t.Helper()
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	must(t, err)
	resp, err := client.Do(req)
	must(t, err)
	must(t, resp.Body.Close())
	to, err := resp.Location()
	if err != nil {
		t.Fatalf("%s answered %s: %v", req.URL.Path, resp.Status, err)
	}
	return to
}

func askToken(t testing.TB, endpoint, client, secret string, form url.Values) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, endpoint, strings.NewReader(form.Encode()))
	must(t, err)
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.SetBasicAuth(client, secret)
	resp, err := http.DefaultClient.Do(req)
	must(t, err)
	defer resp.Body.Close()
	var a answer
	must(t, json.NewDecoder(resp.Body).Decode(&a))
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("the token endpoint answered %s", resp.Status)
	}
	return a
}

// signIn goes through the authorization code flow, as a browser and a program do.
func (z *zitadel) signIn(t testing.TB, client, user string) answer {
	t.Helper()
	q := url.Values{"client_id": {client}, "redirect_uri": {redirect}, "response_type": {"code"}, "scope": {"openid profile"}, "state": {"s"}}
	id := hop(t, z.URL+"/authorize?"+q.Encode()).Query().Get("authRequestID")
	must(t, z.CheckUsernamePassword(user, "verysecure", id))
	code := hop(t, z.URL+"/authorize/callback?id="+id).Query().Get("code")
	return askToken(t, z.URL+"/oauth/token", client, "client-secret", url.Values{"grant_type": {"authorization_code"}, "code": {code}, "redirect_uri": {redirect}})
}

func (w *world) openWith(t testing.TB, token string) *identityv1.Reply {
	t.Helper()
	r := w.request(t, "open", &identityv1.OpenRequest{})
	r.env.Token = token
	return w.direct(t, w.front, r)
}

// TestZitadel: tokens of a real provider, by its own code flow, across a
// rotation of its keys, and what it issues that is no proof of who asks.
func TestZitadel(t *testing.T) {
	z := newZitadel(t)
	w := newWorldAnd(t, identity.Issuer{Issuer: z.URL, Audience: "berth", Tenant: "acme", Plan: "default"})
	user := z.signIn(t, "berth", "test-user2")
	if w.openWith(t, user.ID).GetOpen() == nil {
		t.Fatal("the ID token does not open")
	}
	if s := w.seen()[0].(*lifecyclev1.OpenRequest).GetVerified().GetActor(); s.GetSubject() != "id2" || s.GetIssuer() != z.URL {
		t.Errorf("opened as %v", s)
	}
	for what, c := range map[string]struct{ token, why string }{
		"the opaque access token":       {user.Access, "opaque tokens are not accepted"},
		"a token for another program":   {z.signIn(t, "other", "test-user2").ID, "issuer and audience are not registered"},
		"a code instead of a token":     {"code-1", "opaque tokens are not accepted"},
		"the ID token with a cut end":   {user.ID[:len(user.ID)-8], "not signed by its issuer"},
		"another user, same signature":  {swapPayload(user.ID, z.signIn(t, "berth", "test-user@127.0.0.1").ID), "not signed by its issuer"},
		"the ID token and one line end": {user.ID + "\n", "opaque tokens are not accepted"},
	} {
		if f := w.openWith(t, c.token).GetFailure(); f.GetKind() != errkind.Unauthenticated.String() || !strings.Contains(f.GetReason(), c.why) {
			t.Errorf("%s: %v", what, f)
		}
	}
	z.rotate(t, "second", true)
	second := z.signIn(t, "berth", "test-user2").ID
	for what, token := range map[string]string{"signed before the rotation": user.ID, "signed after it": second} {
		if r := w.openWith(t, token); r.GetOpen() == nil {
			t.Errorf("%s: %v", what, r.GetFailure())
		}
	}
	z.rotate(t, "third", false)
	if r := w.openWith(t, z.signIn(t, "berth", "test-user2").ID); r.GetOpen() == nil {
		t.Errorf("signed with the only key left: %v", r.GetFailure())
	}
	z.Close()
	if r := w.openWith(t, second); r.GetFailure().GetKind() == errkind.Internal.String() {
		t.Errorf("with the provider gone: %v", r)
	}
}

func swapPayload(token, other string) string {
	a, b := strings.Split(token, "."), strings.Split(other, ".")
	return a[0] + "." + b[1] + "." + a[2]
}

// TestZitadelTokenExchange: a token that the provider exchanged by RFC 8693
// says who acts.
func TestZitadelTokenExchange(t *testing.T) {
	z := newZitadel(t)
	admin := z.signIn(t, "berth", "test-user@127.0.0.1")
	got := askToken(t, z.URL+"/oauth/token", "berth", "client-secret", url.Values{
		"grant_type": {"urn:ietf:params:oauth:grant-type:token-exchange"}, "subject_token": {admin.Access},
		"subject_token_type":   {"urn:ietf:params:oauth:token-type:access_token"},
		"requested_token_type": {"urn:ietf:params:oauth:token-type:id_token"}, "audience": {"berth"},
		"scope": {"openid " + storage.CustomScopeImpersonatePrefix + "id2"},
	})
	v, err := tokens.New([]tokens.Issuer{{URL: z.URL}}, nil)
	must(t, err)
	token := got.ID
	if token == "" {
		token = got.Access
	}
	tok, err := v.Verify(t.Context(), token)
	must(t, err)
	if tok.Subject != "id2" || tok.Acting != "id1" {
		t.Errorf("%s acts for %s", tok.Acting, tok.Subject)
	}
	plain, err := v.Verify(t.Context(), admin.ID)
	if must(t, err); plain.Acting != "" {
		t.Errorf("%q acts without an exchange", plain.Acting)
	}
}

// TestDownFromTheStart: a provider that cannot be reached locks out its own
// users and no others, and lets them in once it is there.
func TestDownFromTheStart(t *testing.T) {
	p := newProvider(t)
	p.answers(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "starting", http.StatusServiceUnavailable) })
	w := newWorldWith(t, p)
	token := p.token(t, nil)
	if f := w.openWith(t, token).GetFailure(); f.GetKind() != errkind.Unavailable.String() {
		t.Errorf("%v", f)
	}
	p.answers(p.good)
	err := errors.New("not asked")
	for deadline := time.Now().Add(20 * time.Second); err != nil; time.Sleep(20 * time.Millisecond) {
		if err = nil; w.openWith(t, token).GetOpen() == nil {
			err = errors.New("not opened")
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}
