package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials"
)

func secretSamples() map[string]func(*app) error {
	show := func(v any, human func(*app)) func(*app) error {
		return func(a *app) error { return a.print(v, func() { human(a) }) }
	}
	put, removed := secretPutOut{"acme", "api-key", 7}, secretRemovedOut{"acme", "api-key", true}
	list := secretsOutOf(&credentialsv1.SecretsReply{Secrets: []*credentialsv1.Secret{
		{Tenant: "acme", Name: "api-key", Hosts: []string{"api.example.com", "eu.api.example.com"}, Version: 7, ChangedAt: timestamppb.New(at)},
		{Tenant: "acme", Name: "registry", Hosts: []string{"npm.acme.example"}, Version: 3, ChangedAt: timestamppb.New(at)},
	}})
	return map[string]func(*app) error{
		"secret-put":    show(put, func(a *app) { a.renderSecretPut(put) }),
		"secret-list":   show(list, func(a *app) { a.renderSecrets(list) }),
		"secret-remove": show(removed, func(a *app) { a.renderSecretRemoved(removed) }),
	}
}

// TestSecretOutput holds the goldens and docs/howto/cli-json.md to what is printed.
func TestSecretOutput(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "howto", "cli-json.md"))
	if err != nil {
		t.Fatal(err)
	}
	for name, print := range secretSamples() {
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

// secretWorld is a bus with credentials, and an identity that knows one tenant.
func secretWorld(t *testing.T) (dir string) {
	t.Helper()
	e := bustest.Start(t)
	srv, err := bustest.Connect(t, e, subjects.Service("identity")).Serve(t.Context(), bus.ServiceConfig{Name: "identity"})
	if err != nil {
		t.Fatal(err)
	}
	err = bus.Handle(srv, "tenants", func(_ context.Context, _ bus.Request, req *identityv1.TenantsRequest) (*identityv1.TenantsReply, error) {
		if req.GetTenant() != "acme" {
			return nil, errs.E("tenants", errkind.NotFound, "", "there is none")
		}
		return &identityv1.TenantsReply{Tenants: []*identityv1.Tenant{{Tenant: "acme"}}}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	cfg := credentials.NewConfig()
	cfg.KeyDir = t.TempDir()
	conn := bustest.Connect(t, e, subjects.Service("credentials"))
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- credentials.Run(ctx, cfg, conn, bustest.Log(t), func() { close(ready) }) }()
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

// TestSecretsByCommand: what each command says, with which exit code, and that none says the value.
func TestSecretsByCommand(t *testing.T) {
	dir := secretWorld(t)
	const value = "sk-live-MARKER-0123"
	file := filepath.Join(dir, "value")
	if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args, stdin string
		code        int
		out         string // part of what is said
	}{
		{"secret list --tenant acme", "", 0, "no secrets"},
		{"secret put api-key --tenant acme --host api.example.com --value-file " + file, "", 0, "secret api-key of tenant acme is at version"},
		{"secret put api-key --tenant acme --host api.example.com --host eu.example.com", value, 0, "is at version"},
		{"secret put other --tenant acme --host api.example.com --value-file -", value + "\r\n", 0, "is at version"},
		{"secret list --tenant acme", "", 0, "api.example.com, eu.example.com"},
		{"secret put api-key --tenant nobody --host api.example.com", value, 1, "there is no tenant nobody"},
		{"secret put api-key --tenant acme", value, 2, "--host"},
		{"secret put api-key --tenant acme --host API.example.com", value, 2, "is no canonical name"},
		{"secret put Key --tenant acme --host api.example.com", value, 2, "the name of a secret"},
		{"secret put api-key --tenant acme --host api.example.com", "", 2, "is empty"},
		{"secret put api-key --tenant acme --host api.example.com", "short", 2, "8 to 8192 bytes"},
		{"secret put api-key --tenant acme --host api.example.com", value + "\nmore", 2, "printable ASCII"},
		{"secret put api-key --tenant acme --host api.example.com --value-file /nowhere", "", 1, "no such file"},
		{"secret put api-key --tenant acme --host api.example.com", strings.Repeat(value, 5000), 1, "64 KiB"},
		{"secret put api-key --tenant A/B --host api.example.com", value, 2, "tenant"},
		{"secret list --tenant *", "", 2, "tenant"},
		{"secret remove other --tenant acme", "", 0, "is destroyed"},
		{"secret remove other --tenant acme", "", 1, "tenant acme has no secret other"},
	} {
		var out, said bytes.Buffer
		a := &app{ctx: t.Context(), stdin: strings.NewReader(tc.stdin), stdout: &out, stderr: &said}
		code := run(a, append([]string{"--dir", dir}, strings.Fields(tc.args)...))
		all := out.String() + said.String()
		if code != tc.code || !strings.Contains(all, tc.out) || strings.Count(said.String(), "\n") > 1 || strings.Contains(all, value) {
			t.Errorf("berth %s: exit code %d, %q, %q", tc.args, code, out.String(), said.String())
		}
	}
}
