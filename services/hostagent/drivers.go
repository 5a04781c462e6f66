package hostagent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/containerd"
	"github.com/berth-dev/berth/services/hostagent/driver/microvm"
	"github.com/berth-dev/berth/services/hostagent/driver/null"
	"github.com/berth-dev/berth/services/hostagent/driver/router"
	"github.com/berth-dev/berth/services/hostagent/driver/wasm"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
)

// Config.Driver may name these; the tiers alone decide otherwise.
const (
	driverContainerd = "containerd"
	driverNull       = "null"
)

// site is where drivers keep what they make: the host's own, or that of a proof.
type site struct {
	dir   string
	tiers []driver.Tier
	log   *slog.Logger
}

// cgroup is the parent of every sandbox's cgroup, whatever driver makes it.
func (p site) cgroup() string { return containerd.NewConfig(p.dir, "").Cgroup }

// maker is how one driver is checked and opened for those of its tiers that are configured.
type maker struct {
	tiers []driver.Tier
	// preflight says in one sentence why this host can run none of the tiers; it makes nothing.
	preflight func(Config, site) error
	open      func(context.Context, Config, site) (driver.Driver, error)
	// slow reports that open boots machines first, and early what its tiers are like; nil: it is quick.
	slow  func(Config, site) bool
	early driver.Capabilities
}

// makers lists every driver. A new one is added here and nowhere else.
var makers = []maker{
	{tiers: []driver.Tier{driver.Container, driver.GVisor, driver.Kata}, preflight: preflightContainerd, open: openContainerd},
	{tiers: []driver.Tier{driver.MicroVM}, preflight: preflightMicroVM, open: openMicroVM, slow: slowMicroVM,
		early: driver.Capabilities{Disk: true, RawDisk: true, OwnKernel: true}},
	{tiers: []driver.Tier{driver.WASM}, preflight: preflightWASM, open: openWASM},
	{tiers: []driver.Tier{driver.Null}, preflight: func(Config, site) error { return nil }, open: openNull},
}

// quickTiers are proved before a host is ready; the others later, since a machine takes seconds to boot.
var quickTiers = []driver.Tier{driver.Container, driver.GVisor, driver.Null}

func containerdConfig(c Config, p site) containerd.Config {
	d := containerd.NewConfig(p.dir, c.Runtimes)
	d.Socket, d.Log, d.Tiers = c.Socket, p.log, p.tiers
	d.Handlers = map[driver.Tier]containerd.Handler{}
	for t, h := range c.Handlers {
		d.Handlers[driver.Tier(t)] = h
	}
	return d
}

func preflightContainerd(c Config, p site) error {
	return containerd.Preflight(containerdConfig(c, p))
}

func openContainerd(ctx context.Context, c Config, p site) (driver.Driver, error) {
	return containerd.Open(ctx, containerdConfig(c, p))
}

// microvmConfig is that of the driver in a folder beside the others'. The kernel of machines stands
// beside the folder of runtimes.
func microvmConfig(c Config, p site) microvm.Config {
	d := microvm.NewConfig(filepath.Join(p.dir, "microvm"), filepath.Join(filepath.Dir(c.Runtimes), "microvm"), c.Guest)
	d.Cgroup, d.Log, d.Accel = p.cgroup(), p.log, accelFile
	return d
}

func preflightMicroVM(c Config, p site) error { return microvm.Preflight(microvmConfig(c, p)) }

// accelFile is where the driver keeps whether KVM works, for all hosts of this machine; to find out
// takes seconds.
const accelFile = "/run/berth/accel.json"

// slowMicroVM: a host on which the driver never opened has no machines either.
func slowMicroVM(_ Config, p site) bool {
	_, err := os.Stat(filepath.Join(p.dir, "microvm"))
	return err != nil
}

func openMicroVM(ctx context.Context, c Config, p site) (driver.Driver, error) {
	return microvm.Open(ctx, microvmConfig(c, p))
}

// wasmConfig: the programs of the tier lie beside the guest agent.
func wasmConfig(c Config, p site) wasm.Config {
	d := wasm.NewConfig(filepath.Join(p.dir, "wasm"), filepath.Dir(c.Guest))
	d.Cgroup, d.Log = p.cgroup(), p.log
	d.Cache = filepath.Join(c.Dir, "modules") // also a proof's: compiled once
	return d
}

func preflightWASM(c Config, p site) error { return wasm.Preflight(wasmConfig(c, p)) }

func openWASM(ctx context.Context, c Config, p site) (driver.Driver, error) {
	return wasm.Open(ctx, wasmConfig(c, p))
}

func openNull(_ context.Context, _ Config, p site) (driver.Driver, error) {
	return null.Open(null.Config{Dir: p.dir, Bare: true})
}

// sandboxes is the host's own site.
func (c Config) sandboxes(log *slog.Logger) site {
	p := site{dir: filepath.Join(c.Dir, "sandboxes"), log: log}
	for _, t := range c.Tiers {
		p.tiers = append(p.tiers, driver.Tier(t))
	}
	return p
}

// proving is where a proof has everything that it makes, apart from the host's own.
func (c Config) proving(log *slog.Logger, tiers ...driver.Tier) site {
	return site{dir: c.proveDir(), tiers: tiers, log: log}
}

// bare reports that sandboxes hold no guest agent, so that they have no data plane. A sandbox without a
// wall must not run anybody's commands.
func (c Config) bare() bool { return slices.Contains(c.Tiers, string(driver.Null)) }

// Marks are the words of which every process, mount, cgroup and loop device of this host's
// sandboxes names one, so that they are told from another installation's on the same machine.
func (c Config) Marks() []string {
	d, p := containerdConfig(c, c.sandboxes(nil)), containerdConfig(c, c.proving(nil))
	v, w := microvmConfig(c, c.sandboxes(nil)), microvmConfig(c, c.proving(nil))
	return []string{c.Dir, d.Run, d.Cgroup, p.Run, p.Cgroup, v.Run, w.Run}
}

// each calls f with every driver that is needed for a site, and the site for its tiers alone.
func (p site) each(f func(maker, site) error) error {
	for _, m := range makers {
		its := p
		its.tiers = slices.DeleteFunc(slices.Clone(p.tiers), func(t driver.Tier) bool { return !slices.Contains(m.tiers, t) })
		if len(its.tiers) == 0 {
			continue
		}
		if err := f(m, its); err != nil {
			return err
		}
	}
	return nil
}

// preflight refuses a host that can run none of its tiers.
func (c Config) preflight() error {
	var first error
	well := false
	_ = c.sandboxes(nil).each(func(m maker, its site) error {
		if err := m.preflight(c, its); err == nil {
			well = true
		} else if first == nil {
			first = err
		}
		return nil
	})
	switch {
	case well:
		return nil
	case first == nil:
		return errs.Errorf("check this host", errkind.Unimplemented, "there is no driver for the tiers %v", c.Tiers)
	}
	return first
}

// openDrivers opens what the tiers of a site need, as one driver, and tells of every tier what it does
// or why it cannot run. A driver that does not open keeps the others from nothing, unless must says that
// it is needed. One that is slow opens beside the path, unless must is nil: then nobody waits for others.
func openDrivers(ctx context.Context, c Config, p site, must func([]driver.Tier) bool) (driver.Driver, map[driver.Tier]driver.Capabilities, error) {
	caps := map[driver.Tier]driver.Capabilities{}
	for _, t := range p.tiers {
		caps[t] = driver.Capabilities{Absent: "there is no driver for it"}
	}
	var all []driver.Driver
	undo := func(err error) error {
		for _, d := range all {
			_ = d.Close()
		}
		return err
	}
	err := p.each(func(m maker, its site) error {
		err := m.preflight(c, its)
		var d driver.Driver
		needed := must != nil && must(its.tiers)
		switch {
		case err != nil:
		case must != nil && !needed && m.slow != nil && m.slow(c, its):
			d = openLate(its.tiers, m.early, func(ctx context.Context) (driver.Driver, error) { return m.open(ctx, c, its) })
		default:
			d, err = m.open(ctx, c, its)
		}
		if err == nil {
			all = append(all, d)
			return nil
		}
		if needed {
			return err
		}
		for _, t := range its.tiers {
			caps[t] = driver.Capabilities{Absent: err.Error()}
		}
		return nil
	})
	if err != nil {
		return nil, nil, undo(err)
	}
	r, err := router.New(all...)
	if err != nil {
		return nil, nil, undo(err)
	}
	maps.Copy(caps, r.Capabilities())
	return r, caps, nil
}

// runs reports whether a session is awake here in one of these tiers, for all that is known: without
// the driver of its sandbox this host could neither serve nor stop it.
func (h *host) runs(tiers []driver.Tier) bool {
	for _, s := range h.all() {
		if s.st.Phase == core.Awake && slices.Contains(tiers, driver.Tier(s.rec.Tier)) {
			return true
		}
	}
	return false
}

// offered are the tiers that are configured and that the driver can run, weakest first; none is a
// refusal.
func offered(want []string, caps map[driver.Tier]driver.Capabilities) ([]driver.Tier, error) {
	var out []driver.Tier
	for t, c := range caps {
		if c.Absent == "" && slices.Contains(want, string(t)) {
			out = append(out, t)
		}
	}
	if len(out) == 0 {
		return nil, errs.Errorf("start hostagent", errkind.Unavailable, "this host can run none of the tiers %v: %v", want, lacking(caps))
	}
	slices.SortFunc(out, func(a, b driver.Tier) int { return int(tierOf(string(a)) - tierOf(string(b))) })
	return out, nil
}

// lacking says what was tried on this host and is not there, each thing once.
func lacking(caps map[driver.Tier]driver.Capabilities) []string {
	var out []string
	for _, t := range slices.Sorted(maps.Keys(caps)) {
		c := caps[t]
		if c.Absent != "" {
			out = append(out, fmt.Sprintf("tier %s: %s", t, c.Absent))
		}
		for _, m := range c.Missing {
			if !slices.Contains(out, m) {
				out = append(out, m)
			}
		}
	}
	return out
}

// hasDisk reports whether sandboxes of this host have disks.
func hasDisk(caps map[driver.Tier]driver.Capabilities) bool {
	for _, c := range caps {
		if c.Disk {
			return true
		}
	}
	return false
}
