// Package null is a driver without isolation: its sandboxes are goroutines behind real pipes. It is
// for tests and for benchmarks of the control plane, where it costs next to nothing, and guarantees
// the contract of package driver, with its optional interfaces, as far as its Capabilities say. A
// production host never offers it.
package null

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// World is what outlives a driver: the sandboxes, as on a real host. The zero World is ready.
type World struct {
	mu       sync.Mutex
	boxes    map[ids.SandboxID]*box
	sessions map[ids.SessionKey]ids.SandboxID
	watchers map[*watcher]bool
}

// Config of the driver.
type Config struct {
	// Dir holds the pipes.
	Dir string
	// World that the driver works on; nil makes a new one.
	World *World
	// Guest of every sandbox; nil returns everything that it reads.
	Guest Guest
	// Bare sandboxes have no guest and no pipes: only their records exist.
	Bare bool
}

// Driver implements driver.Driver and the optional interfaces, but for a network.
type Driver struct {
	dir   string
	world *World
	guest Guest
	bare  bool
	run   steps.Runner
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
	_ driver.Preparer    = (*Driver)(nil)
)

// Open opens the driver.
func Open(cfg Config) (*Driver, error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, errs.E("open null driver", errkind.Internal, cfg.Dir, err)
	}
	d := &Driver{dir: cfg.Dir, world: cfg.World, guest: cfg.Guest, bare: cfg.Bare}
	if d.world == nil {
		d.world = &World{}
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	if d.world.boxes == nil {
		d.world.boxes, d.world.sessions = map[ids.SandboxID]*box{}, map[ids.SessionKey]ids.SandboxID{}
		d.world.watchers = map[*watcher]bool{}
	}
	if d.guest == nil {
		d.guest = echo
	}
	return d, nil
}

// Capabilities implements driver.Driver.
func (d *Driver) Capabilities() map[driver.Tier]driver.Capabilities {
	return map[driver.Tier]driver.Capabilities{driver.Null: {Adopts: true, Holds: true, Warm: true}}
}

// Preflight implements driver.Checker.
func (d *Driver) Preflight(context.Context) error {
	if st, err := os.Stat(d.dir); err != nil || !st.IsDir() {
		return errs.Errorf("check host", errkind.Unavailable, "%s is no folder for pipes", d.dir)
	}
	return nil
}

// Close implements driver.Driver. The sandboxes live as long as the World.
func (d *Driver) Close() error { return nil }

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	const op = "create sandbox"
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	if b := d.world.of(spec.Session); b != nil {
		switch {
		case b.sb.Generation != spec.Generation || b.sb.Epoch != spec.Epoch:
			return driver.Sandbox{}, d.world.busy(op, b)
		case b.state(d) == driver.Running:
			return b.sb, nil
		}
		d.world.remove(b.sb.ID)
	}
	b := newBox(driver.Sandbox{ID: spec.ID(), Session: spec.Session, Generation: spec.Generation, Epoch: spec.Epoch, Tier: spec.Tier}, spec.Limits)
	if err := d.make(ctx, op, b); err != nil {
		return driver.Sandbox{}, err
	}
	d.world.sessions[spec.Session] = b.sb.ID
	if !d.bare {
		go d.live(b)
	}
	return b.sb, nil
}

// make makes a sandbox without a guest and notes it; the World is locked.
func (d *Driver) make(ctx context.Context, op string, b *box) error {
	id := b.sb.ID
	if !d.bare {
		b.place(filepath.Join(d.dir, string(id)))
		times, err := d.run.Run(ctx, d.table(b))
		if err != nil {
			return errs.E(op, errs.Kind(err), string(id), err)
		}
		b.sb.Steps = times
	}
	if err := ctx.Err(); err != nil {
		b.end()
		return errs.E(op, errs.Kind(err), string(id), err)
	}
	d.world.boxes[id] = b
	return nil
}

// table lists the steps of a Create: what an earlier one left half-made is replaced.
func (d *Driver) table(b *box) steps.Table {
	return steps.Table{
		{{Name: "sandbox.folder", Do: func(context.Context) error { return b.makeFolder() }, Undo: func(context.Context) error { b.end(); return nil }}},
		{{Name: "sandbox.pipes", Do: func(context.Context) error { return b.open() }}},
	}
}

// remove forgets a sandbox and ends its guest; the World is locked.
func (w *World) remove(id ids.SandboxID) {
	b := w.boxes[id]
	if b == nil {
		return
	}
	delete(w.boxes, id)
	if w.sessions[b.sb.Session] == id {
		delete(w.sessions, b.sb.Session)
	}
	b.end()
}

// of is the sandbox of a session; the World is locked.
func (w *World) of(s ids.SessionKey) *box { return w.boxes[w.sessions[s]] }

func (w *World) busy(op string, b *box) error {
	return errs.Errorf(op, errkind.Busy, "the session has compute of epoch %s here", b.sb.Epoch)
}

// Kill ends the guest of a sandbox as a signal from outside does.
func (w *World) Kill(id ids.SandboxID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b := w.boxes[id]; b != nil {
		b.killed = true
		b.cancel()
		if b.warm != nil && !b.over() { // it has no guest that would end
			w.ended(b, statusKilled)
		}
	}
}

// Stop implements driver.Driver.
func (d *Driver) Stop(_ context.Context, id ids.SandboxID) error {
	if _, err := ids.ParseSandboxID(string(id)); err != nil {
		return errs.E("stop sandbox", errkind.Invalid, "", err)
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	d.world.remove(id)
	if d.bare {
		return nil
	}
	if err := os.RemoveAll(filepath.Join(d.dir, string(id))); err != nil { // of a half-made one
		return errs.E("stop sandbox", errkind.Internal, string(id), err)
	}
	return nil
}

// List implements driver.Driver: what lives, and the folders of what does not.
func (d *Driver) List(context.Context) ([]driver.Found, error) {
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	out := make([]driver.Found, 0, len(d.world.boxes))
	for _, b := range d.world.boxes {
		f := driver.Found{Sandbox: b.sb, State: b.state(d), Parts: []string{"record"}}
		if b.dir != "" {
			f.Parts = append(f.Parts, "pipes")
		}
		out = append(out, f)
	}
	if !d.bare {
		entries, err := os.ReadDir(d.dir)
		if err != nil {
			return nil, errs.E("list sandboxes", errkind.Internal, d.dir, err)
		}
		for _, e := range entries {
			id, err := ids.ParseSandboxID(e.Name())
			if err == nil && d.world.boxes[id] == nil {
				out = append(out, driver.Found{Sandbox: driver.Sandbox{ID: id}, State: driver.Partial, Parts: []string{"pipes"}})
			}
		}
	}
	slices.SortFunc(out, func(a, b driver.Found) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

// with runs f on a sandbox that exists; the World is locked meanwhile.
func (d *Driver) with(op string, id ids.SandboxID, f func(*box) error) error {
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	b := d.world.boxes[id]
	if b == nil {
		return errs.E(op, errkind.NotFound, string(id), "there is no such sandbox here")
	}
	return f(b)
}

// Stats implements driver.Meter: what a guest works between its calls counts as its cpu.
func (d *Driver) Stats(_ context.Context, id ids.SandboxID) (st driver.Stats, err error) {
	err = d.with("read usage", id, func(b *box) error {
		st.CPU = b.worked()
		if !b.over() {
			st.Processes = 1
		}
		return nil
	})
	return st, err
}

// Freeze implements driver.Freezer: the guest's next call returns after the Thaw.
func (d *Driver) Freeze(_ context.Context, id ids.SandboxID) error {
	return d.with("freeze sandbox", id, func(b *box) error { b.freeze(true); return nil })
}

// Thaw implements driver.Freezer.
func (d *Driver) Thaw(_ context.Context, id ids.SandboxID) error {
	return d.with("thaw sandbox", id, func(b *box) error { b.freeze(false); return nil })
}

// Resize implements driver.Resizer: the limits are noted; none of them is enforced here.
func (d *Driver) Resize(_ context.Context, id ids.SandboxID, l driver.Limits) error {
	const op = "resize sandbox"
	return d.with(op, id, func(b *box) error {
		if err := l.Check(); err != nil {
			return errs.E(op, errkind.Invalid, string(id), err)
		}
		b.limits = l
		return nil
	})
}

// ResizeDisk implements driver.DiskResizer: there is no disk, and nothing to do.
func (d *Driver) ResizeDisk(_ context.Context, id ids.SandboxID, bytes uint64) error {
	const op = "resize disk of sandbox"
	return d.with(op, id, func(*box) error {
		if bytes == 0 {
			return errs.E(op, errkind.Invalid, string(id), "a disk of no bytes")
		}
		return nil
	})
}

// Snapshot implements driver.Snapshotter: there is nothing to make.
func (d *Driver) Snapshot(_ context.Context, t driver.Tier, _ driver.Image, l driver.Limits) error {
	const op = "make snapshot"
	if t != driver.Null {
		return errs.Errorf(op, errkind.Unimplemented, "this host has no tier %.32q", t)
	}
	if err := l.Check(); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	return nil
}
