package router

import (
	"context"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// as finds what the driver of a sandbox can do besides.
func as[T any](ctx context.Context, r *Driver, op string, id ids.SandboxID) (T, error) {
	var none T
	d, err := r.madeIt(ctx, op, id)
	if err != nil {
		return none, err
	}
	t, ok := d.(T)
	if !ok {
		return none, errs.E(op, errkind.Unimplemented, string(id), "the sandbox's tier cannot do that")
	}
	return t, nil
}

// Stats implements driver.Meter.
func (r *Driver) Stats(ctx context.Context, id ids.SandboxID) (driver.Stats, error) {
	m, err := as[driver.Meter](ctx, r, "read usage", id)
	if err != nil {
		return driver.Stats{}, err
	}
	return m.Stats(ctx, id)
}

// Freeze implements driver.Freezer.
func (r *Driver) Freeze(ctx context.Context, id ids.SandboxID) error {
	f, err := as[driver.Freezer](ctx, r, "freeze sandbox", id)
	if err != nil {
		return err
	}
	return f.Freeze(ctx, id)
}

// Thaw implements driver.Freezer.
func (r *Driver) Thaw(ctx context.Context, id ids.SandboxID) error {
	f, err := as[driver.Freezer](ctx, r, "thaw sandbox", id)
	if err != nil {
		return err
	}
	return f.Thaw(ctx, id)
}

// Resize implements driver.Resizer.
func (r *Driver) Resize(ctx context.Context, id ids.SandboxID, l driver.Limits) error {
	f, err := as[driver.Resizer](ctx, r, "resize sandbox", id)
	if err != nil {
		return err
	}
	return f.Resize(ctx, id, l)
}

// ResizeDisk implements driver.DiskResizer.
func (r *Driver) ResizeDisk(ctx context.Context, id ids.SandboxID, bytes uint64) error {
	f, err := as[driver.DiskResizer](ctx, r, "resize disk of sandbox", id)
	if err != nil {
		return err
	}
	return f.ResizeDisk(ctx, id, bytes)
}

// Netns implements driver.Networker.
func (r *Driver) Netns(ctx context.Context, id ids.SandboxID) (string, error) {
	f, err := as[driver.Networker](ctx, r, "find network namespace", id)
	if err != nil {
		return "", err
	}
	return f.Netns(ctx, id)
}

// Snapshot implements driver.Snapshotter; nothing to do for a tier that does not clone.
func (r *Driver) Snapshot(ctx context.Context, t driver.Tier, img driver.Image, l driver.Limits) error {
	if s, ok := r.of(t).(driver.Snapshotter); ok {
		return s.Snapshot(ctx, t, img, l)
	}
	return nil
}

// Preflight implements driver.Checker: the first driver that cannot run says so.
func (r *Driver) Preflight(ctx context.Context) error {
	for _, d := range r.all {
		if c, ok := d.(driver.Checker); ok {
			if err := c.Preflight(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// Watch implements driver.Watcher: the events of all drivers. When one of them ends its own, all end:
// whoever watches begins again.
func (r *Driver) Watch(ctx context.Context) (<-chan driver.Event, error) {
	ctx, cancel := context.WithCancel(ctx)
	out := make(chan driver.Event, 64)
	var readers sync.WaitGroup
	for _, d := range r.all {
		w, ok := d.(driver.Watcher)
		if !ok {
			continue
		}
		in, err := w.Watch(ctx)
		if err != nil {
			cancel()
			return nil, err
		}
		readers.Go(func() {
			defer cancel()
			for ev := range in {
				select {
				case out <- ev:
				case <-ctx.Done():
				}
			}
		})
	}
	go func() {
		defer cancel()
		<-ctx.Done()
		readers.Wait()
		close(out)
	}()
	return out, nil
}
