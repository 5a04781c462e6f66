package stack

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/identity/devissuer"
)

// start runs a stack with the null driver.
func start(t *testing.T, dir string, change ...func(*Config)) (Info, func()) {
	t.Helper()
	cfg := NewConfig()
	cfg.Dir, cfg.Listen = dir, "127.0.0.1:0"
	cfg.UseNullDriver()
	for _, f := range change {
		f(&cfg)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan Info, 1), make(chan error, 1)
	go func() { done <- Run(ctx, cfg, bustest.Log(t), func(i Info) { ready <- i }) }()
	select {
	case info := <-ready:
		return info, func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("the stack ended: %v", err)
			}
		}
	case err := <-done:
		t.Fatalf("the stack did not start: %v", err)
	}
	panic("unreachable")
}

func connect(t *testing.T, info Info, tenant, user string) *sdk.Client {
	t.Helper()
	token, err := devissuer.Mint(filepath.Join(filepath.Dir(info.Clients), "keys"), devissuer.User{Tenant: ids.Tenant(tenant), Subject: user}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	c, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: filepath.Join(info.Clients, "fe-"+tenant+"-web.json"), User: sdk.Token(token)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// TestBothDoorsLeadToOneSession goes the whole way with every service.
func TestBothDoorsLeadToOneSession(t *testing.T) {
	info, stop := start(t, t.TempDir())
	defer stop()
	c := connect(t, info, "acme", "ann")
	direct, err := c.Open(t.Context(), sdk.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	durable, err := c.Open(t.Context(), sdk.OpenOptions{ViaQueue: true})
	if err != nil {
		t.Fatal(err)
	}
	if direct.Key() != durable.Key() || direct.Epoch() != durable.Epoch() {
		t.Errorf("two sessions: %s %s and %s %s", direct.Key(), direct.Epoch(), durable.Key(), durable.Epoch())
	}
	if direct.Origin() != sdk.Created || durable.Origin() == sdk.Created {
		t.Errorf("origins are %s and %s", direct.Origin(), durable.Origin())
	}
	for _, step := range direct.Timing().Steps {
		t.Logf("%-28s %s", step.Name, step.Took)
	}
}

// TestAnotherProcessOnTheSameFolder is refused in one sentence.
func TestAnotherProcessOnTheSameFolder(t *testing.T) {
	dir := t.TempDir()
	_, stop := start(t, dir)
	defer stop()
	cfg := NewConfig()
	cfg.Dir, cfg.Listen = dir, "127.0.0.1:0"
	cfg.UseNullDriver()
	err := Run(t.Context(), cfg, bustest.Log(t), nil)
	if err == nil || !strings.Contains(err.Error(), "another berth up uses the state folder") {
		t.Errorf("the second start says %v", err)
	}
}

// TestPortTaken is refused before anything is made.
func TestPortTaken(t *testing.T) {
	info, stop := start(t, t.TempDir())
	defer stop()
	cfg := NewConfig()
	cfg.Dir, cfg.Listen = filepath.Join(t.TempDir(), "new"), strings.TrimPrefix(info.URL, "tls://")
	cfg.UseNullDriver()
	err := Run(t.Context(), cfg, bustest.Log(t), nil)
	if err == nil || !strings.Contains(err.Error(), "cannot be used") {
		t.Errorf("the second start says %v", err)
	}
	if made, _ := filepath.Glob(cfg.Dir); len(made) > 0 {
		t.Errorf("it made %v", made)
	}
}
