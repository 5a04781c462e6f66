//go:build linux

package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

const (
	// retryAfter is how long a template that could not be made is not tried again.
	retryAfter   = time.Minute
	migratePoll  = 2 * time.Millisecond
	templateTime = 2 * time.Minute
)

// template is a machine that booted once and waits to be somebody's: its memory and the state of its
// devices, both sealed. A clone has copies of the pages that it changes. There is no balloon and no
// reporting of free pages in it: both punch holes into the file that all clones read.
type template struct {
	made   chan struct{} // closed when it is made, or failed
	err    error
	failed time.Time
	used   time.Time
	memory *os.File
	state  *os.File
	took   time.Duration
}

// shelf keeps templates.
type shelf struct {
	mu  sync.Mutex
	all map[shape]*template
}

// templates are those of this process. They end with it: to boot one again takes seconds.
type templates struct {
	*shelf
	d      *Driver
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func newTemplates(d *Driver) *templates {
	t := &templates{d: d, shelf: d.cfg.shelf}
	if t.shelf == nil {
		t.shelf = &shelf{all: map[shape]*template{}}
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	return t
}

func (t *templates) close() {
	t.cancel()
	t.wg.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	for s, one := range t.all {
		if t.d.cfg.shelf == nil || one.err != nil {
			one.close()
			delete(t.all, s)
		}
	}
}

func (t *template) close() {
	for _, f := range []*os.File{t.memory, t.state} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Snapshot implements driver.Snapshotter.
func (d *Driver) Snapshot(ctx context.Context, tier driver.Tier, img driver.Image, l driver.Limits) error {
	const op = "make template"
	if tier != driver.MicroVM || d.cfg.NoTemplates || d.accel.Absent != "" {
		return errs.Errorf(op, errkind.Unimplemented, "this host makes no templates of tier %.32q%s", tier, d.accel.Absent)
	}
	s, err := d.shapeOf(img, l)
	if err != nil {
		return errs.E(op, errkind.Invalid, img.Digest, err)
	}
	_, err = d.templates.get(ctx, s)
	return errs.Wrap(op, img.Digest, err)
}

// get returns the template of a shape, which it makes if need be. Who waits for it may give up; it is
// made all the same.
func (t *templates) get(ctx context.Context, s shape) (*template, error) {
	t.mu.Lock()
	one := t.all[s]
	if one != nil && !one.failed.IsZero() && time.Since(one.failed) > retryAfter {
		one = nil
	}
	if one == nil {
		if t.ctx.Err() != nil {
			t.mu.Unlock()
			return nil, errs.E("make template", errkind.Unavailable, "", "the driver is closed")
		}
		one = &template{made: make(chan struct{})}
		t.all[s] = one
		t.wg.Go(func() { t.make(s, one) })
	}
	one.used = time.Now()
	t.mu.Unlock()
	select {
	case <-one.made:
		return one, one.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// open returns the files of a template for one clone; an error if it was dropped meanwhile.
func (t *templates) open(one *template) (memory, state *os.File, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	// QEMU wants to be able to write to what it copies on write; the seal forbids it.
	if memory, err = reopen(one.memory, unix.O_RDWR); err != nil {
		return nil, nil, err
	}
	if state, err = reopen(one.state, unix.O_RDONLY); err != nil {
		_ = memory.Close()
		return nil, nil, err
	}
	return memory, state, nil
}

func (t *templates) make(s shape, one *template) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.ctx, templateTime)
	defer cancel()
	memory, state, err := t.d.snapshot(ctx, s)
	t.mu.Lock()
	defer t.mu.Unlock()
	defer close(one.made)
	if err != nil {
		one.err, one.failed = errs.E("make template", errkind.Unavailable, "", err), time.Now()
		t.d.log.Warn("no template: machines are booted", "err", err)
		return
	}
	one.memory, one.state, one.took = memory, state, time.Since(began)
	t.evict(one)
}

// evict drops the templates that were not used for longest. Clones of them go on: they hold the memory
// themselves.
func (t *templates) evict(keep *template) {
	for {
		var oldest shape
		n := 0
		for s, one := range t.all {
			if one.memory == nil {
				continue
			}
			n++
			if old := t.all[oldest]; one != keep && (old == nil || one.used.Before(old.used)) {
				oldest = s
			}
		}
		old := t.all[oldest]
		if n <= max(1, t.d.cfg.Templates) || old == nil {
			return
		}
		old.close()
		delete(t.all, oldest)
	}
}

// snapshot boots a machine and keeps what it is when its first process says hello.
func (d *Driver) snapshot(ctx context.Context, s shape) (memory, state *os.File, err error) {
	if memory, err = memfd("template-memory", int64(s.Memory)); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			(&template{memory: memory, state: state}).close()
		}
	}()
	if state, err = memfd("template-state", 0); err != nil {
		return nil, nil, err
	}
	h, err := d.boot(ctx, templatePrefix, s, memory)
	if err != nil {
		return nil, nil, err
	}
	if err = errors.Join(h.migrate(ctx, state), h.remove()); err != nil {
		return nil, nil, h.explain(err)
	}
	return memory, state, errors.Join(seal(memory), seal(state))
}

// migrate stops the machine and writes the state of its devices; the memory is in its file already.
func (h *helper) migrate(ctx context.Context, state *os.File) error {
	v := h.vm
	if err := v.call(ctx, "stop", nil, nil); err != nil {
		return err
	}
	if err := v.call(ctx, "migrate-set-capabilities", ignoreShared, nil); err != nil {
		return err
	}
	if err := v.move(ctx, "migrate", state); err != nil {
		return err
	}
	return v.migrated(ctx)
}

// move begins a migration to or from a file.
func (v *vm) move(ctx context.Context, command string, state *os.File) error {
	c, err := v.monitor(ctx)
	if err != nil {
		return err
	}
	if err := c.Give(ctx, stateName, state); err != nil {
		return err
	}
	return c.Call(ctx, command, map[string]any{"uri": "fd:" + stateName}, nil)
}

// stateName is what QEMU calls the file of its state.
const stateName = "state"

// ignoreShared leaves memory that is in a file out of a migration.
var ignoreShared = map[string]any{"capabilities": []map[string]any{{"capability": "x-ignore-shared", "state": true}}}

// migrated waits until the migration, in or out, is over.
func (v *vm) migrated(ctx context.Context) error {
	for {
		var m struct {
			Status string `json:"status"`
			Why    string `json:"error-desc"`
		}
		if err := v.call(ctx, "query-migrate", nil, &m); err != nil {
			return err
		}
		switch m.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("migration %s: %s", m.Status, m.Why)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(migratePoll):
		}
	}
}
