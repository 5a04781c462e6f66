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

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// TestAHostOffersOnlyWhatItProved: a tier whose sandbox does not come up is not offered, and the reason is
// told; what was proved is remembered until a runtime changes, what failed is tried again.
func TestAHostOffersOnlyWhatItProved(t *testing.T) {
	dir := t.TempDir()
	h := &host{log: testLog()}
	h.cfg = Config{Dir: dir, Runtimes: filepath.Join(dir, "bin"), Tiers: []string{"container", "gvisor"}}
	h.caps = map[driver.Tier]driver.Capabilities{driver.Container: {}, driver.GVisor: {}}
	must(t, os.Mkdir(h.cfg.Runtimes, 0o700))
	must(t, os.WriteFile(filepath.Join(h.cfg.Runtimes, "runc"), []byte("1"), 0o700))
	var tried []driver.Tier
	broken := map[driver.Tier]error{driver.GVisor: errors.New("the guest of a sandbox does not answer")}
	h.proof = func(_ context.Context, tiers []driver.Tier) map[driver.Tier]error {
		tried = append(tried, tiers...)
		return broken
	}
	start := func() []driver.Tier {
		tried = nil
		must(t, h.proveTiers(t.Context()))
		return tried
	}
	if got := start(); len(got) != 2 || !slices.Equal(h.tiers.offered(), []driver.Tier{driver.Container}) {
		t.Errorf("tried %v, offers %v", got, h.tiers.offered())
	}
	if !strings.Contains(strings.Join(h.missing(), "\n"), "tier gvisor: the guest of a sandbox does not answer") {
		t.Errorf("missing: %v", h.missing())
	}
	if got := start(); !slices.Equal(got, []driver.Tier{driver.GVisor}) {
		t.Errorf("tried again: %v", got)
	}
	broken = nil
	if start(); len(h.tiers.offered()) != 2 || len(h.missing()) != 0 {
		t.Errorf("offers %v, missing %v", h.tiers.offered(), h.missing())
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
	if err := h.proveTiers(t.Context()); err == nil || !strings.Contains(err.Error(), "tier gvisor: no") {
		t.Errorf("a host that can run nothing: %v", err)
	}
}

// TestAStartDoesNotWaitForMachines: a tier that takes long to prove is offered later, and scheduler
// hears of it by a join; alone it is waited for; one that is absent is never tried.
func TestAStartDoesNotWaitForMachines(t *testing.T) {
	h := &host{log: testLog(), rejoin: make(chan struct{}, 1)}
	h.keeper = newKeeper(h)
	h.cfg = Config{Dir: t.TempDir(), Tiers: []string{"gvisor", "kata", "microvm", "wasm"}}
	h.caps = map[driver.Tier]driver.Capabilities{driver.GVisor: {}, driver.Kata: {Absent: "it is not installed"},
		driver.MicroVM: {Accel: "tcg", CPU: true, Memory: true, PIDs: true, DiskIO: true}, driver.WASM: {}}
	var tried [][]driver.Tier
	h.proof = func(_ context.Context, tiers []driver.Tier) map[driver.Tier]error {
		tried = append(tried, tiers)
		return map[driver.Tier]error{driver.WASM: errors.New("no runner")}
	}
	must(t, h.proveTiers(t.Context()))
	if len(tried) != 1 || !slices.Equal(h.tiers.offered(), []driver.Tier{driver.GVisor}) || h.offers(corev1.Tier_TIER_MICROVM) {
		t.Errorf("tried %v, offers %v", tried, h.tiers.offered())
	}
	want := map[corev1.Tier]string{corev1.Tier_TIER_CONTAINER: notConfigured, corev1.Tier_TIER_GVISOR: "",
		corev1.Tier_TIER_KATA: "it is not installed", corev1.Tier_TIER_MICROVM: notProved, corev1.Tier_TIER_WASM: notProved}
	check := func() {
		t.Helper()
		facts := h.hostLoad().GetTiers()
		if len(facts) != len(want) {
			t.Errorf("%d facts", len(facts))
		}
		for _, f := range facts {
			if f.GetAbsent() != want[f.GetTier()] {
				t.Errorf("%s: absent %q, want %q", f.GetTier(), f.GetAbsent(), want[f.GetTier()])
			}
			if f.GetTier() == corev1.Tier_TIER_MICROVM && f.GetAbsent() == "" && (f.GetAccel() != "tcg" || !slices.Equal(f.GetNotHeld(), []string{"open_files"})) {
				t.Errorf("microvm: %v", f)
			}
		}
	}
	check()
	h.proveLater(t.Context())
	want[corev1.Tier_TIER_MICROVM], want[corev1.Tier_TIER_WASM] = "", "no runner"
	check()
	if !slices.Equal(h.tiers.offered(), []driver.Tier{driver.GVisor, driver.MicroVM}) || len(h.rejoin) != 1 {
		t.Errorf("offers %v, %d joins asked for", h.tiers.offered(), len(h.rejoin))
	}
	must(t, h.proveTiers(t.Context())) // remembered
	if len(tried) != 3 || !slices.Equal(h.tiers.toProve(), []driver.Tier{driver.WASM}) {
		t.Errorf("tried %v, to prove %v", tried, h.tiers.toProve())
	}
	alone := &host{log: testLog(), proof: h.proof, caps: map[driver.Tier]driver.Capabilities{driver.MicroVM: {}}}
	alone.cfg = Config{Dir: t.TempDir(), Tiers: []string{"microvm"}}
	must(t, alone.proveTiers(t.Context()))
	if !alone.offers(corev1.Tier_TIER_MICROVM) {
		t.Error("a host of machines alone starts with no tier")
	}
}

// TestADriverThatCannotOpenKeepsNoOther, unless a session of it is awake here.
func TestADriverThatCannotOpenKeepsNoOther(t *testing.T) {
	was := makers
	t.Cleanup(func() { makers = was })
	closed := 0
	makers = []maker{
		{tiers: []driver.Tier{"container"}, preflight: func(Config, site) error { return nil }, open: func(context.Context, Config, site) (driver.Driver, error) {
			return of(t, "container", &closed), nil
		}},
		{tiers: []driver.Tier{"microvm"}, preflight: func(Config, site) error { return errors.New("there is no QEMU here") }},
	}
	cfg := Config{Dir: t.TempDir(), Tiers: []string{"container", "microvm", "wasm"}}
	must(t, cfg.preflight())
	d, caps, err := openDrivers(t.Context(), cfg, cfg.sandboxes(testLog()), nil)
	must(t, err)
	must(t, d.Close())
	if caps["microvm"].Absent != "there is no QEMU here" || caps["wasm"].Absent == "" || caps["null"].Absent != "" {
		t.Errorf("%+v", caps)
	}
	closed = 0
	needed := func(tiers []driver.Tier) bool { return slices.Contains(tiers, "microvm") }
	if _, _, err := openDrivers(t.Context(), cfg, cfg.sandboxes(testLog()), needed); err == nil || closed != 1 {
		t.Errorf("a driver that is needed: %v, %d closed", err, closed)
	}
	cfg.Tiers = []string{"microvm"}
	if err := cfg.preflight(); err == nil || !strings.Contains(err.Error(), "no QEMU") {
		t.Errorf("nothing can run: %v", err)
	}
}

// closing counts.
type closing struct {
	*procs
	closed *int
}

func (c *closing) Close() error { *c.closed++; return nil }

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
	if !slices.Equal(r.run.h.tiers.offered(), []driver.Tier{driver.Container}) {
		t.Errorf("offers %v", r.run.h.tiers.offered())
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

// TestASlowDriverOpensBesideThePath: until then its tier is absent, then it is proved and offered.
func TestASlowDriverOpensBesideThePath(t *testing.T) {
	was := makers
	t.Cleanup(func() { makers = was })
	closed, open := 0, make(chan struct{})
	null := func(Config, site) error { return nil }
	makers = []maker{
		{tiers: []driver.Tier{"container"}, preflight: null, open: func(context.Context, Config, site) (driver.Driver, error) {
			return of(t, "container", &closed), nil
		}},
		{tiers: []driver.Tier{"microvm"}, preflight: null, early: driver.Capabilities{RawDisk: true}, slow: func(Config, site) bool { return true },
			open: func(ctx context.Context, _ Config, _ site) (driver.Driver, error) {
				select {
				case <-open:
					return of(t, "microvm", &closed), nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}},
	}
	h := &host{log: testLog(), rejoin: make(chan struct{}, 1)}
	h.cfg = Config{Dir: t.TempDir(), Tiers: []string{"container", "microvm"}}
	h.proof = func(context.Context, []driver.Tier) map[driver.Tier]error { return nil }
	var err error
	h.drv, h.caps, err = openDrivers(t.Context(), h.cfg, h.cfg.sandboxes(testLog()), h.runs)
	must(t, err)
	must(t, h.proveTiers(t.Context()))
	if !slices.Equal(h.tiers.offered(), []driver.Tier{"container"}) || !h.raw("microvm") || h.abilities()["microvm"].Absent != opens {
		t.Errorf("offers %v: %+v", h.tiers.offered(), h.abilities())
	}
	if found, err := h.drv.List(t.Context()); err != nil || len(found) != 0 {
		t.Errorf("list: %v, %v", found, err)
	}
	close(open)
	h.proveLater(t.Context())
	if !h.offers(corev1.Tier_TIER_MICROVM) || len(h.rejoin) != 1 || h.abilities()["microvm"].Absent != "" {
		t.Errorf("offers %v: %+v", h.tiers.offered(), h.abilities())
	}
	must(t, h.drv.Close())
	if closed != 2 {
		t.Errorf("%d drivers were closed", closed)
	}
	// One that is given up while it opens.
	open = make(chan struct{})
	d, _, err := openDrivers(t.Context(), h.cfg, h.cfg.sandboxes(testLog()), h.runs)
	must(t, err)
	must(t, d.Close())
}

// of is a driver of bare processes that calls its tier something else.
func of(t *testing.T, tier driver.Tier, closed *int) driver.Driver {
	return &named{closing{newProcs(t), closed}, tier}
}

type named struct {
	closing
	tier driver.Tier
}

func (n *named) Capabilities() map[driver.Tier]driver.Capabilities {
	for _, c := range n.closing.Capabilities() {
		return map[driver.Tier]driver.Capabilities{n.tier: c}
	}
	return nil
}

// TestRealTiersAreProved: every tier of this machine comes up, those with machines after the start; what
// does not run here says why.
func TestRealTiersAreProved(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	r := realRig(t)
	r.cfg.Tiers = []string{"container", "gvisor", "kata", "microvm", "wasm"}
	began := time.Now()
	r.start()
	t.Logf("ready after %s with %v", time.Since(began), r.run.h.tiers.offered())
	if !r.run.h.offers(corev1.Tier_TIER_CONTAINER) {
		t.Errorf("a start offers %v", r.run.h.tiers.offered())
	}
	eventually(t, 3*time.Minute, "every tier was tried", func() bool { return len(r.run.h.tiers.toProve()) == 0 })
	t.Logf("all were tried after %s", time.Since(began))
	for _, f := range r.run.h.tierFacts() {
		t.Logf("%s: accel %q, absent %q, not held %v", f.GetTier(), f.GetAccel(), f.GetAbsent(), f.GetNotHeld())
		switch f.GetTier() {
		case corev1.Tier_TIER_KATA:
			if (f.GetAbsent() == "") != (f.GetAccel() != "") {
				t.Errorf("kata: %v", f)
			}
		case corev1.Tier_TIER_MICROVM:
			if f.GetAbsent() == "" && f.GetAccel() == "" || strings.Contains(f.GetAbsent(), "guest of a sandbox") {
				t.Errorf("microvm: %v", f)
			}
		}
	}
	eventually(t, 20*time.Second, "scheduler heard of it", func() bool {
		r.sched.mu.Lock()
		defer r.sched.mu.Unlock()
		return len(r.sched.load.GetTiers()) == len(contract)
	})
	if _, err := os.Stat(r.cfg.proveDir()); err == nil {
		t.Errorf("%s is left", r.cfg.proveDir())
	}
}
