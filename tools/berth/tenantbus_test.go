package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity"
)

// registryWorld is a bus with an identity on it, and a credentials that ends grants.
func registryWorld(t *testing.T) (dir string) {
	t.Helper()
	e := bustest.Start(t)
	creds, err := bustest.Connect(t, e, subjects.Service("credentials")).Serve(t.Context(), bus.ServiceConfig{Name: "credentials"})
	if err != nil {
		t.Fatal(err)
	}
	if err := bus.Handle(creds, "end_grants", func(context.Context, bus.Request, *credentialsv1.EndGrantsRequest) (*credentialsv1.EndGrantsReply, error) {
		return &credentialsv1.EndGrantsReply{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	cfg := identity.NewConfig()
	cfg.KeyDir = t.TempDir()
	conn := bustest.Connect(t, e, subjects.Service("identity"))
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- identity.Run(ctx, cfg, conn, bustest.Log(t), func() { close(ready) }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-ready:
	case err := <-done:
		done <- err
		t.Fatal(err)
	}
	return e.Dir()
}

// TestTheRegistryByCommand: what each command says, and with which exit code.
func TestTheRegistryByCommand(t *testing.T) {
	dir := registryWorld(t)
	keys := filepath.Join(dir, "keys.json")
	if err := os.WriteFile(keys, []byte(`{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"k1","alg":"EdDSA","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte("eyJhbGciOiJub25lIn0.eyJpc3MiOiJodHRwczovL2lkcC5leGFtcGxlLmNvbSJ9.\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args string
		code int
		out  string // part of what is said
	}{
		{"tenant list", 0, "no tenants"},
		{"tenant add acme --plan small --admin-attach", 0, "tenant acme is at revision 1"},
		{"tenant add acme --plan large", 1, "tenant acme is registered already"},
		{"tenant add acme --plan large --revision 9", 1, "tenant acme was changed meanwhile"},
		{"tenant add acme --plan large --revision 1", 0, "tenant acme is at revision 2"},
		{"tenant add globex --tier-floor steel", 2, "there is no isolation tier"},
		{"tenant show nobody", 1, "there is no tenant nobody"},
		{"issuer add https://idp.example.com --audience berth --tenant nobody", 1, "tenant nobody is not registered"},
		{"issuer add http://idp.example.com --audience berth --tenant acme", 2, "must begin with https://"},
		{"issuer add https://idp.example.com --audience berth --tenant acme --jwks " + keys + " --plan-claim tier --plan-for gold=large --clock-tolerance 5s", 0, "is of tenant acme, at revision 3"},
		{"issuer test https://idp.example.com", 0, "good  keys: 1: EdDSA k1"},
		{"issuer test https://idp.example.com --token " + token, 1, "BAD   signature"},
		{"issuer test https://idp.example.com --token @" + token, 1, "BAD   signature"},
		{"issuer test https://idp.example.com --token eyJhbGciOiJub25lIn0.eyJpc3MiOiJodHRwczovL2lkcC5leGFtcGxlLmNvbSJ9.", 1, "BAD   signature"},
		{"issuer test https://other.example.com", 1, "BAD   registered"},
		{"frontend add acme web", 0, "its client file is " + filepath.Join(dir, "clients", "fe-acme-web.json")},
		{"frontend add acme web", 1, "is there already"},
		{"frontend add acme u-me", 2, "users' own connections"},
		{"frontend add nobody web", 1, "tenant nobody is not registered"},
		{"frontend list", 0, "acme    web"},
		{"tenant suspend acme --frontend web --reason leaked", 0, "frontend web of tenant acme is suspended"},
		{"frontend list acme", 0, "suspended: leaked"},
		{"tenant resume acme --frontend web", 0, "is not suspended any more"},
		{"tenant resume acme --frontend web", 0, "frontend web of tenant acme was not suspended"},
		{"tenant resume acme", 0, "tenant acme was not suspended"},
		{"tenant suspend acme --issuer https://idp.example.com --subject ann", 0, "user ann of https://idp.example.com in tenant acme is suspended"},
		{"tenant suspend acme", 0, "tenant acme is suspended"},
		{"tenant list", 0, "suspended"},
		{"tenant show acme", 0, "user ann of https://idp.example.com in tenant acme"},
		{"frontend remove acme web", 0, "is removed"},
		{"frontend remove acme web", 1, "has no login"},
		{"issuer remove https://idp.example.com --audience berth", 0, "is removed"},
		{"issuer remove https://idp.example.com --audience berth", 1, "is not registered"},
	} {
		var out, said bytes.Buffer
		a := &app{ctx: t.Context(), stdin: strings.NewReader(""), stdout: &out, stderr: &said}
		code := run(a, append([]string{"--dir", dir}, strings.Fields(tc.args)...))
		if code != tc.code || !strings.Contains(out.String()+said.String(), tc.out) || strings.Count(said.String(), "\n") > 1 {
			t.Errorf("berth %s: exit code %d, %q, %q", tc.args, code, out.String(), said.String())
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "clients", "fe-nobody-web.json")); err == nil {
		t.Error("a client file is left of a login that was refused")
	}
	var out bytes.Buffer
	a := &app{ctx: t.Context(), stdout: &out, stderr: &out}
	var shown tenantShowOut
	if code := run(a, []string{"--dir", dir, "--json", "tenant", "show", "acme"}); code != 0 || json.Unmarshal(out.Bytes(), &shown) != nil ||
		shown.Plan != "large" || shown.AdminAttach || !shown.Suspended || len(shown.Shut) != 2 || len(shown.Issuers) != 0 {
		t.Errorf("%d: %s", code, out.String())
	}
}
