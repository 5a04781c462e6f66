// Package null is a driver without isolation: its sandboxes are goroutines behind real pipes. It is
// for tests and for benchmarks of the control plane, where it costs next to nothing, and guarantees
// the contract of package driver as far as its Capabilities say. A production host never offers it.
package null

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// Guest is the first process of a sandbox. It returns its exit status; it should return soon after
// ctx ends, and its in ends with it.
type Guest func(ctx context.Context, in io.Reader, out io.Writer) uint32

// World is what outlives a driver: the sandboxes, as on a real host. The zero World is ready.
type World struct {
	mu    sync.Mutex
	boxes map[ids.SandboxID]*box
	of    map[ids.SessionKey]ids.SandboxID
	news  map[chan driver.Event]bool
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

// Driver implements driver.Driver, Watcher and Meter.
type Driver struct {
	dir   string
	world *World
	guest Guest
	bare  bool
}

var (
	_ driver.Driver  = (*Driver)(nil)
	_ driver.Watcher = (*Driver)(nil)
	_ driver.Meter   = (*Driver)(nil)
)

// box is one sandbox.
type box struct {
	sb     driver.Sandbox
	dir    string
	cancel context.CancelFunc
	done   chan struct{} // closed when the guest ended
	status uint32
	ended  time.Time
}

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
		d.world.boxes, d.world.of = map[ids.SandboxID]*box{}, map[ids.SessionKey]ids.SandboxID{}
		d.world.news = map[chan driver.Event]bool{}
	}
	if d.guest == nil {
		d.guest = echo
	}
	return d, nil
}

func echo(_ context.Context, in io.Reader, out io.Writer) uint32 {
	_, _ = io.Copy(out, in)
	return 0
}

// Capabilities implements driver.Driver.
func (d *Driver) Capabilities() map[driver.Tier]driver.Capabilities {
	return map[driver.Tier]driver.Capabilities{driver.Null: {Adopts: true, Holds: true}}
}

// Close implements driver.Driver. The sandboxes live as long as the World.
func (d *Driver) Close() error { return nil }

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	const op = "create sandbox"
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	id := spec.ID()
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	if b, ok := d.world.boxes[id]; ok {
		if !b.over() {
			return b.sb, nil
		}
		d.world.remove(id)
	}
	if other, ok := d.world.of[spec.Session]; ok {
		return driver.Sandbox{}, errs.Errorf(op, errkind.Busy, "the session has compute of epoch %s here", d.world.boxes[other].sb.Epoch)
	}
	b := &box{done: make(chan struct{}), cancel: func() {}}
	b.sb = driver.Sandbox{ID: id, Session: spec.Session, Generation: spec.Generation, Epoch: spec.Epoch, Tier: spec.Tier}
	if !d.bare {
		if err := d.startGuest(ctx, b); err != nil {
			return driver.Sandbox{}, err
		}
	}
	d.world.boxes[id], d.world.of[spec.Session] = b, id
	return b.sb, nil
}

// startGuest makes the pipes and runs the guest behind them.
func (d *Driver) startGuest(ctx context.Context, b *box) error {
	b.dir = filepath.Join(d.dir, string(b.sb.ID))
	b.sb.Channel = driver.Channel{Stdin: filepath.Join(b.dir, "stdin"), Stdout: filepath.Join(b.dir, "stdout")}
	var in, out *os.File
	times, err := steps.Runner{}.Run(ctx, steps.Table{{{
		Name: "sandbox.start",
		Do:   func(context.Context) (err error) { in, out, err = b.open(); return err },
		Undo: func(context.Context) error { return os.RemoveAll(b.dir) },
	}}})
	if err != nil {
		return errs.E("create sandbox", errkind.Internal, string(b.sb.ID), err)
	}
	guestCtx, cancel := context.WithCancel(context.Background())
	b.cancel = func() { cancel(); _ = in.Close(); _ = out.Close() }
	b.sb.Steps = times
	go d.run(guestCtx, b, in, out)
	return nil
}

// open makes the pipes. Both are held open for both directions, so that no end of them is ever seen
// while the sandbox lives.
func (b *box) open() (in, out *os.File, err error) {
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return nil, nil, err
	}
	files := make([]*os.File, 2)
	for i, p := range []string{b.sb.Channel.Stdin, b.sb.Channel.Stdout} {
		if err := unix.Mkfifo(p, 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, nil, fmt.Errorf("make pipe: %w", err)
		}
		if files[i], err = os.OpenFile(p, os.O_RDWR|unix.O_NONBLOCK, 0); err != nil {
			return nil, nil, fmt.Errorf("open pipe: %w", err)
		}
	}
	return files[0], files[1], nil
}

// run is the life of a sandbox.
func (d *Driver) run(ctx context.Context, b *box, in, out *os.File) {
	status := d.guest(ctx, in, out)
	b.cancel()
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	b.status, b.ended = status, time.Now()
	close(b.done)
	if d.world.boxes[b.sb.ID] != b {
		return
	}
	for c := range d.world.news {
		select {
		case c <- b.event():
		default: // a watcher that falls behind looks again by itself
		}
	}
}

func (b *box) event() driver.Event {
	return driver.Event{ID: b.sb.ID, Kind: driver.EventExited, ExitStatus: b.status, At: b.ended}
}

func (b *box) over() bool {
	select {
	case <-b.done:
		return true
	default:
		return false
	}
}

// remove forgets a sandbox and ends its guest; the World is locked.
func (w *World) remove(id ids.SandboxID) {
	b := w.boxes[id]
	if b == nil {
		return
	}
	delete(w.boxes, id)
	delete(w.of, b.sb.Session)
	b.cancel()
	if b.dir != "" {
		_ = os.RemoveAll(b.dir)
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
	return nil
}

// List implements driver.Driver.
func (d *Driver) List(context.Context) ([]driver.Found, error) {
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	out := make([]driver.Found, 0, len(d.world.boxes))
	for _, b := range d.world.boxes {
		f := driver.Found{Sandbox: b.sb, State: driver.Running, Parts: []string{"pipes"}}
		if b.over() {
			f.State = driver.Exited
		}
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b driver.Found) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return out, nil
}

// Stats implements driver.Meter.
func (d *Driver) Stats(_ context.Context, id ids.SandboxID) (driver.Stats, error) {
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	if d.world.boxes[id] == nil {
		return driver.Stats{}, errs.E("read usage", errkind.NotFound, string(id), "there is no such sandbox here")
	}
	return driver.Stats{}, nil
}

// Watch implements driver.Watcher.
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Event, error) {
	news, out := make(chan driver.Event, 256), make(chan driver.Event)
	d.world.mu.Lock()
	d.world.news[news] = true
	var before []driver.Event
	for _, b := range d.world.boxes {
		if b.over() {
			before = append(before, b.event())
		}
	}
	d.world.mu.Unlock()
	go func() {
		defer close(out)
		defer func() {
			d.world.mu.Lock()
			delete(d.world.news, news)
			d.world.mu.Unlock()
		}()
		for _, e := range before {
			if !pass(ctx, out, e) {
				return
			}
		}
		for {
			select {
			case e := <-news:
				if !pass(ctx, out, e) {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func pass(ctx context.Context, out chan<- driver.Event, e driver.Event) bool {
	select {
	case out <- e:
		return true
	case <-ctx.Done():
		return false
	}
}
