package leaks

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/identity/devissuer"
	"github.com/berth-dev/berth/tools/berth/stack"
)

// up runs everything in this process, with sandboxes in memory, and writes log
// and spans into the state folder.
func up(t *testing.T, dir string) (info stack.Info, stop func()) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: no whole installation is started")
	}
	log, err := os.Create(filepath.Join(dir, "up.log"))
	if err != nil {
		t.Fatal(err)
	}
	cfg := stack.NewConfig()
	cfg.Dir, cfg.Listen = dir, "127.0.0.1:0"
	cfg.UseNullDriver()
	cfg.Telemetry = obs.Config{SpansFile: filepath.Join(dir, "spans.json")}
	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan stack.Info, 1), make(chan error, 1)
	go func() {
		done <- stack.Run(ctx, cfg, slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), func(i stack.Info) { ready <- i })
	}()
	select {
	case info = <-ready:
	case err := <-done:
		t.Fatalf("the stack did not start: %v", err)
	}
	return info, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the stack ended: %v", err)
		}
		log.Close()
	}
}

// TestAWholeRunLeavesNoSecret: requests by both doors, refusals and
// tokens that are no good leave nothing in the log, in spans, in streams, KV,
// audit and the scheduler's log, while it runs and afterwards.
func TestAWholeRunLeavesNoSecret(t *testing.T) {
	dir := t.TempDir()
	info, stop := up(t, dir)
	token := func(tenant, user string, at time.Time) string {
		t.Helper()
		out, err := devissuer.Mint(filepath.Join(dir, "keys"), devissuer.User{Tenant: ids.Tenant(tenant), Subject: user}, at)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	connect := func(tok string) *sdk.Client {
		t.Helper()
		c, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: filepath.Join(info.Clients, "fe-acme-web.json"), User: sdk.Token(tok)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return c
	}
	good := connect(token("acme", "ann", time.Now()))
	for _, queue := range []bool{false, true} {
		s, err := good.Open(t.Context(), sdk.OpenOptions{ViaQueue: queue})
		if err != nil {
			t.Fatal(err)
		}
		end := s.Close
		if queue {
			end = s.Delete
		}
		if err := end(t.Context()); err != nil {
			t.Error(err)
		}
	}
	whole := token("acme", "bob", time.Now())
	for what, tok := range map[string]string{"expired": token("acme", "bob", time.Now().Add(-48*time.Hour)), "another tenant's": token("globex", "bob", time.Now()),
		"cut": whole[:len(whole)-8], "with a foreign signature": whole[:len(whole)-12] + "AAAAAAAAAAAA", "without a signature": jws(`{"alg":"none"}`)} {
		if _, err := connect(tok).Open(t.Context(), sdk.OpenOptions{}); err == nil || strings.Contains(err.Error(), tok[:20]) {
			t.Errorf("%s: %v", what, err)
		}
	}
	CheckInstallation(t, dir)
	stop()
	CheckInstallation(t, dir)
	for _, file := range []string{"up.log", "spans.json"} {
		if info, err := os.Stat(filepath.Join(dir, file)); err != nil || info.Size() == 0 {
			t.Errorf("%s was not written: %v", file, err)
		}
	}
	// And had one been written, it would have been found.
	stores, _ := filepath.Glob(filepath.Join(dir, "bus", "jetstream", "*", "streams", "*", "msgs", "*.blk"))
	if len(stores) == 0 {
		t.Fatal("no store of a stream was found below the state folder")
	}
	f, err := os.OpenFile(stores[0], os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(whole); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if found, err := Installation(dir); err != nil || len(found) != 1 || found[0].What != "a token" {
		t.Errorf("a token in a stream: %v, %v", found, err)
	}
}
