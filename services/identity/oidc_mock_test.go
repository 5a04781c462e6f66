package identity_test

import (
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oauth2-proxy/mockoidc"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// mock is the provider of oauth2-proxy/mockoidc.
type mock struct {
	*mockoidc.MockOIDC
	mu sync.Mutex // held by each request
}

func newMock(t testing.TB) *mock {
	t.Helper()
	keys, err := mockoidc.RandomKeypair(2048)
	must(t, err)
	m := &mock{}
	m.MockOIDC, err = mockoidc.NewServer(keys.PrivateKey)
	must(t, err)
	must(t, m.AddMiddleware(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			m.mu.Lock()
			defer m.mu.Unlock()
			next.ServeHTTP(w, r)
		})
	}))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, m.Start(l, nil))
	t.Cleanup(func() { _ = m.Server.Close() })
	return m
}

func (m *mock) signIn(t testing.TB, user *mockoidc.MockUser) answer {
	t.Helper()
	m.QueueUser(user)
	q := url.Values{"client_id": {m.ClientID}, "redirect_uri": {redirect}, "response_type": {"code"}, "scope": {"openid email groups"}, "state": {"s"}, "nonce": {"n"}}
	code := hop(t, m.AuthorizationEndpoint()+"?"+q.Encode()).Query().Get("code")
	return askToken(t, m.TokenEndpoint(), m.ClientID, m.ClientSecret, url.Values{"grant_type": {"authorization_code"}, "code": {code},
		"client_id": {m.ClientID}, "client_secret": {m.ClientSecret}})
}

func (m *mock) locked(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// TestMockOIDC: a second provider, with groups, a clock that runs ahead or
// behind, and a rotation that withdraws the old key at once.
func TestMockOIDC(t *testing.T) {
	m := newMock(t)
	w := newWorldAnd(t, identity.Issuer{Issuer: m.Issuer(), Audience: m.ClientID, Tenant: "acme", Plan: "default"})
	user := &mockoidc.MockUser{Subject: "jane", Email: "jane@example.com", Groups: []string{"staff", "berth-admins"}}
	jane := m.signIn(t, user).ID
	if r := w.openWith(t, jane); r.GetOpen() == nil {
		t.Fatalf("%v", r.GetFailure())
	}
	v, err := tokens.New([]tokens.Issuer{{URL: m.Issuer()}}, nil)
	must(t, err)
	tok, err := v.Verify(t.Context(), jane)
	must(t, err)
	if !slices.Equal(tok.List("groups"), user.Groups) || tok.Subject != "jane" {
		t.Errorf("%s in %q", tok.Subject, tok.List("groups"))
	}
	m.locked(func() { m.FastForward(-3 * time.Hour) })
	refused := func(what, token, why string) {
		t.Helper()
		if f := w.openWith(t, token).GetFailure(); f.GetKind() != errkind.Unauthenticated.String() || !strings.Contains(f.GetReason(), why) {
			t.Errorf("%s: %v", what, f)
		}
	}
	refused("of three hours ago", m.signIn(t, user).ID, "had expired")
	m.locked(func() { m.FastForward(6 * time.Hour) })
	refused("of three hours to come", m.signIn(t, user).ID, "not valid yet")
	m.locked(func() { m.FastForward(-3 * time.Hour) })
	m.locked(func() {
		keys, err := mockoidc.RandomKeypair(2048)
		must(t, err)
		m.Keypair = keys
	})
	if r := w.openWith(t, m.signIn(t, user).ID); r.GetOpen() == nil {
		t.Errorf("after the rotation: %v", r.GetFailure())
	}
}
