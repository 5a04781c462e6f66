package grant_test

import (
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
)

// An ending meets the grants of its scope up to its time, and no other.
func TestAnEndingMeetsItsScopeAndNothingElse(t *testing.T) {
	for name, tc := range map[string]struct {
		scope grant.Scope
		at    time.Time
		want  errkind.Kind
	}{
		"the tenant":                     {grant.Scope{Tenant: "acme"}, now, errkind.Denied},
		"another tenant":                 {grant.Scope{Tenant: "globex"}, now, errkind.OK},
		"the issuer":                     {grant.Scope{Tenant: "acme", Issuer: "https://idp"}, now, errkind.Denied},
		"another issuer":                 {grant.Scope{Tenant: "acme", Issuer: "https://idp/"}, now, errkind.OK},
		"the user":                       {grant.Scope{Tenant: "acme", Issuer: "https://idp", Subject: "alice"}, now, errkind.Denied},
		"another user":                   {grant.Scope{Tenant: "acme", Issuer: "https://idp", Subject: "Alice"}, now, errkind.OK},
		"the user of another tenant":     {grant.Scope{Tenant: "globex", Issuer: "https://idp", Subject: "alice"}, now, errkind.OK},
		"the frontend":                   {grant.Scope{Tenant: "acme", Frontend: "web"}, now, errkind.Denied},
		"another frontend":               {grant.Scope{Tenant: "acme", Frontend: "web2"}, now, errkind.OK},
		"the user by the frontend":       {grant.Scope{Tenant: "acme", Issuer: "https://idp", Subject: "alice", Frontend: "web"}, now, errkind.Denied},
		"the user by another frontend":   {grant.Scope{Tenant: "acme", Issuer: "https://idp", Subject: "alice", Frontend: "cli"}, now, errkind.OK},
		"another user by the frontend":   {grant.Scope{Tenant: "acme", Issuer: "https://idp", Subject: "bob", Frontend: "web"}, now, errkind.OK},
		"the issuer by the frontend":     {grant.Scope{Tenant: "acme", Issuer: "https://idp", Frontend: "web"}, now, errkind.Denied},
		"within the second of its issue": {grant.Scope{Tenant: "acme"}, now.Add(time.Second - 1), errkind.Denied},
		"before its issue":               {grant.Scope{Tenant: "acme"}, now.Add(-1), errkind.OK},
	} {
		t.Run(name, func(t *testing.T) {
			v, err := grant.NewVerifier(jwks(string(kid), pub(signer)), nil, []grant.Ending{{Scope: tc.scope, At: tc.at}})
			if err != nil {
				t.Fatal(err)
			}
			_, err = v.Authenticate(sign(t, claims()), now)
			wantKind(t, err, tc.want)
			wantKind(t, v.Alive(claims()), tc.want)
		})
	}
}

// A list that cannot be read is no list: an entry without a tenant would be
// everybody's, one without a time nobody's.
func TestAListWithABadEntryIsRefusedWhole(t *testing.T) {
	good := &credentialsv1.EndedGrants{Tenant: "acme", Issuer: "https://idp", Subject: "alice", Frontend: "web", At: timestamppb.New(now)}
	for name, change := range map[string]func(*credentialsv1.EndedGrants){
		"no tenant":               func(e *credentialsv1.EndedGrants) { e.Tenant = "" },
		"absurd tenant":           func(e *credentialsv1.EndedGrants) { e.Tenant = "a.*" },
		"absurd frontend":         func(e *credentialsv1.EndedGrants) { e.Frontend = "web.>" },
		"subject, but no issuer":  func(e *credentialsv1.EndedGrants) { e.Issuer = "" },
		"no time":                 func(e *credentialsv1.EndedGrants) { e.At = nil },
		"a time that is not one":  func(e *credentialsv1.EndedGrants) { e.At = &timestamppb.Timestamp{Nanos: -1} },
		"a time beyond the years": func(e *credentialsv1.EndedGrants) { e.At = &timestamppb.Timestamp{Seconds: 1 << 62} },
	} {
		e := proto.Clone(good).(*credentialsv1.EndedGrants)
		change(e)
		if _, err := grant.FromReply(&credentialsv1.JwksReply{Jwks: jwks(string(kid), pub(signer)), Ended: []*credentialsv1.EndedGrants{e}}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for name, g := range map[string]*credentialsv1.RevokedGeneration{
		"no tenant":     {Session: "s1", Generation: &corev1.Stamp{Incarnation: 1, Index: 2}},
		"no session":    {Tenant: "acme", Generation: &corev1.Stamp{Incarnation: 1, Index: 2}},
		"no generation": {Tenant: "acme", Session: "s1"},
	} {
		if _, err := grant.FromReply(&credentialsv1.JwksReply{Jwks: jwks(string(kid), pub(signer)), Revoked: []*credentialsv1.RevokedGeneration{g}}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// Whatever endings there are, a grant is dead exactly if one of them names it.
func TestEndingsAreFoundByEveryFieldThatIsSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		of := func(name string, or ...string) string { return rapid.SampledFrom(or).Draw(t, name) }
		set, dead := grant.Endings{}, false
		c := claims()
		c.Tenant, c.Frontend = ids.Tenant(of("tenant", "acme", "globex")), ids.Frontend(of("frontend", "web", "cli"))
		c.Principal = grant.Principal{Issuer: of("issuer", "i", "j"), Subject: of("subject", "a", "b")}
		for range rapid.IntRange(0, 6).Draw(t, "endings") {
			e := grant.Ending{Scope: grant.Scope{Tenant: ids.Tenant(of("of", "acme", "globex")), Issuer: of("i", "", "i", "j"), Frontend: ids.Frontend(of("f", "", "web", "cli"))},
				At: now.Add(time.Duration(rapid.IntRange(-2, 2).Draw(t, "at")) * time.Second)}
			if e.Issuer != "" {
				e.Subject = of("s", "", "a", "b")
			}
			if e.Check() != nil {
				t.Fatal(e.Check())
			}
			set.Add(e)
			meets := e.Tenant == c.Tenant && (e.Issuer == "" || e.Issuer == c.Principal.Issuer) &&
				(e.Subject == "" || e.Subject == c.Principal.Subject) && (e.Frontend == "" || e.Frontend == c.Frontend)
			dead = dead || meets && c.IssuedAt <= e.At.Unix()
		}
		last := set.Last(c.Tenant, c.Principal, c.Frontend)
		if got := !last.IsZero() && c.IssuedAt <= last.Unix(); got != dead {
			t.Fatalf("dead is %v, want %v: %v", got, dead, set)
		}
	})
}

// FuzzReply: whatever comes as a list of revocations, it is read whole or
// refused, and an entry that was read has a scope.
func FuzzReply(f *testing.F) {
	seed := &credentialsv1.JwksReply{Jwks: jwks(string(kid), pub(signer)), Feed: "f1", Seq: 3,
		Revoked: []*credentialsv1.RevokedGeneration{{Tenant: "acme", Session: "s1", Generation: &corev1.Stamp{Incarnation: 1, Index: 2}}},
		Ended:   []*credentialsv1.EndedGrants{{Tenant: "acme", Issuer: "https://idp", Subject: "alice", At: timestamppb.New(now), Until: timestamppb.New(now)}}}
	raw, err := proto.Marshal(seed)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte{})
	dead := claims()
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := &credentialsv1.JwksReply{}
		if proto.Unmarshal(raw, r) != nil {
			return
		}
		v, err := grant.FromReply(r)
		if err != nil {
			if k := grant.KindOf(err); k != errkind.Invalid && k != errkind.TooLarge {
				t.Errorf("kind %v: %v", k, err)
			}
			return
		}
		for _, e := range r.GetEnded() {
			if e.GetTenant() == "" {
				t.Error("an ending without a tenant was taken")
			}
		}
		_ = v.Alive(dead)
	})
}
