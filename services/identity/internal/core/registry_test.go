package core

import (
	"crypto/sha256"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// claims are the claims of a token in tests: a text, a list of texts, or something else (nil).
type claims map[string]any

func (c claims) Claim(name string) (string, bool) { s, ok := c[name].(string); return s, ok }

func (c claims) Has(name string) bool { _, ok := c[name]; return ok }

func (c claims) List(name string) []string {
	if s, ok := c[name].(string); ok {
		return []string{s}
	}
	l, _ := c[name].([]string)
	return l
}

// open plays an open of ann by frontend web of acme, and returns what it is let in with.
func open(p Policy, tok Token, at time.Time) (State, error) {
	body := []byte("body")
	sum := sha256.Sum256(body)
	s, _, err := Decide(State{Policy: p}, Asked{Door: Direct, Tenant: "acme", Frontend: "web", Verb: Open, StoredAt: at, Body: Body{Open: &identityv1.OpenRequest{}},
		Envelope: &identityv1.Envelope{Token: "t", RequestId: "r1", Verb: Open, Body: body, BodyHash: sum[:], Time: timestamppb.New(at), ProofKey: make([]byte, 32)}}, at)
	if err != nil {
		return s, err
	}
	s, _, err = Decide(s, TokenGood{Token: tok}, at)
	return s, err
}

func ann(c Claims) Token {
	return Token{Issuer: "https://idp", Subject: "ann", Audience: []string{"acme-aud"}, Expires: epoch0.Add(time.Hour), Claims: c}
}

func one(e Entry) Policy {
	e.Issuer, e.Audience, e.Tenant = "https://idp", "acme-aud", "acme"
	return Policy{Entries: []Entry{e}, SessionKeys: [][]byte{[]byte("k")}}
}

func refusal(err error) (kind errkind.Kind, reason string) {
	var r *Refusal
	if errors.As(err, &r) {
		return r.Kind, r.Reason
	}
	return errkind.OK, ""
}

// TestThePlanThatATokenNames: only a value that stands in the table chooses one.
func TestThePlanThatATokenNames(t *testing.T) {
	e := Entry{Plan: "small", PlanClaim: "tier", Plans: map[string]string{"gold": "large", "large": "tiny"}}
	without := e
	without.Plan = ""
	for name, tc := range map[string]struct {
		entry  Entry
		claims Claims
		plan   string
		reason string
	}{
		"in the table":           {e, claims{"tier": "gold"}, "large", ""},
		"a plan's own name":      {e, claims{"tier": "small"}, "", "names a plan that is not registered"},
		"a value that is a plan": {e, claims{"tier": "large"}, "tiny", ""},
		"in capitals":            {e, claims{"tier": "Gold"}, "", "names a plan that is not registered"},
		"empty":                  {e, claims{"tier": ""}, "", "names a plan that is not registered"},
		"a list":                 {e, claims{"tier": []string{"gold"}}, "", "names a plan that is not registered"},
		"a number":               {e, claims{"tier": nil}, "", "names a plan that is not registered"},
		"absent":                 {e, claims{"plan": "gold"}, "small", ""},
		"absent, and no other":   {without, claims{}, "", "names no plan"},
		"no claim is registered": {Entry{Plan: "small"}, claims{"tier": "gold", "plan": "gold"}, "small", ""},
		"no claims at all":       {e, nil, "small", ""},
	} {
		s, err := open(one(tc.entry), ann(tc.claims), epoch0)
		kind, reason := refusal(err)
		if s.Verified.GetPlan() != tc.plan || !strings.Contains(reason, tc.reason) || (reason == "") != (tc.reason == "") || reason != "" && kind != errkind.Refused {
			t.Errorf("%s: plan %q, %v %q", name, s.Verified.GetPlan(), kind, reason)
		}
	}
}

// TestWhoIsAnAdministrator: by a registered group alone, byte for byte.
func TestWhoIsAnAdministrator(t *testing.T) {
	e := Entry{GroupsClaim: "groups", AdminGroups: []string{"admins", "root"}}
	for name, tc := range map[string]struct {
		entry  Entry
		claims Claims
		want   bool
	}{
		"one of the groups":      {e, claims{"groups": []string{"users", "root"}}, true},
		"one group as text":      {e, claims{"groups": "admins"}, true},
		"another group":          {e, claims{"groups": []string{"users"}}, false},
		"in capitals":            {e, claims{"groups": []string{"Admins"}}, false},
		"part of a name":         {e, claims{"groups": "admins,users"}, false},
		"another claim":          {e, claims{"roles": []string{"admins"}}, false},
		"no claim is registered": {Entry{AdminGroups: []string{"admins"}}, claims{"": "admins", "groups": "admins"}, false},
		"no group is registered": {Entry{GroupsClaim: "groups"}, claims{"groups": []string{""}}, false},
		"no claims at all":       {e, nil, false},
	} {
		if got := tc.entry.Administrator(ann(tc.claims)); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestTheClockOfAnIssuer: each issuer has its own tolerance, and the envelope's clock has none of it.
func TestTheClockOfAnIssuer(t *testing.T) {
	for name, tc := range map[string]struct {
		tolerance, after time.Duration // after the token's end
		good             bool
	}{
		"by default 30 s":      {0, 29 * time.Second, true},
		"by default not more":  {0, 30 * time.Second, false},
		"none":                 {-1, 0, false},
		"none, a moment early": {-1, -time.Millisecond, true},
		"five minutes":         {5 * time.Minute, 299 * time.Second, true},
		"five minutes, later":  {5 * time.Minute, 300 * time.Second, false},
	} {
		_, err := open(one(Entry{Tolerance: tc.tolerance}), ann(nil), epoch0.Add(time.Hour+tc.after))
		if (err == nil) != tc.good {
			t.Errorf("%s: expired by %s: %v", name, tc.after, err)
		}
		early := ann(nil)
		early.NotBefore = epoch0.Add(tc.after)
		if _, err := open(one(Entry{Tolerance: tc.tolerance}), early, epoch0); tc.after > 0 && tc.tolerance > 0 && err != nil && tc.good {
			t.Errorf("%s: early by %s: %v", name, tc.after, err)
		}
	}
}

// TestWhoIsSuspended: of everybody, only whom it meets, with the reason; also by what needs no token.
func TestWhoIsSuspended(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Policy)
		reason string
	}{
		"the tenant":       {func(p *Policy) { p.Tenants = map[ids.Tenant]TenantRules{"acme": {Suspended: true, Why: "unpaid"}} }, "the tenant is suspended: unpaid"},
		"without a reason": {func(p *Policy) { p.Tenants = map[ids.Tenant]TenantRules{"acme": {Suspended: true}} }, "the tenant is suspended"},
		"another tenant":   {func(p *Policy) { p.Tenants = map[ids.Tenant]TenantRules{"globex": {Suspended: true}} }, ""},
		"the frontend": {func(p *Policy) {
			p.Frontends = map[FrontendID]LoginRules{{"acme", "web"}: {Suspended: true, Why: "leak"}}
		}, "this frontend is suspended: leak"},
		"another's frontend":            {func(p *Policy) { p.Frontends = map[FrontendID]LoginRules{{"globex", "web"}: {Suspended: true}} }, ""},
		"the user":                      {func(p *Policy) { p.Users = map[Principal]UserRules{{"acme", "https://idp", "ann"}: {Why: "left"}} }, "this user is suspended: left"},
		"a user of another issuer":      {func(p *Policy) { p.Users = map[Principal]UserRules{{"acme", "https://other", "ann"}: {}} }, ""},
		"a user of another tenant":      {func(p *Policy) { p.Users = map[Principal]UserRules{{"globex", "https://idp", "ann"}: {}} }, ""},
		"a user whose name looks alike": {func(p *Policy) { p.Users = map[Principal]UserRules{{"acme", "https://idp", "аnn"}: {}} }, ""},
	} {
		p := one(Entry{})
		tc.change(&p)
		_, err := open(p, ann(nil), epoch0)
		if kind, reason := refusal(err); reason != tc.reason || reason != "" && kind != errkind.Refused {
			t.Errorf("%s: %v %q", name, kind, reason)
		}
		// Whoever was let in before it is stopped before a grant is made.
		before, err := open(one(Entry{}), ann(nil), epoch0)
		if err != nil {
			t.Fatal(err)
		}
		if _, reason := refusal(p.StillMay(before)); reason != tc.reason {
			t.Errorf("%s, suspended meanwhile: %q", name, reason)
		}
		_, verr := p.Vouch(ann(nil), epoch0)
		if _, reason := refusal(verr); reason != tc.reason && !strings.HasPrefix(tc.reason, "this frontend") {
			t.Errorf("%s, at a login: %q", name, reason)
		}
	}
}

// TestClaimsChooseNothingElse: whatever a token claims, tenant, principal and session keys are those of
// issuer, audience and subject.
func TestClaimsChooseNothingElse(t *testing.T) {
	p := one(Entry{Plan: "small", PlanClaim: "plan", Plans: map[string]string{"gold": "large"}, GroupsClaim: "groups", AdminGroups: []string{"admins"}})
	want, err := open(p, ann(nil), epoch0)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		c := claims{}
		name := rapid.SampledFrom([]string{"plan", "groups", "tenant", "sub", "iss", "email", "session", "preferred_username", "act", "org"})
		for range rapid.IntRange(0, 6).Draw(t, "n") {
			if rapid.Bool().Draw(t, "list") {
				c[name.Draw(t, "name")] = rapid.SliceOf(rapid.SampledFrom([]string{"admins", "globex", "gold", ""})).Draw(t, "values")
			} else {
				c[name.Draw(t, "name")] = rapid.SampledFrom([]string{"admins", "globex", "gold", "bob", "large"}).Draw(t, "value")
			}
		}
		got, err := open(p, ann(c), epoch0)
		if err != nil {
			if kind, _ := refusal(err); kind != errkind.Refused {
				t.Fatal(err)
			}
			return
		}
		g, w := got.Verified, want.Verified
		if g.GetActor().String() != w.GetActor().String() || strings.Join(g.GetKeys(), " ") != strings.Join(w.GetKeys(), " ") || g.GetTenantFloor() != w.GetTenantFloor() {
			t.Fatalf("claims %v made %v", c, g)
		}
		if plan := g.GetPlan(); plan != "small" && !(plan == "large" && c["plan"] == "gold") {
			t.Fatalf("claims %v made plan %s", c, plan)
		}
	})
}

// TestARenewalOfWhomNobodyMayActForIsRefused: a renewal needs no token, so the registry of now is asked.
func TestARenewalOfWhomNobodyMayActForIsRefused(t *testing.T) {
	bob := Principal{"acme", "https://idp", "bob"}
	for name, tc := range map[string]struct {
		change func(*Policy)
		kind   errkind.Kind
	}{
		"a user":                 {func(*Policy) {}, errkind.OK},
		"a suspended user":       {func(p *Policy) { p.Users[bob] = UserRules{Why: "left"} }, errkind.Refused},
		"a suspended tenant":     {func(p *Policy) { p.Tenants["acme"] = TenantRules{Suspended: true} }, errkind.Refused},
		"of an issuer that left": {func(p *Policy) { p.Entries = p.Entries[1:] }, errkind.Denied},
	} {
		p := testPolicy()
		tc.change(&p)
		if err := p.MayKeep(bob); err == nil != (tc.kind == errkind.OK) {
			t.Errorf("%s: %v", name, err)
		} else if kind, _ := refusal(err); err != nil && kind != tc.kind {
			t.Errorf("%s: %v", name, err)
		}
	}
}
