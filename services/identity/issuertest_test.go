package identity_test

import (
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/seal"
)

// TestTheStepThatIsWrongIsTheOneNamed: an issuer is tested step by step, with the last one saying what is wrong; the answer and the record
// have nothing of the token but its principal.
func TestTheStepThatIsWrongIsTheOneNamed(t *testing.T) {
	p := newProvider(t)
	w := newWorldWith(t, p)
	rec := w.records(t)
	for name, tc := range map[string]struct {
		issuer, token string
		last          string
		good          bool
		detail        string
	}{
		"not registered": {"https://nobody", "", "registered", false, "not registered"},
		"keys alone":     {p.URL, "", "keys", true, "one"},
		"a good token":   {p.URL, p.token(t, nil), "policy", true, "good"},
		"expired":        {p.URL, p.token(t, map[string]any{"exp": time.Now().Add(-time.Hour).Unix()}), "policy", false, "expired"},
		"another's":      {p.URL, newProvider(t).token(t, map[string]any{"iss": p.URL}), "signature", false, "has that kid, but the signature is not by it"},
		"other audience": {p.URL, p.token(t, map[string]any{"aud": "elsewhere"}), "policy", false, "not registered; registered for its issuer: berth"},
		"other issuer":   {p.URL, newProvider(t).token(t, nil), "issuer", false, "another issuer"},
		"no JWT":         {p.URL, "opaque-token-of-somebody", "token", false, "no JWT"},
		"unknown key":    {p.URL, signWith(t, jose.RS256, "two", p.key, p.claims(nil)), "signature", false, `alg "RS256" and kid "two"; the issuer's key set has no key of that kid`},
		"no kid":         {p.URL, signWith(t, jose.RS256, "", newProvider(t).key, p.claims(nil)), "signature", false, "kid (none); none of the issuer's keys fits"},
		"algorithm":      {p.URL, signWith(t, jose.RS512, "one", p.key, p.claims(nil)), "signature", false, `alg "RS512" and kid "one"; allowed are RS256`},
		"no claims":      {p.URL, p.token(t, map[string]any{"aud": 7}), "claims", false, "signed by its issuer"},
		"control":        {p.URL, p.token(t, map[string]any{"sub": "a\nb"}), "claims", false, "control characters"},
	} {
		ask := &identityv1.IssuerTestRequest{Issuer: tc.issuer}
		if tc.token != "" {
			sealed, err := seal.SealTo(w.curve(t, w.operator), []byte(tc.token), rand.Reader)
			must(t, err)
			ask.SealedToken = sealed
		}
		r, err := operate[*identityv1.IssuerTestReply](t, w, "issuer_test", ask)
		must(t, err)
		last := r.GetChecks()[len(r.GetChecks())-1]
		if last.GetName() != tc.last || last.GetGood() != tc.good || !strings.Contains(last.GetDetail(), tc.detail) {
			t.Errorf("%s: %v", name, r)
		}
		if (r.GetSubject() == "alice") != (tc.good && tc.token != "") {
			t.Errorf("%s: the principal is %q", name, r.GetSubject())
		}
		i := rec.find(t, name, func(a *identityv1.Audit) bool {
			return a.GetVerb() == "issuer_test" && a.GetAbout().GetIssuer() == tc.issuer && a.GetAdmitted() == tc.good
		})
		for _, part := range strings.Split(tc.token, ".") {
			if len(part) > 16 && (strings.Contains(r.String(), part) || strings.Contains(string(rec.raw[i]), part)) {
				t.Errorf("%s: a part of the token is told", name)
			}
		}
	}
}

// TestAWrongAudienceNamesThoseThatAreRegistered: to the operator who asks, and none to another issuer.
func TestAWrongAudienceNamesThoseThatAreRegistered(t *testing.T) {
	p := newProvider(t)
	w := newWorldWith(t, p)
	test := func(issuer, audience, want string) {
		t.Helper()
		r, err := operate[*identityv1.IssuerTestReply](t, w, "issuer_test", &identityv1.IssuerTestRequest{Issuer: issuer, Audience: audience})
		must(t, err)
		if c := r.GetChecks(); len(c) != 1 || c[0].GetName() != "registered" || c[0].GetGood() || !strings.HasSuffix(c[0].GetDetail(), want) {
			t.Errorf("%s: %v", audience, r)
		}
	}
	test(p.URL, "elsewhere", "not registered with this audience; registered: berth")
	test("https://nobody", "berth", "this issuer is not registered")
	_, err := operate[*identityv1.IssuerPutReply](t, w, "issuer_put", &identityv1.IssuerPutRequest{Issuer: &identityv1.Issuer{
		Issuer: p.URL, Audience: "another", Tenant: "acme", Plan: "default"}})
	must(t, err)
	test(p.URL, "", "one must be named: another, berth")
}
