package bus_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// asking starts a bus that knows services only, and lets in everybody else as identity would.
func asking(t *testing.T, callers ...subjects.Caller) *bus.Embedded {
	t.Helper()
	dir := t.TempDir()
	public, err := bus.EnsureCallout(dir)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := bus.ReadCallout(dir + "/keys")
	if err != nil {
		t.Fatal(err)
	}
	e, err := bus.StartEmbedded(bustest.Context(t), bus.EmbeddedConfig{Dir: dir, Port: -1, Callers: callers, Callout: &public, Log: bustest.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	users, err := bus.ReadUsers(dir, append(callers, subjects.Operator()))
	if err != nil {
		t.Fatal(err)
	}
	nc := bustest.Connect(t, e, subjects.Callout()).NATS()
	_, err = nc.QueueSubscribe(bus.CalloutSubject, "identity", func(m *nats.Msg) {
		q, why, err := keys.Open(m.Data, m.Header.Get(bus.CalloutXKeyHeader))
		answer, rerr := keys.Refuse(q, "unknown "+why)
		for _, u := range users {
			if u.Public == q.NKey && why == "" {
				answer, rerr = keys.Admit(q, u.Caller, "nkey:"+q.NKey, time.Now().Add(time.Hour))
			}
		}
		if err = errors.Join(err, rerr); err == nil {
			err = m.Respond(answer)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// Whoever identity lets in can say and hear exactly what the catalogue gives its role, and the two
// identities that serve logins nothing of the catalogue at all.
func TestTheCatalogueHoldsForWhoeverIdentityLetsIn(t *testing.T) {
	user := subjects.Frontend("acme", subjects.UserFrontend("https://issuer", "ann"))
	e := asking(t, append(identities(), user)...)
	all := append(identities(), subjects.Callout(), subjects.Warden())
	publishTheCatalogue(t, e, all)
	subscribeToTheCatalogue(t, e, all)
	p := newProbe(t, e, user)
	for _, s := range []string{subjects.Request("acme", user.Frontend, "open"), subjects.Request("acme", "web", "open"),
		subjects.RPC("identity", "open", user), subjects.RPC("identity", "open", acmeWeb), subjects.RPC("identity", "tenants", subjects.Operator())} {
		if err := p.nc.Publish(s, []byte("{")); err != nil {
			t.Fatal(err)
		}
	}
	refused := p.take(t)
	for s, want := range map[string]bool{subjects.Request("acme", user.Frontend, "open"): false, subjects.RPC("identity", "open", user): false,
		subjects.Request("acme", "web", "open"): true, subjects.RPC("identity", "open", acmeWeb): true, subjects.RPC("identity", "tenants", subjects.Operator()): true} {
		if refused[s] != want {
			t.Errorf("a user publishes to %s: refused %t, want %t", s, refused[s], want)
		}
	}
}

// Services live while nobody answers logins.
func TestServicesLogInWithoutIdentity(t *testing.T) {
	dir := t.TempDir()
	public, err := bus.EnsureCallout(dir)
	if err != nil {
		t.Fatal(err)
	}
	e, err := bus.StartEmbedded(bustest.Context(t), bus.EmbeddedConfig{Dir: dir, Port: -1, Callers: []subjects.Caller{acmeWeb}, Callout: &public, Log: bustest.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	for _, s := range subjects.Services {
		bustest.Connect(t, e, subjects.Service(s))
	}
	bustest.Connect(t, e, subjects.Callout())
	bustest.Connect(t, e, subjects.Warden())
}

func TestNobodyButGuestsIsLetInByTheCallout(t *testing.T) {
	keys, _, open := question(t)
	q, why, err := keys.Open(open, serverX(t))
	if err != nil || why != "" {
		t.Fatal(why, err)
	}
	for _, c := range []subjects.Caller{subjects.Service("identity"), subjects.Keeper(), subjects.Callout(), subjects.Warden(), {}} {
		if _, err := keys.Admit(q, c, "x", time.Now().Add(time.Hour)); err == nil {
			t.Errorf("%q can be let in", c)
		}
	}
	if _, err := keys.Admit(q, acmeWeb, "x", time.Now().Add(time.Hour), session); err == nil {
		t.Error("a frontend has sessions of its own")
	}
}

var serverCurve, _ = nkeys.CreateCurveKeys()

func serverX(t testing.TB) string {
	t.Helper()
	x, err := serverCurve.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// question is one that a server would ask, about a login by token, and the keys it is asked of.
func question(t testing.TB, change ...func(*jwt.AuthorizationRequestClaims)) (bus.CalloutKeys, bus.CalloutConfig, []byte) {
	t.Helper()
	dir := t.TempDir()
	public, err := bus.EnsureCallout(dir)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := bus.ReadCallout(dir + "/keys")
	if err != nil {
		t.Fatal(err)
	}
	server, _ := nkeys.CreateServer()
	user, _ := nkeys.CreateUser()
	c := jwt.NewAuthorizationRequestClaims(public.Issuer)
	c.Audience = "nats-authorization-request"
	c.UserNkey, _ = user.PublicKey()
	c.Server.ID, _ = server.PublicKey()
	c.Server.XKey = serverX(t)
	c.ConnectOptions.Token = "a token"
	for _, f := range change {
		f(c)
	}
	plain, err := c.Encode(server)
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := serverCurve.Seal([]byte(plain), public.XKey)
	if err != nil {
		t.Fatal(err)
	}
	return keys, public, sealed
}

// What comes from no server, or was meant for somebody else, is answered to nobody.
func TestQuestionsThatAreNone(t *testing.T) {
	other, _ := nkeys.CreateAccount()
	strange, _ := other.PublicKey()
	for what, change := range map[string]func(*jwt.AuthorizationRequestClaims){
		"asked of another issuer":     func(c *jwt.AuthorizationRequestClaims) { c.Subject = strange },
		"of another audience":         func(c *jwt.AuthorizationRequestClaims) { c.Audience = "somebody" },
		"with another curve key":      func(c *jwt.AuthorizationRequestClaims) { c.Server.XKey = "" },
		"signed by no such server":    func(c *jwt.AuthorizationRequestClaims) { c.Server.ID = strange },
		"about something but a login": func(c *jwt.AuthorizationRequestClaims) { c.UserNkey = strange },
	} {
		keys, _, sealed := question(t, change)
		if _, _, err := keys.Open(sealed, serverX(t)); err == nil {
			t.Errorf("a question %s is answered", what)
		} else if strings.Contains(err.Error(), "token") {
			t.Errorf("%s: %v", what, err)
		}
	}
	keys, public, sealed := question(t)
	for what, data := range map[string][]byte{"empty": nil, "too long": bytes.Repeat([]byte("x"), 1<<20), "in the clear": []byte("eyJ0eXAiOiJKV1QifQ"), "cut off": sealed[:len(sealed)-1]} {
		if _, _, err := keys.Open(data, serverX(t)); err == nil {
			t.Errorf("a question that is %s is answered", what)
		}
	}
	if _, _, err := keys.Open(sealed, public.XKey); err == nil {
		t.Error("a question of another server's key is answered")
	}
	if q, why, err := keys.Open(sealed, serverX(t)); err != nil || why != "" || q.Token != "a token" || q.NKey != "" {
		t.Errorf("the good one: %v %q %v", q, why, err)
	}
}

// FuzzQuestion: whatever is sealed to identity, nobody is taken for proved without a signature.
func FuzzQuestion(f *testing.F) {
	keys, public, sealed := question(f)
	x := serverX(f)
	f.Add(sealed, x)
	f.Add([]byte("eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.e30.AA"), x)
	f.Fuzz(func(t *testing.T, raw []byte, header string) {
		for _, msg := range [][]byte{raw, seal(raw, public.XKey)} {
			for _, h := range []string{header, x} {
				q, why, err := keys.Open(msg, h)
				if err == nil && why == "" && (q.NKey != "" || q.Token == "") {
					t.Fatalf("somebody is proved by %q", raw)
				}
			}
		}
	})
}

func seal(raw []byte, to string) []byte {
	out, err := serverCurve.Seal(raw, to)
	if err != nil {
		return nil
	}
	return out
}
