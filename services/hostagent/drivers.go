package hostagent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/containerd"
	"github.com/berth-dev/berth/services/hostagent/driver/null"
)

const (
	driverContainerd = "containerd"
	driverNull       = "null"
)

// maker is how one driver is checked and opened.
type maker struct {
	preflight func(Config) error
	open      func(context.Context, Config, *slog.Logger) (driver.Driver, error)
	// bare: its sandboxes hold no guest agent, so they have no data plane. A sandbox without a wall
	// must not run anybody's commands.
	bare bool
	// cgroup holds every process of the host's sandboxes; nil: there is none to freeze.
	cgroup func(Config) string
	// prove makes a sandbox of each tier and says why it could not; nil: there is nothing to prove.
	prove func(context.Context, *host, []driver.Tier) map[driver.Tier]error
}

// drivers lists every driver. A new one is added here and nowhere else.
var drivers = map[string]maker{
	driverContainerd: {preflight: func(c Config) error { return containerd.Preflight(containerdConfig(c, nil)) }, open: openContainerd,
		cgroup: func(c Config) string { return containerdConfig(c, nil).Cgroup }, prove: proveContainerd},
	driverNull: {preflight: func(Config) error { return nil }, open: openNull, bare: true},
}

func containerdConfig(c Config, log *slog.Logger) containerd.Config {
	d := containerd.NewConfig(filepath.Join(c.Dir, "sandboxes"), c.Runtimes)
	d.Socket, d.Log = c.Socket, log
	d.Tiers = nil
	for _, t := range c.Tiers {
		d.Tiers = append(d.Tiers, driver.Tier(t))
	}
	return d
}

// Marks are the words of which every process, mount, cgroup and loop device of this host's
// sandboxes names one, so that they are told from another installation's on the same machine.
func (c Config) Marks() []string {
	d := containerdConfig(c, nil)
	p := proverConfig(c)
	return []string{c.Dir, d.Run, d.Cgroup, p.Run, p.Cgroup}
}

func openContainerd(ctx context.Context, c Config, log *slog.Logger) (driver.Driver, error) {
	return containerd.Open(ctx, containerdConfig(c, log))
}

func openNull(_ context.Context, c Config, _ *slog.Logger) (driver.Driver, error) {
	return null.Open(null.Config{Dir: filepath.Join(c.Dir, "sandboxes"), Bare: true})
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
