package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

const sampleNKey = "UAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"

func sampleTenants() *identityv1.TenantsReply {
	return &identityv1.TenantsReply{
		Tenants: []*identityv1.Tenant{
			{Tenant: "acme", Plan: "small", TierFloor: "gvisor", AdminAttach: true, ChangedAt: timestamppb.New(at), Revision: 7},
		},
		Issuers: []*identityv1.Issuer{{Issuer: "https://login.example.com", Audience: "berth", Tenant: "acme", Algorithms: []string{"ES256"},
			ClockTolerance: durationpb.New(time.Minute), Plan: "small", PlanClaim: "tier", Plans: map[string]string{"gold": "large", "silver": "small"},
			GroupsClaim: "groups", AdminGroups: []string{"Berth admins"}, Frontends: []string{"web"}, ChangedAt: timestamppb.New(at), Revision: 9}},
		Logins: []*identityv1.Login{
			{Name: "fe-acme-agents", Nkey: sampleNKey, Acting: "agents@acme", Suspended: true, SuspendedWhy: "its key leaked\x1b[31m", ChangedAt: timestamppb.New(at), Revision: 11},
			{Name: "fe-acme-web", Nkey: sampleNKey, Configured: true},
			{Name: "operator", Nkey: sampleNKey, Configured: true},
		},
		Suspended: []*identityv1.Suspension{
			{Tenant: "acme", Frontend: "agents", Reason: "its key leaked", By: "operator", At: timestamppb.New(at)},
			{Tenant: "acme", Issuer: "https://login.example.com", Subject: "mallory", Reason: "left the firm", By: "administrator", At: timestamppb.New(at)},
		},
	}
}

func registrySamples() map[string]func(*app) error {
	show := func(v any, human func(*app)) func(*app) error {
		return func(a *app) error { return a.print(v, func() { human(a) }) }
	}
	all := sampleTenants()
	more := sampleTenants()
	more.Tenants = append(more.Tenants, &identityv1.Tenant{Tenant: "globex", Configured: true, Suspended: true, SuspendedWhy: "unpaid"})
	list, shown, fes := tenantsOutOf(more), tenantShowOutOf(all), frontendsOutOf(all)
	tested := issuerTestOutOf("https://login.example.com", &identityv1.IssuerTestReply{Tenant: "acme", Checks: []*identityv1.Check{
		{Name: "registered", Good: true, Detail: "tenant acme, audience berth"}, {Name: "keys", Good: true, Detail: "1: ES256 k1"},
		{Name: "sealed token", Good: true, Detail: "opened"}, {Name: "signature", Good: true, Detail: "good"},
		{Name: "policy", Detail: "the token had expired when the request was stored; sign in again"}}})
	issuer := shown.Issuers[0]
	return map[string]func(*app) error{
		"tenant-list":   show(list, func(a *app) { a.renderTenants(list) }),
		"tenant-show":   show(shown, func(a *app) { a.renderTenant(shown) }),
		"issuer-add":    show(issuer, func(a *app) { a.renderIssuer(issuer) }),
		"issuer-test":   show(tested, func(a *app) { a.renderIssuerTest(tested) }),
		"frontend-list": show(fes, func(a *app) { a.renderFrontends(fes) }),
	}
}

// TestRegistryOutput holds the goldens and docs/howto/cli-json.md to what is printed.
func TestRegistryOutput(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "howto", "cli-json.md"))
	if err != nil {
		t.Fatal(err)
	}
	for name, print := range registrySamples() {
		for ext, json := range map[string]bool{"txt": false, "json": true} {
			var out bytes.Buffer
			if err := print(&app{stdout: &out, json: json}); err != nil {
				t.Fatal(err)
			}
			golden(t, name+"."+ext, out.Bytes())
			if json && !strings.Contains(string(doc), "```json\n"+out.String()+"```") {
				t.Errorf("docs/howto/cli-json.md does not show the output of %s:\n%s", name, out.String())
			}
		}
	}
}

// TestANewClientFile: only its owner reads it, it has the address and the roots of the operator's, its key
// is the one that is registered, and one that is there is not touched.
func TestANewClientFile(t *testing.T) {
	dir := t.TempDir()
	own := filepath.Join(dir, "operator.json")
	raw, err := json.Marshal(bus.Login{URL: "tls://bus:4222", Name: "operator", Inbox: "_INBOX.operator", Seed: "secret-of-the-operator", CA: "roots"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(own, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	who, path := subjects.Frontend("acme", "web"), filepath.Join(dir, "clients", "web.json")
	public, err := newClientFile(path, own, who)
	if err != nil {
		t.Fatal(err)
	}
	got, err := bus.ReadLogin(path)
	if err != nil {
		t.Fatal(err)
	}
	if got.URL != "tls://bus:4222" || got.CA != "roots" || got.Name != "fe-acme-web" || got.Inbox != who.Inbox() || got.Seed == "" || !strings.HasPrefix(public, "U") {
		t.Errorf("the client file is %q of %q", got.Name, got.URL)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if whole, _ := os.ReadFile(path); bytes.Contains(whole, []byte("secret-of-the-operator")) {
		t.Error("the operator's key went along")
	}
	if _, err := newClientFile(path, own, who); err == nil || !strings.Contains(err.Error(), "is there already") {
		t.Errorf("a second one: %v", err)
	}
}

// TestWrongUsageOfTheRegistry: each is refused before anybody is asked.
func TestWrongUsageOfTheRegistry(t *testing.T) {
	for _, args := range [][]string{
		{"tenant", "add", "A/B"}, {"tenant", "show", "none"}, {"tenant", "suspend", "acme", "--issuer", "https://idp"},
		{"tenant", "suspend", "acme", "--issuer", "https://idp", "--subject", "ann", "--frontend", "web"},
		{"tenant", "resume", "*"}, {"frontend", "add", "acme", "a.b"}, {"frontend", "remove", "acme", ">"}, {"frontend", "list", "A"},
		{"issuer", "add", "https://idp", "--tenant", "acme"}, {"issuer", "remove", "https://idp"},
	} {
		var out, errs bytes.Buffer
		a := &app{ctx: t.Context(), stdout: &out, stderr: &errs}
		if code := run(a, append([]string{"--dir", t.TempDir()}, args...)); code != 2 || out.Len() > 0 || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%v: exit code %d, %q", args, code, errs.String())
		}
	}
}
