package hostagent

import (
	"context"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// opens is why a tier is absent while its driver opens.
const opens = "its driver is being opened"

// late is a driver that takes long to open, because it boots a machine first, on a host where nothing
// of it runs yet: the start of the host does not wait for it. Until then its tiers are absent, and it
// has nothing. It implements driver.Driver and every optional interface.
type late struct {
	caps   map[driver.Tier]driver.Capabilities // until it is open
	done   chan struct{}
	cancel context.CancelFunc

	mu  sync.Mutex
	drv driver.Driver
	err error
}

var (
	_ driver.Driver      = (*late)(nil)
	_ driver.Watcher     = (*late)(nil)
	_ driver.Meter       = (*late)(nil)
	_ driver.Freezer     = (*late)(nil)
	_ driver.Snapshotter = (*late)(nil)
	_ driver.Resizer     = (*late)(nil)
	_ driver.DiskResizer = (*late)(nil)
	_ driver.Networker   = (*late)(nil)
	_ driver.Preparer    = (*late)(nil)
)

// openLate opens a driver beside the path. early is what is known of its tiers without it.
func openLate(tiers []driver.Tier, early driver.Capabilities, open func(context.Context) (driver.Driver, error)) *late {
	ctx, cancel := context.WithCancel(context.Background())
	l := &late{caps: map[driver.Tier]driver.Capabilities{}, done: make(chan struct{}), cancel: cancel}
	early.Absent = opens
	for _, t := range tiers {
		l.caps[t] = early
	}
	go func() {
		defer close(l.done)
		d, err := open(ctx)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.drv, l.err = d, err
	}()
	return l
}

// driver is the one that was opened, nil before or if it could not be.
func (l *late) driver() driver.Driver {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.drv
}

// Capabilities implements driver.Driver.
func (l *late) Capabilities() map[driver.Tier]driver.Capabilities {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.drv != nil {
		return l.drv.Capabilities()
	}
	out := map[driver.Tier]driver.Capabilities{}
	for t, c := range l.caps {
		if l.err != nil {
			c.Absent = l.err.Error()
		}
		out[t] = c
	}
	return out
}

// Create implements driver.Driver.
func (l *late) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	if d := l.driver(); d != nil {
		return d.Create(ctx, spec)
	}
	return driver.Sandbox{}, errs.E("create sandbox", errkind.Unimplemented, spec.ID().String(), l.Capabilities()[spec.Tier].Absent)
}

// Stop implements driver.Driver.
func (l *late) Stop(ctx context.Context, id ids.SandboxID) error {
	if d := l.driver(); d != nil {
		return d.Stop(ctx, id)
	}
	return nil
}

// List implements driver.Driver.
func (l *late) List(ctx context.Context) ([]driver.Found, error) {
	if d := l.driver(); d != nil {
		return d.List(ctx)
	}
	return nil, nil
}

// Close implements driver.Driver: an opening is given up.
func (l *late) Close() error {
	l.cancel()
	<-l.done
	if d := l.driver(); d != nil {
		return d.Close()
	}
	return nil
}

// Watch implements driver.Watcher: of a driver that is not open yet from then on.
func (l *late) Watch(ctx context.Context) (<-chan driver.Event, error) {
	out := make(chan driver.Event)
	go func() {
		defer close(out)
		select {
		case <-l.done:
		case <-ctx.Done():
			return
		}
		w, ok := l.driver().(driver.Watcher)
		if !ok {
			<-ctx.Done()
			return
		}
		in, err := w.Watch(ctx)
		if err != nil {
			return // whoever watches begins again
		}
		for ev := range in {
			select {
			case out <- ev:
			case <-ctx.Done():
			}
		}
	}()
	return out, nil
}

// can finds what the driver of a sandbox can do besides.
func can[T any](l *late, op string, id ids.SandboxID) (t T, err error) {
	d := l.driver()
	if d == nil {
		return t, errs.E(op, errkind.NotFound, string(id), "there is no such sandbox")
	}
	t, ok := d.(T)
	if !ok {
		return t, errs.E(op, errkind.Unimplemented, string(id), "the sandbox's tier cannot do that")
	}
	return t, nil
}

// Stats implements driver.Meter.
func (l *late) Stats(ctx context.Context, id ids.SandboxID) (driver.Stats, error) {
	d, err := can[driver.Meter](l, "read usage", id)
	if err != nil {
		return driver.Stats{}, err
	}
	return d.Stats(ctx, id)
}

// Freeze implements driver.Freezer.
func (l *late) Freeze(ctx context.Context, id ids.SandboxID) error {
	d, err := can[driver.Freezer](l, "freeze sandbox", id)
	if err != nil {
		return err
	}
	return d.Freeze(ctx, id)
}

// Thaw implements driver.Freezer.
func (l *late) Thaw(ctx context.Context, id ids.SandboxID) error {
	d, err := can[driver.Freezer](l, "thaw sandbox", id)
	if err != nil {
		return err
	}
	return d.Thaw(ctx, id)
}

// Snapshot implements driver.Snapshotter.
func (l *late) Snapshot(ctx context.Context, t driver.Tier, img driver.Image, limits driver.Limits) error {
	if d, ok := l.driver().(driver.Snapshotter); ok {
		return d.Snapshot(ctx, t, img, limits)
	}
	return nil
}

// Resize implements driver.Resizer.
func (l *late) Resize(ctx context.Context, id ids.SandboxID, limits driver.Limits) error {
	d, err := can[driver.Resizer](l, "resize sandbox", id)
	if err != nil {
		return err
	}
	return d.Resize(ctx, id, limits)
}

// ResizeDisk implements driver.DiskResizer.
func (l *late) ResizeDisk(ctx context.Context, id ids.SandboxID, bytes uint64) error {
	d, err := can[driver.DiskResizer](l, "resize disk of sandbox", id)
	if err != nil {
		return err
	}
	return d.ResizeDisk(ctx, id, bytes)
}

// Netns implements driver.Networker.
func (l *late) Netns(ctx context.Context, id ids.SandboxID) (string, error) {
	d, err := can[driver.Networker](l, "find network namespace", id)
	if err != nil {
		return "", err
	}
	return d.Netns(ctx, id)
}

// Prepare implements driver.Preparer.
func (l *late) Prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	const op = "prepare sandbox"
	d := l.driver()
	if d == nil {
		return driver.Sandbox{}, errs.E(op, errkind.Unimplemented, string(w.ID), l.Capabilities()[w.Tier].Absent)
	}
	p, ok := d.(driver.Preparer)
	if !ok {
		return driver.Sandbox{}, errs.Errorf(op, errkind.Unimplemented, "sandboxes of tier %.32q cannot be prepared", w.Tier)
	}
	return p.Prepare(ctx, w)
}

// Fits implements driver.Preparer.
func (l *late) Fits(w driver.WarmSpec, spec driver.Spec) string {
	if p, ok := l.driver().(driver.Preparer); ok {
		return p.Fits(w, spec)
	}
	return "its tier has no warm sandboxes here"
}

// Claim implements driver.Preparer.
func (l *late) Claim(ctx context.Context, warm ids.SandboxID, spec driver.Spec) (driver.Sandbox, error) {
	d, err := can[driver.Preparer](l, "claim sandbox", warm)
	if err != nil {
		return driver.Sandbox{}, err
	}
	return d.Claim(ctx, warm, spec)
}
