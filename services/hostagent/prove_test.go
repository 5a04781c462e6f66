package hostagent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// TestAHostOffersOnlyWhatItProved: a tier whose sandbox does not come up is not offered, and the reason is
// told; what was proved is remembered until a runtime changes, what failed is tried again.
func TestAHostOffersOnlyWhatItProved(t *testing.T) {
	dir := t.TempDir()
	h := &host{log: testLog()}
	h.cfg = Config{Dir: dir, Runtimes: filepath.Join(dir, "bin"), Driver: "proving", Tiers: []string{"container", "gvisor"}}
	must(t, os.Mkdir(h.cfg.Runtimes, 0o700))
	must(t, os.WriteFile(filepath.Join(h.cfg.Runtimes, "runc"), []byte("1"), 0o700))
	var tried []driver.Tier
	broken := map[driver.Tier]error{driver.GVisor: errors.New("the guest of a sandbox does not answer")}
	drivers["proving"] = maker{prove: func(_ context.Context, _ *host, tiers []driver.Tier) map[driver.Tier]error {
		tried = append(tried, tiers...)
		return broken
	}}
	t.Cleanup(func() { delete(drivers, "proving") })
	start := func() []driver.Tier {
		h.caps = map[driver.Tier]driver.Capabilities{driver.Container: {}, driver.GVisor: {}}
		h.tiers, tried = []driver.Tier{driver.Container, driver.GVisor}, nil
		must(t, h.proveTiers(t.Context()))
		return tried
	}
	if got := start(); len(got) != 2 || !slices.Equal(h.tiers, []driver.Tier{driver.Container}) {
		t.Errorf("tried %v, offers %v", got, h.tiers)
	}
	if !strings.Contains(strings.Join(h.missing(), "\n"), "tier gvisor: the guest of a sandbox does not answer") {
		t.Errorf("missing: %v", h.missing())
	}
	if got := start(); !slices.Equal(got, []driver.Tier{driver.GVisor}) {
		t.Errorf("tried again: %v", got)
	}
	broken = nil
	if start(); len(h.tiers) != 2 || len(h.missing()) != 0 {
		t.Errorf("offers %v, missing %v", h.tiers, h.missing())
	}
	if got := start(); got != nil {
		t.Errorf("tried again: %v", got)
	}
	must(t, os.Chtimes(filepath.Join(h.cfg.Runtimes, "runc"), time.Time{}, time.Unix(1, 0)))
	if got := start(); len(got) != 2 {
		t.Errorf("after an upgrade of a runtime: %v", got)
	}
	broken = map[driver.Tier]error{driver.Container: errors.New("no"), driver.GVisor: errors.New("no")}
	must(t, os.Remove(filepath.Join(dir, "proved.json")))
	h.caps = map[driver.Tier]driver.Capabilities{driver.Container: {}, driver.GVisor: {}}
	h.tiers = []driver.Tier{driver.Container, driver.GVisor}
	if err := h.proveTiers(t.Context()); err == nil || !strings.Contains(err.Error(), "tier gvisor: no") {
		t.Errorf("a host that can run nothing: %v", err)
	}
}

// TestABrokenRuntimeIsNoTier: with real processes, a runtime that is there and does not work.
func TestABrokenRuntimeIsNoTier(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	r := realRig(t)
	bin := filepath.Join(t.TempDir(), "bin")
	must(t, os.Mkdir(bin, 0o755))
	files, err := filepath.Glob(filepath.Join(r.cfg.Runtimes, "*"))
	must(t, err)
	for _, f := range files {
		real, err := filepath.EvalSymlinks(f)
		must(t, err)
		if filepath.Base(f) == "runsc" {
			must(t, os.WriteFile(filepath.Join(bin, "runsc"), []byte("#!/bin/sh\necho this machine has no platform >&2; exit 1\n"), 0o755))
			continue
		}
		must(t, os.Symlink(real, filepath.Join(bin, filepath.Base(f))))
	}
	r.cfg.Runtimes = bin
	r.start()
	if !slices.Equal(r.run.h.tiers, []driver.Tier{driver.Container}) {
		t.Errorf("offers %v", r.run.h.tiers)
	}
	missing := strings.Join(r.run.h.gatherFacts().GetMissing(), "\n")
	t.Log(missing)
	if !strings.Contains(missing, "tier gvisor") {
		t.Errorf("missing: %s", missing)
	}
	if left, err := os.Stat(r.cfg.proveDir()); err == nil {
		t.Errorf("%s is left", left.Name())
	}
}
