package drivertest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/router"
)

// Breaker is a Host that makes Prepare and Claim fail as Crash does Create: its points are those of
// both, in order. Every Host needs it whose driver has Warm.
type Breaker interface {
	Break(d driver.Driver, tier driver.Tier, n int, hard bool) bool
}

// Detacher is a Host that takes the disk of a spec off the host, as is done right after a Stop.
type Detacher interface {
	Detach(t testing.TB, spec driver.Spec) error
}

// Claimed is the host with drivers whose Create prepares a sandbox of nobody and claims it, so that the
// whole suite can be run on claimed ones. What a sandbox was prepared with differs from what it is
// claimed for in all that the driver says it can bind then; what it cannot is started cold, as a wake
// does it.
func Claimed(h Host) Host { return &claimed{Host: h, names: map[ids.SandboxID][]ids.SandboxID{}} }

// claimed is a host of claimed sandboxes.
type claimed struct {
	Host
	mu    sync.Mutex
	names map[ids.SandboxID][]ids.SandboxID // of the warm ones that were made for a name of Create
}

// claiming is a driver of claimed sandboxes. The router gives it every optional interface.
type claiming struct {
	*router.Driver
	host *claimed
	real driver.Driver
	tb   testing.TB
}

// Open implements Host.
func (h *claimed) Open(t testing.TB) driver.Driver {
	t.Helper()
	d := h.Host.Open(t)
	r, err := router.New(d)
	if err != nil {
		t.Fatal(err)
	}
	return &claiming{Driver: r, host: h, real: d, tb: t}
}

// Crash implements Host: at the points of Prepare and of Claim.
func (h *claimed) Crash(d driver.Driver, tier driver.Tier, n int, hard bool) bool {
	b, ok := h.Host.(Breaker)
	return ok && b.Break(d.(*claiming).real, tier, n, hard)
}

// Talk implements Talker.
func (h *claimed) Talk(t testing.TB, sb driver.Sandbox) (*Talk, error) { return dial(t, h.Host, sb) }

// Kill implements Killer.
func (h *claimed) Kill(t testing.TB, sb driver.Sandbox) { kill(t, h.Host, sb) }

// Litter implements Litterer.
func (h *claimed) Litter(t testing.TB, tier driver.Tier, id ids.SandboxID) bool {
	l, ok := h.Host.(Litterer)
	return ok && l.Litter(t, tier, id)
}

// Release implements Releaser.
func (h *claimed) Release(t testing.TB) {
	if r, ok := h.Host.(Releaser); ok {
		r.Release(t)
	}
}

// warmOf asks for a warm sandbox that can be claimed for the spec.
func warmOf(spec driver.Spec) driver.WarmSpec {
	return driver.WarmSpec{
		ID: ids.NewWarmID(), Tier: spec.Tier, Image: spec.Image, RunDir: spec.RunDir, Guest: spec.Guest,
		Init: spec.Init, Env: spec.Env, Hostname: spec.Hostname, Limits: spec.Limits, Link: spec.Link, Over: spec.Over,
	}
}

// strange asks for a warm sandbox that can be claimed for the spec and differs from it as much as the
// driver allows.
func strange(p driver.Preparer, spec driver.Spec) driver.WarmSpec {
	w := warmOf(spec)
	for _, change := range []func(*driver.WarmSpec){
		func(w *driver.WarmSpec) { w.Hostname = "nobodys" },
		func(w *driver.WarmSpec) { w.Env = []string{"LEFT=of-the-warm-one"} },
		func(w *driver.WarmSpec) { w.Image.Env = []string{"LEFT_TOO=of-the-warm-one"} },
		func(w *driver.WarmSpec) { w.Init = []string{"another"} },
		func(w *driver.WarmSpec) { w.Limits.CPUMillis /= 2 },
		func(w *driver.WarmSpec) { w.Limits.MemoryBytes /= 2 },
		func(w *driver.WarmSpec) { w.Limits.PIDs /= 2 },
		func(w *driver.WarmSpec) { w.Limits.OpenFiles = 128 },
	} {
		next := w
		if change(&next); p.Fits(next, spec) == "" {
			w = next
		}
	}
	return w
}

// Create implements driver.Driver.
func (c *claiming) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	if err := spec.Check(c.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	found, err := c.List(ctx)
	if err != nil {
		return driver.Sandbox{}, err
	}
	if slices.ContainsFunc(found, func(f driver.Found) bool { return f.Session == spec.Session }) {
		return c.Driver.Create(ctx, spec)
	}
	w := strange(c, spec)
	c.host.mu.Lock()
	c.host.names[spec.ID()] = append(c.host.names[spec.ID()], w.ID)
	c.host.mu.Unlock()
	if _, err := c.Prepare(ctx, w); err != nil {
		return driver.Sandbox{}, err
	}
	sb, err := c.Claim(ctx, w.ID, spec)
	if err == nil {
		return sb, enter(c.tb, c.host.Host, sb)
	}
	if err := c.unclaimed(w.ID); err != nil {
		return driver.Sandbox{}, err
	}
	switch errs.Kind(err) { // that it cannot be claimed is no reason not to start
	case errkind.Busy, errkind.NotFound, errkind.Unimplemented:
		return c.Driver.Create(ctx, spec)
	}
	return driver.Sandbox{}, err
}

// unclaimed removes a warm sandbox that nobody took.
func (c *claiming) unclaimed(id ids.SandboxID) error {
	ctx := context.Background()
	found, err := c.List(ctx)
	for _, f := range found {
		if f.ID == id && f.State == driver.Waiting {
			err = c.Driver.Stop(ctx, id)
		}
	}
	return err
}

// Stop implements driver.Driver: the name that a Create has stands for the warm ones as well.
func (c *claiming) Stop(ctx context.Context, id ids.SandboxID) error {
	c.host.mu.Lock()
	all := append([]ids.SandboxID{id}, c.host.names[id]...)
	c.host.mu.Unlock()
	var err error
	for _, id := range all {
		err = errors.Join(err, c.Driver.Stop(ctx, id))
	}
	return err
}

// enter makes the root of a claimed sandbox that of its first process, where that has to do it itself.
func enter(t testing.TB, h Host, sb driver.Sandbox) error {
	if sb.Enter == "" {
		return nil
	}
	k, err := dial(t, h, sb)
	if err != nil {
		return err
	}
	defer k.Close()
	_, err = k.Do("enter", sb.Enter)
	return err
}
