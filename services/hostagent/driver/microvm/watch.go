//go:build linux

package microvm

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

const (
	watchBuffer = 256
	watchPeriod = 2 * time.Second // of a look at everything, beside the news
)

// watcher is one Watch.
type watcher struct {
	d    *Driver
	out  chan driver.Event
	wake chan struct{}
	told map[ids.SandboxID]*toldOf
}

// toldOf is what was told of one sandbox.
type toldOf struct {
	ooms  uint64
	ended bool
}

// Watch implements driver.Watcher. News only says that there is something to look at: what is told
// comes from the state, so that nothing is missed.
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Event, error) {
	w := &watcher{d: d, out: make(chan driver.Event, watchBuffer), wake: make(chan struct{}, 1), told: map[ids.SandboxID]*toldOf{}}
	d.mu.Lock()
	d.watchers[w] = true
	d.mu.Unlock()
	go w.loop(ctx)
	return w.out, nil
}

// news returns what a machine calls when there is something new of it.
func (d *Driver) news(id ids.SandboxID) func(*vm) {
	return func(v *vm) {
		if e := v.ended(); e != nil {
			d.keepEnd(id, v, e)
		} else if v.isFull() {
			d.log.Warn("the pool has no room: a machine stands still until it can write", "sandbox", id)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		for w := range d.watchers {
			select {
			case w.wake <- struct{}{}:
			default:
			}
		}
	}
}

// keepEnd notes how a machine ended for the next process. It waits for whoever removes it: what is noted
// later would be that of the next one with this id.
func (d *Driver) keepEnd(id ids.SandboxID, v *vm, e *end) {
	defer d.lock(id)()
	if d.vmOf(id) != v {
		return
	}
	err := writeJSON(filepath.Join(d.folder(id), endFile), e)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.log.Warn("how a machine ended is not kept for the next start", "sandbox", id, "err", err)
	}
}

func (w *watcher) loop(ctx context.Context) {
	defer close(w.out)
	defer func() {
		w.d.mu.Lock()
		defer w.d.mu.Unlock()
		delete(w.d.watchers, w)
	}()
	for ctx.Err() == nil {
		w.look(ctx)
		select {
		case <-w.wake:
		case <-time.After(watchPeriod):
		case <-ctx.Done():
		}
	}
}

// look tells what was not told yet of every sandbox that is whole.
func (w *watcher) look(ctx context.Context) {
	w.d.mu.Lock()
	if w.d.closed { // its machines go on, and are nobody's to tell of
		w.d.mu.Unlock()
		return
	}
	known := make(map[ids.SandboxID]*vm, len(w.d.known))
	for id, r := range w.d.known {
		if r.Ready {
			known[id] = w.d.vms[id]
		}
	}
	w.d.mu.Unlock()
	for id := range w.told {
		if _, ok := known[id]; !ok {
			delete(w.told, id) // it was stopped: nobody asks any more
		}
	}
	for id, v := range known {
		t := w.told[id]
		if t == nil {
			t = &toldOf{}
			w.told[id] = t
		}
		w.one(ctx, id, v, t)
	}
}

func (w *watcher) one(ctx context.Context, id ids.SandboxID, v *vm, t *toldOf) {
	ended, ooms := w.d.endOf(id, v)
	if ooms > t.ooms {
		t.ooms = ooms
		w.tell(ctx, driver.Event{ID: id, Kind: driver.EventOOM, At: time.Now()})
	}
	if ended != nil && !t.ended {
		t.ended = true
		w.tell(ctx, driver.Event{ID: id, Kind: driver.EventExited, ExitStatus: ended.Status, At: time.Unix(0, ended.At)})
	}
}

// endOf is how a sandbox ended, nil if it runs, and what its guest said of its memory.
func (d *Driver) endOf(id ids.SandboxID, v *vm) (*end, uint64) {
	if v != nil {
		e, n := v.ended(), v.ooms()
		if s, err := d.cgroup.Stats(d.cgroupOf(id)); e != nil && err == nil {
			n += s.OOMKills // QEMU itself
		}
		return e, n
	}
	// It had ended when this process began.
	var e end
	if readJSON(filepath.Join(d.folder(id), endFile), &e) != nil {
		e = end{Status: statusGone, At: time.Now().UnixNano()}
	}
	return &e, e.OOMKills
}

func (w *watcher) tell(ctx context.Context, e driver.Event) {
	select {
	case w.out <- e:
	case <-ctx.Done():
	}
}
