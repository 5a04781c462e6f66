package registry

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
)

// Two public keys of nobody.
const (
	keyOne = "UDBYTHW2SNU2SRNHDNBORL2X4LGPEKCVJDSEM2AOVJZ5W5IVB2BOTDGS"
	keyTwo = "UCSCE7VHV5VNDW6V3KWIGHL3OFICXVMO7LRVERTMAKCE5YPOKPPEEWSZ"
)

// TestBadRecords: each is refused in one sentence.
func TestBadRecords(t *testing.T) {
	long := strings.Repeat("x", 256)
	issuer := func(change func(*identityv1.Issuer)) proto.Message {
		i := &identityv1.Issuer{Issuer: "https://idp", Audience: "berth", Tenant: "acme"}
		change(i)
		return i
	}
	for name, msg := range map[string]proto.Message{
		"tenant without a name":       &identityv1.Tenant{},
		"tenant of two tokens":        &identityv1.Tenant{Tenant: "a.b"},
		"tenant with a reserved name": &identityv1.Tenant{Tenant: "none"},
		"tenant with no such tier":    &identityv1.Tenant{Tenant: "a", TierFloor: "steel"},
		"tenant with TIER in it":      &identityv1.Tenant{Tenant: "a", TierFloor: "GVISOR"},
		"tenant with an absurd plan":  &identityv1.Tenant{Tenant: "a", Plan: "no plan"},
		"issuer in the clear":         issuer(func(i *identityv1.Issuer) { i.Issuer = "http://idp.example.com" }),
		"issuer that is no URL":       issuer(func(i *identityv1.Issuer) { i.Issuer = "idp" }),
		"issuer with a query":         issuer(func(i *identityv1.Issuer) { i.Issuer = "https://idp?x=1" }),
		"issuer too long":             issuer(func(i *identityv1.Issuer) { i.Issuer = "https://" + long }),
		"no audience":                 issuer(func(i *identityv1.Issuer) { i.Audience = "" }),
		"audience that is not shown":  issuer(func(i *identityv1.Issuer) { i.Audience = "a\x1b[31m" }),
		"audience that is no text":    issuer(func(i *identityv1.Issuer) { i.Audience = "a\xff" }),
		"algorithm none":              issuer(func(i *identityv1.Issuer) { i.Algorithms = []string{"none"} }),
		"algorithm of a shared key":   issuer(func(i *identityv1.Issuer) { i.Algorithms = []string{"HS256"} }),
		"clock before itself":         issuer(func(i *identityv1.Issuer) { i.ClockTolerance = durationpb.New(-time.Second) }),
		"clock of an hour":            issuer(func(i *identityv1.Issuer) { i.ClockTolerance = durationpb.New(time.Hour) }),
		"plans without a claim":       issuer(func(i *identityv1.Issuer) { i.Plans = map[string]string{"a": "b"} }),
		"claim without plans":         issuer(func(i *identityv1.Issuer) { i.PlanClaim = "plan" }),
		"value without a plan":        issuer(func(i *identityv1.Issuer) { i.PlanClaim, i.Plans = "plan", map[string]string{"a": ""} }),
		"groups without a claim":      issuer(func(i *identityv1.Issuer) { i.AdminGroups = []string{"admins"} }),
		"claim without groups":        issuer(func(i *identityv1.Issuer) { i.GroupsClaim = "groups" }),
		"group that is empty":         issuer(func(i *identityv1.Issuer) { i.GroupsClaim, i.AdminGroups = "groups", []string{""} }),
		"too many groups":             issuer(func(i *identityv1.Issuer) { i.GroupsClaim, i.AdminGroups = "groups", slices.Repeat([]string{"g"}, 65) }),
		"frontend that is a pattern":  issuer(func(i *identityv1.Issuer) { i.Frontends = []string{"*"} }),
		"keys that are none":          issuer(func(i *identityv1.Issuer) { i.Jwks = []byte(`{"keys":[]}`) }),
		"keys of a megabyte":          issuer(func(i *identityv1.Issuer) { i.Jwks = make([]byte, 1<<20) }),
		"login of a service":          &identityv1.Login{Name: "svc-scheduler", Nkey: keyOne},
		"login of the keeper":         &identityv1.Login{Name: "bus-keeper", Nkey: keyOne},
		"login of a user":             &identityv1.Login{Name: "fe-acme-u-aaaaaaaaaaaaaaaaaaaaaaaaaa", Nkey: keyOne},
		"login of nobody":             &identityv1.Login{Name: "fe-acme", Nkey: keyOne},
		"login with a seed":           &identityv1.Login{Name: "fe-acme-web", Nkey: "S" + keyOne[1:]},
		"login with another's key":    &identityv1.Login{Name: "fe-acme-web", Nkey: "A" + keyOne[1:]},
		"login without a key":         &identityv1.Login{Name: "fe-acme-web"},
		"host that acts for users":    &identityv1.Login{Name: "host-h1", Nkey: keyOne, Acting: "x"},
		"suspension of nobody":        &identityv1.Suspension{},
		"reason too long":             &identityv1.Suspension{Tenant: "acme", Reason: long},
		"reason that is not shown":    &identityv1.Suspension{Tenant: "acme", Reason: "a\nb"},
	} {
		if _, err := check(msg); !errs.Is(err, errkind.Invalid) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestTheStrongerFloorHolds: an issuer can be stricter than its tenant, never weaker.
func TestTheStrongerFloorHolds(t *testing.T) {
	for _, tc := range []struct {
		issuer, tenant string
		want           corev1.Tier
	}{
		{"", "", 0}, {"gvisor", "", corev1.Tier_TIER_GVISOR}, {"", "kata", corev1.Tier_TIER_KATA}, {"container", "gvisor", corev1.Tier_TIER_GVISOR},
		{"microvm", "gvisor", corev1.Tier_TIER_MICROVM}, {"kata", "kata", corev1.Tier_TIER_KATA}, {"wasm", "kata", corev1.Tier_TIER_WASM},
	} {
		if got := stronger(tc.issuer, tc.tenant); got != tc.want {
			t.Errorf("issuer %q, tenant %q: %s", tc.issuer, tc.tenant, got)
		}
	}
}

// TestTheConfigurationWins: over a record of the same name, which does not even add to it; and a record
// that contradicts it is left out.
func TestTheConfigurationWins(t *testing.T) {
	st := Static{
		Tenants: []*identityv1.Tenant{{Tenant: "acme", Plan: "small"}},
		Issuers: []*identityv1.Issuer{{Issuer: "https://idp", Audience: "a", Tenant: "acme"}},
		Logins:  []*identityv1.Login{{Name: "fe-acme-web", Nkey: keyOne}},
	}
	s, faults := build(st, &records{
		tenants: []*identityv1.Tenant{{Tenant: "acme", Plan: "large", AdminAttach: true, Revision: 1}, {Tenant: "globex", Revision: 2}},
		issuers: []*identityv1.Issuer{
			{Issuer: "https://idp", Audience: "a", Tenant: "globex", Revision: 3},
			{Issuer: "https://idp", Audience: "b", Tenant: "globex", Algorithms: []string{"ES256"}, Revision: 4},
			{Issuer: "https://idp2", Audience: "a", Tenant: "ghost", Revision: 5}},
		logins: []*identityv1.Login{{Name: "fe-acme-web", Nkey: keyTwo, Acting: "x", Revision: 6}, {Name: "fe-globex-web", Nkey: keyOne, Revision: 7}},
	})
	e, err := s.Policy.Find(core.Token{Issuer: "https://idp", Audience: []string{"a", "b"}, Subject: "ann"})
	if err != nil || e.Tenant != "acme" || e.Plan != "small" || s.Policy.Tenants["acme"].AdminAttach || len(s.Policy.Entries) != 1 {
		t.Errorf("%+v, %v", s.Policy, err)
	}
	if l, ok := s.ByNKey(keyOne); !ok || l.Caller != subjects.Frontend("acme", "web") || l.Acting != "" {
		t.Errorf("%+v", l)
	}
	if _, ok := s.ByNKey(keyTwo); ok {
		t.Error("a stored key of a configured login lets in")
	}
	if len(faults) != 3 {
		t.Errorf("said: %q", faults)
	}
}

// TestSuspendedIsSuspended: whatever else stands in the registry, in whatever order it came, who is
// suspended is not let in, and every replica makes the same of the same records.
func TestSuspendedIsSuspended(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := &records{}
		tenant := rapid.SampledFrom([]string{"a", "b", "c"})
		for rev := range uint64(rapid.IntRange(0, 12).Draw(t, "n")) {
			switch rapid.IntRange(0, 3).Draw(t, "kind") {
			case 0:
				r.tenants = append(r.tenants, &identityv1.Tenant{Tenant: tenant.Draw(t, "tenant"), AdminAttach: rapid.Bool().Draw(t, "attach"), Revision: rev})
			case 1:
				r.issuers = append(r.issuers, &identityv1.Issuer{Issuer: "https://idp", Audience: rapid.SampledFrom([]string{"x", "y"}).Draw(t, "aud"), Tenant: tenant.Draw(t, "tenant"), Revision: rev})
			case 2:
				r.logins = append(r.logins, &identityv1.Login{Name: "fe-" + tenant.Draw(t, "tenant") + "-web", Nkey: rapid.SampledFrom([]string{keyOne, keyTwo}).Draw(t, "key"), Revision: rev})
			case 3:
				s := &identityv1.Suspension{Tenant: tenant.Draw(t, "tenant")}
				switch rapid.IntRange(0, 2).Draw(t, "whom") {
				case 0:
					s.Frontend = "web"
				case 1:
					s.Issuer, s.Subject = "https://idp", "ann"
				}
				r.suspended = append(r.suspended, s)
			}
		}
		st := Static{Logins: []*identityv1.Login{{Name: "fe-c-web", Nkey: keyTwo}}}
		s, _ := build(st, r)
		for _, x := range r.suspended {
			name := ids.Tenant(x.GetTenant())
			_, shut := s.ShutUser(core.Principal{Tenant: name, Issuer: "https://idp", Subject: "ann"})
			if x.GetFrontend() == "" && !shut {
				t.Fatalf("%v lets ann in", x)
			}
			if _, shut := s.Shut(subjects.Frontend(name, "web")); x.GetSubject() == "" && !shut {
				t.Fatalf("%v lets the frontend in", x)
			}
		}
		slices.Reverse(r.issuers)
		slices.Reverse(r.logins)
		again, _ := build(st, r)
		if !proto.Equal(s.List(""), again.List("")) {
			t.Fatalf("another order makes\n%v\nof\n%v", again.List(""), s.List(""))
		}
	})
}

// FuzzRecord: whatever stands in the bucket, what is read of it is good and belongs under its key.
func FuzzRecord(f *testing.F) {
	for key, msg := range map[string]proto.Message{
		"tenant.acme":                         &identityv1.Tenant{Tenant: "acme", Plan: "small"},
		keyOfIssuer("https://idp", "berth"):   &identityv1.Issuer{Issuer: "https://idp", Audience: "berth", Tenant: "acme", ClockTolerance: durationpb.New(time.Minute)},
		"login.fe-acme-web":                   &identityv1.Login{Name: "fe-acme-web", Nkey: keyOne},
		"suspended.acme.frontend.web":         &identityv1.Suspension{Tenant: "acme", Frontend: "web"},
		suspendedKey + "acme.user." + "aaaaa": &identityv1.Suspension{Tenant: "acme", Issuer: "https://idp", Subject: "ann"},
	} {
		raw, err := protojson.Marshal(msg)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(key, raw)
	}
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		msg, err := decode(key, value)
		if err != nil {
			return
		}
		if under, err := check(msg); err != nil || under != key {
			t.Fatalf("%q holds what belongs under %q: %v", key, under, err)
		}
	})
}
