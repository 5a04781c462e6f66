package identity

import (
	"crypto/x509"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nkeys"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/callout"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/registry"
)

func newNKey(t *testing.T) string {
	t.Helper()
	pair, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	pub, err := pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return pub
}

const anIssuer = "https://login.example.com"

// registered is a registry with a frontend, a host, an operator and an issuer.
func registered(t *testing.T) (*registry.Snapshot, map[string]string) {
	t.Helper()
	keys := map[string]string{"fe-acme-web": newNKey(t), "host-h1": newNKey(t), "operator": newNKey(t)}
	return registeredWith(t, keys), keys
}

func registeredWith(t *testing.T, keys map[string]string) *registry.Snapshot {
	t.Helper()
	st := registry.Static{Issuers: []*identityv1.Issuer{{Issuer: anIssuer, Audience: "berth", Tenant: "acme", Plan: "default"}}}
	for name, key := range keys {
		st.Logins = append(st.Logins, &identityv1.Login{Name: name, Nkey: key})
	}
	now, err := registry.Of(st)
	if err != nil {
		t.Fatal(err)
	}
	return now
}

// A connection ends when what it was let in for does not hold any more, and no sooner.
func TestWhichConnectionsAreOver(t *testing.T) {
	web, host := subjects.Frontend("acme", "web"), subjects.Host("h1")
	user := subjects.Frontend("acme", subjects.UserFrontend(anIssuer, "ann"))
	_, keys := registered(t)
	key := func(c subjects.Caller) callout.Mark { return callout.NKeyMark(keys[c.Name()]) }
	for what, c := range map[string]struct {
		conn   callout.Connected
		change func(*registry.Snapshot)
		why    string // empty: it stays
	}{
		"a frontend":               {conn: callout.Connected{Caller: web, Mark: key(web)}},
		"a host":                   {conn: callout.Connected{Caller: host, Mark: key(host)}},
		"an operator":              {conn: callout.Connected{Caller: subjects.Operator(), Mark: key(subjects.Operator())}},
		"a user":                   {conn: callout.Connected{Caller: user, Mark: callout.IssuerMark(anIssuer)}},
		"a key that was removed":   {conn: callout.Connected{Caller: web, Mark: callout.NKeyMark(newNKey(t))}, why: "no login has this key"},
		"a key of another":         {conn: callout.Connected{Caller: web, Mark: key(host)}, why: "no login has this key"},
		"an issuer that is gone":   {conn: callout.Connected{Caller: user, Mark: callout.IssuerMark("https://gone")}, why: "its issuer was removed"},
		"an issuer of another":     {conn: callout.Connected{Caller: subjects.Frontend("globex", user.Frontend), Mark: callout.IssuerMark(anIssuer)}, why: "its issuer was removed"},
		"a mark that says nothing": {conn: callout.Connected{Caller: web}, why: "its issuer was removed"},
		"a tenant that is suspended": {conn: callout.Connected{Caller: web, Mark: key(web)}, why: "not paid",
			change: func(s *registry.Snapshot) {
				s.Policy.Tenants = map[ids.Tenant]core.TenantRules{"acme": {Suspended: true, Why: "not paid"}}
			}},
		"a user of a suspended tenant": {conn: callout.Connected{Caller: user, Mark: callout.IssuerMark(anIssuer)}, why: "not paid",
			change: func(s *registry.Snapshot) {
				s.Policy.Tenants = map[ids.Tenant]core.TenantRules{"acme": {Suspended: true, Why: "not paid"}}
			}},
		"a user who is suspended": {conn: callout.Connected{Caller: user, Mark: callout.IssuerMark(anIssuer)}, why: "misuse",
			change: func(s *registry.Snapshot) {
				s.Policy.Users = map[core.Principal]core.UserRules{{Tenant: "acme", Issuer: anIssuer, Subject: "ann"}: {Why: "misuse"}}
			}},
		"a user when another is suspended": {conn: callout.Connected{Caller: user, Mark: callout.IssuerMark(anIssuer)},
			change: func(s *registry.Snapshot) {
				s.Policy.Users = map[core.Principal]core.UserRules{{Tenant: "acme", Issuer: anIssuer, Subject: "bob"}: {Why: "misuse"}}
			}},
		"a frontend that is suspended": {conn: callout.Connected{Caller: web, Mark: key(web)}, why: "leaked key",
			change: func(s *registry.Snapshot) {
				s.Policy.Frontends = map[core.FrontendID]core.LoginRules{{Tenant: "acme", Frontend: "web"}: {Suspended: true, Why: "leaked key"}}
			}},
	} {
		now := registeredWith(t, keys)
		if c.change != nil {
			c.change(now)
		}
		if why, is := over(now)(c.conn); is != (c.why != "") || why != c.why {
			t.Errorf("%s: over %t, %q", what, is, why)
		}
	}
}

// A host over TLS needs its own certificate; a stolen nkey alone lets nobody be a host.
func TestAHostShowsItsOwnCertificate(t *testing.T) {
	now, keys := registered(t)
	g := guests{&service{registry: registry.Fixed(now)}}
	named := func(uri string) *x509.Certificate {
		u, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		return &x509.Certificate{URIs: []*url.URL{u}}
	}
	for what, c := range map[string]struct {
		q  bus.Question
		in bool
	}{
		"in the server's process":       {bus.Question{}, true},
		"with its own":                  {bus.Question{TLS: true, Peer: named("spiffe://berth/host/h1")}, true},
		"without one":                   {bus.Question{TLS: true}, false},
		"with another host's":           {bus.Question{TLS: true, Peer: named("spiffe://berth/host/h2")}, false},
		"with a service's":              {bus.Question{TLS: true, Peer: named("spiffe://berth/svc/h1")}, false},
		"with one that names nobody":    {bus.Question{TLS: true, Peer: &x509.Certificate{}}, false},
		"with one that only looks like": {bus.Question{TLS: true, Peer: named("https://berth/host/h1")}, false},
	} {
		c.q.NKey = keys["host-h1"]
		_, err := g.ByNKey(c.q)
		if (err == nil) != c.in {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := g.ByNKey(bus.Question{NKey: keys["fe-acme-web"], TLS: true}); err != nil {
		t.Errorf("a frontend needs no certificate: %v", err)
	}
	_, err := g.ByNKey(bus.Question{NKey: newNKey(t)})
	var r *core.Refusal
	if !errors.As(err, &r) || r.Kind != errkind.Unauthenticated || strings.Contains(r.Reason, "\n") {
		t.Errorf("a strange nkey: %v", err)
	}
}

// Whoever has no login must not be able to fill logs and audit.
func TestRefusalsAreToldSparingly(t *testing.T) {
	at := time.Unix(0, 0)
	s := newSparing(func() time.Time { return at })
	told := 0
	for range 10 * refusalsBurst {
		if s.more() {
			told++
		}
	}
	if told != refusalsBurst || s.left() != 9*refusalsBurst || s.left() != 0 {
		t.Errorf("%d of a flood were told", told)
	}
	at = at.Add(time.Second)
	for told = 0; s.more(); told++ {
	}
	if told != refusalsPerSecond {
		t.Errorf("%d a second are told", told)
	}
}
