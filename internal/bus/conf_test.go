package bus_test

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
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
	if err := os.WriteFile(file, []byte(bus.AccountsConf(users)), 0o600); err != nil {
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
