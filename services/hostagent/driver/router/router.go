// Package router makes one driver of several, one per tier. It guarantees that a sandbox is always
// handled by the driver that made it, also after a restart, and that a tier has one driver only. An
// optional interface that the driver of a sandbox does not have is refused as Unimplemented.
package router

import (
	"context"
	"errors"
	"maps"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// Driver implements driver.Driver and every optional interface.
type Driver struct {
	all []driver.Driver

	mu     sync.Mutex
	madeBy map[ids.SandboxID]driver.Driver
}

var (
	_ driver.Driver      = (*Driver)(nil)
	_ driver.Watcher     = (*Driver)(nil)
	_ driver.Meter       = (*Driver)(nil)
	_ driver.Freezer     = (*Driver)(nil)
	_ driver.Checker     = (*Driver)(nil)
	_ driver.Snapshotter = (*Driver)(nil)
	_ driver.Resizer     = (*Driver)(nil)
	_ driver.DiskResizer = (*Driver)(nil)
	_ driver.Networker   = (*Driver)(nil)
)

// New joins drivers, which it owns from then on. Invalid if two know the same tier.
func New(all ...driver.Driver) (*Driver, error) {
	seen := map[driver.Tier]bool{}
	for _, d := range all {
		for t := range d.Capabilities() {
			if seen[t] {
				return nil, errs.Errorf("join drivers", errkind.Invalid, "two drivers make sandboxes of tier %s", t)
			}
			seen[t] = true
		}
	}
	return &Driver{all: all, madeBy: map[ids.SandboxID]driver.Driver{}}, nil
}

// Capabilities implements driver.Driver.
func (r *Driver) Capabilities() map[driver.Tier]driver.Capabilities {
	out := map[driver.Tier]driver.Capabilities{}
	for _, d := range r.all {
		maps.Copy(out, d.Capabilities())
	}
	return out
}

// Create implements driver.Driver. A session that has compute in another tier is busy.
func (r *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	const op = "create sandbox"
	d := r.of(spec.Tier)
	if d == nil {
		return driver.Sandbox{}, errs.Errorf(op, errkind.Unimplemented, "this host has no tier %.32q", spec.Tier)
	}
	if err := r.alone(ctx, d, spec); err != nil {
		return driver.Sandbox{}, err
	}
	sb, err := d.Create(ctx, spec)
	if err == nil {
		r.note(sb.ID, d)
	}
	return sb, err
}

func (r *Driver) of(t driver.Tier) driver.Driver {
	for _, d := range r.all {
		if _, ok := d.Capabilities()[t]; ok {
			return d
		}
	}
	return nil
}

// alone refuses a sandbox of a session that another driver has one of: each driver looks only at its
// own.
func (r *Driver) alone(ctx context.Context, own driver.Driver, spec driver.Spec) error {
	for _, d := range r.all {
		if d == own {
			continue
		}
		found, err := d.List(ctx)
		if err != nil {
			return err
		}
		for _, f := range found {
			if f.Session == spec.Session {
				return errs.Errorf("create sandbox", errkind.Busy, "the session has compute of epoch %s in tier %s here", f.Epoch, f.Tier)
			}
		}
	}
	return nil
}

// Stop implements driver.Driver. Without knowing who made it, every driver is asked.
func (r *Driver) Stop(ctx context.Context, id ids.SandboxID) error {
	r.mu.Lock()
	d := r.madeBy[id]
	r.mu.Unlock()
	if d != nil {
		err := d.Stop(ctx, id)
		if err == nil {
			r.forget(id)
		}
		return err
	}
	var err error
	for _, d := range r.all {
		err = errors.Join(err, d.Stop(ctx, id))
	}
	return err
}

// List implements driver.Driver: what one driver does not know, nobody knows.
func (r *Driver) List(ctx context.Context) ([]driver.Found, error) {
	var out []driver.Found
	for _, d := range r.all {
		found, err := d.List(ctx)
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			r.note(f.ID, d)
		}
		out = append(out, found...)
	}
	return out, nil
}

// Close implements driver.Driver.
func (r *Driver) Close() error {
	var err error
	for _, d := range r.all {
		err = errors.Join(err, d.Close())
	}
	return err
}

func (r *Driver) note(id ids.SandboxID, d driver.Driver) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.madeBy[id] = d
}

func (r *Driver) forget(id ids.SandboxID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.madeBy, id)
}

// madeIt finds the driver of a sandbox.
func (r *Driver) madeIt(ctx context.Context, op string, id ids.SandboxID) (driver.Driver, error) {
	r.mu.Lock()
	d := r.madeBy[id]
	r.mu.Unlock()
	if d != nil {
		return d, nil
	}
	if _, err := r.List(ctx); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if d := r.madeBy[id]; d != nil {
		return d, nil
	}
	return nil, errs.E(op, errkind.NotFound, string(id), "there is no such sandbox")
}
