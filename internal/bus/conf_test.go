package bus_test

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats-server/v2/server"
)

// A cluster that is configured by file has the permissions that an embedded
// server has.
func TestAccountsConfSaysWhatTheEmbeddedServerDoes(t *testing.T) {
	dir := t.TempDir()
	users, err := bus.EnsureKeys(dir, "nats://x", identities())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(file, []byte(bus.AccountsConf(users, nil)), 0o600); err != nil {
		t.Fatal(err)
	}
	opts, err := server.ProcessConfigFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(opts.Nkeys) != len(users) || len(opts.Users) != 0 || opts.NoAuthUser != "" || opts.SystemAccount != "SYS" {
		t.Fatalf("%d nkeys, %d users", len(opts.Nkeys), len(opts.Users))
	}
	for i, u := range opts.Nkeys {
		want := bus.PermissionsOf(users[i].Caller)
		got := u.Permissions
		if u.Account.Name != "APP" || !reflect.DeepEqual(got.Publish.Allow, want.Publish) || !reflect.DeepEqual(got.Publish.Deny, want.DenyPublish) ||
			!reflect.DeepEqual(got.Subscribe.Allow, want.Subscribe) {
			t.Errorf("%s differs", users[i].Caller)
		}
		if (got.Response != nil) != want.Responses || want.Responses && (got.Response.MaxMsgs != 1 || got.Response.Expires != 5*time.Minute) {
			t.Errorf("%s: responses %+v", users[i].Caller, got.Response)
		}
	}
}

// A cluster that is configured by file asks identity as an embedded server does, and knows itself those
// only that must live without identity.
func TestAccountsConfAsksIdentity(t *testing.T) {
	dir := t.TempDir()
	users, err := bus.EnsureKeys(dir, "nats://x", append(identities(), subjects.Callout(), subjects.Warden()))
	if err != nil {
		t.Fatal(err)
	}
	callout, err := bus.EnsureCallout(dir)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(file, []byte(bus.AccountsConf(users, &callout)), 0o600); err != nil {
		t.Fatal(err)
	}
	opts, err := server.ProcessConfigFile(file)
	if err != nil {
		t.Fatal(err)
	}
	asked := opts.AuthCallout
	if asked == nil || asked.Issuer != callout.Issuer || asked.XKey != callout.XKey || asked.Account != "AUTH" || len(asked.AuthUsers) != len(opts.Nkeys) ||
		opts.AuthTimeout != bus.CalloutTime.Seconds() {
		t.Fatalf("%+v", asked)
	}
	accounts := map[string]string{}
	for _, u := range opts.Nkeys {
		accounts[u.Nkey] = u.Account.Name
	}
	for _, u := range users {
		want := "APP"
		switch u.Caller.Role {
		case subjects.RoleCallout:
			want = "AUTH"
		case subjects.RoleWarden:
			want = "SYS"
		case subjects.RoleHost, subjects.RoleGate, subjects.RoleFrontend, subjects.RoleOperator:
			want = ""
		}
		if accounts[u.Public] != want {
			t.Errorf("%s is in account %q, not %q", u.Caller, accounts[u.Public], want)
		}
	}
}
