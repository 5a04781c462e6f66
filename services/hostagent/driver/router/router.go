// Package router makes one driver of several, one per tier. It guarantees that a sandbox is always
// handled by the driver that made it, also after a restart; that a tier has one driver only; that a
// session has compute in one tier at a time; and that what several drivers find of one sandbox, since
// they share the parent of its cgroup, is listed once, as its own driver's. An optional interface that
// the driver of a sandbox does not have is refused as Unimplemented.
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
	madeBy ledger
	listed bool // what an earlier process left is in madeBy
	notes  uint64
}

// made is who makes, or has made, a sandbox.
type made struct {
	by      driver.Driver
	session ids.SessionKey
	making  int    // calls that make it and are under way
	at      uint64 // number of the note
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
	_ driver.Preparer    = (*Driver)(nil)
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
	return &Driver{all: all, madeBy: newLedger()}, nil
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
	if err := r.claim(ctx, d, spec); err != nil {
		return driver.Sandbox{}, err
	}
	defer r.made(spec.ID()) // also after an error: the next claim looks whether anything is left
	return d.Create(ctx, spec)
}

func (r *Driver) of(t driver.Tier) driver.Driver {
	for _, d := range r.all {
		if _, ok := d.Capabilities()[t]; ok {
			return d
		}
	}
	return nil
}

// claim notes who makes the sandbox before anything of it exists, so that nobody takes a part of it
// for something else. Busy if another driver has compute of the session: each looks only at its own.
func (r *Driver) claim(ctx context.Context, own driver.Driver, spec driver.Spec) error {
	r.mu.Lock()
	listed := r.listed
	r.mu.Unlock()
	if !listed {
		if _, err := r.List(ctx); err != nil {
			return err
		}
	}
	busy := func(what string) error {
		return errs.E("create sandbox", errkind.Busy, spec.ID().String(), "the session has compute "+what+" here")
	}
	for {
		other, making := r.note(spec.ID(), own, spec.Session)
		switch {
		case making:
			return busy("that is being made in another tier")
		case other == nil:
			return nil
		}
		found, err := other.List(ctx)
		if err != nil {
			return err
		}
		for _, f := range found {
			if f.Session == spec.Session || f.Session == "" && r.has(f.ID, spec.Session) {
				return busy("of epoch " + f.Epoch.String() + " in tier " + string(f.Tier))
			}
		}
		r.forget(func(_ ids.SandboxID, m made) bool {
			return m.by == other && m.session == spec.Session && m.making == 0
		})
	}
}

// note says who makes a sandbox, unless another driver has one of the session, or makes it.
func (r *Driver) note(id ids.SandboxID, by driver.Driver, s ids.SessionKey) (other driver.Driver, making bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if have, ok := r.madeBy.other(s, by); ok {
		return have.by, have.making > 0
	}
	r.notes++
	r.madeBy.set(id, made{by: by, session: s, making: r.madeBy.all[id].making + 1, at: r.notes})
	return nil, false
}

// made notes that a call which made a sandbox is over. A list that began before may not have seen it.
func (r *Driver) made(id ids.SandboxID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m, ok := r.madeBy.all[id]; ok {
		r.notes++
		m.making, m.at = m.making-1, r.notes
		r.madeBy.set(id, m)
	}
}

func (r *Driver) has(id ids.SandboxID, s ids.SessionKey) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.madeBy.all[id].session == s
}

func (r *Driver) forget(which func(ids.SandboxID, made) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.madeBy.dropIf(which)
}

func (r *Driver) maker(id ids.SandboxID) driver.Driver {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.madeBy.all[id].by
}

// Stop implements driver.Driver. Without knowing who made it, every driver is asked.
func (r *Driver) Stop(ctx context.Context, id ids.SandboxID) error {
	if d := r.maker(id); d != nil {
		err := d.Stop(ctx, id)
		if err == nil {
			r.mu.Lock()
			r.madeBy.drop(id)
			r.mu.Unlock()
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
	r.mu.Lock()
	began := r.notes
	r.mu.Unlock()
	by := make([][]driver.Found, len(r.all))
	for i, d := range r.all {
		var err error
		if by[i], err = d.List(ctx); err != nil {
			return nil, err
		}
	}
	return r.join(by, began), nil
}

// join takes what each driver found for one list, and notes who has what. Notes that are newer than
// began stay as they are.
func (r *Driver) join(by [][]driver.Found, began uint64) (out []driver.Found) {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := map[ids.SandboxID]bool{}
	for i, d := range r.all {
		for _, f := range by[i] {
			if !r.told(d, f) {
				continue
			}
			seen[f.ID] = true
			out = append(out, f)
			if m, ok := r.madeBy.all[f.ID]; !ok || m.making == 0 && m.at <= began {
				r.madeBy.set(f.ID, made{by: d, session: f.Session, at: m.at})
			}
		}
	}
	for i, d := range r.all {
		for _, f := range by[i] {
			// A part that another driver's sandbox has, or that was told already, is no stray.
			if has := r.madeBy.all[f.ID].by; r.told(d, f) || seen[f.ID] || has != nil && has != d {
				continue
			}
			seen[f.ID] = true
			out = append(out, f)
		}
	}
	r.madeBy.dropIf(func(id ids.SandboxID, m made) bool { return !seen[id] && m.making == 0 && m.at <= began })
	r.listed = true
	return out
}

// told reports whether a driver tells of a sandbox as its own: by the session, or as a warm one.
func (r *Driver) told(d driver.Driver, f driver.Found) bool {
	return f.Session != "" || f.State == driver.Waiting || f.ID.IsWarm() && r.of(f.Tier) == d
}

// Close implements driver.Driver.
func (r *Driver) Close() error {
	var err error
	for _, d := range r.all {
		err = errors.Join(err, d.Close())
	}
	return err
}

// madeIt finds the driver of a sandbox.
func (r *Driver) madeIt(ctx context.Context, op string, id ids.SandboxID) (driver.Driver, error) {
	if d := r.maker(id); d != nil {
		return d, nil
	}
	if _, err := r.List(ctx); err != nil {
		return nil, err
	}
	if d := r.maker(id); d != nil {
		return d, nil
	}
	return nil, errs.E(op, errkind.NotFound, string(id), "there is no such sandbox")
}
