package wasm

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

const (
	watchBuffer = 256
	watchPeriod = time.Second // of a look at sandboxes that an earlier driver started
	statusGone  = 255         // of a first process whose status nobody knows
	maxTold     = 4096        // then some events may come twice
)

// end is how a first process ended.
type end struct {
	status uint32
	at     time.Time
}

// collect waits for a first process that this driver started.
func (d *Driver) collect(id ids.SandboxID, rec record, cmd *exec.Cmd) {
	_ = cmd.Wait()
	e := end{status: statusGone, at: time.Now()}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		switch {
		case ws.Exited():
			e.status = uint32(ws.ExitStatus())
		case ws.Signaled():
			e.status = 128 + uint32(ws.Signal())
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.known[id]; !ok || r.PID != rec.PID || r.Began != rec.Began {
		return // it was removed meanwhile
	}
	d.ends[id] = e
	for c := range d.news {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// endOf is how the sandbox's first process ended: as its parent saw it, or by its own word.
func (d *Driver) endOf(id ids.SandboxID) end {
	d.mu.Lock()
	e, ok := d.ends[id]
	d.mu.Unlock()
	if ok {
		return e
	}
	e = end{status: statusGone, at: time.Now()}
	file := filepath.Join(d.folder(id), statusFile)
	if b, err := os.ReadFile(file); err == nil {
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 8); err == nil {
			e.status = uint32(n)
		}
	}
	if st, err := os.Stat(file); err == nil && e.status != statusGone {
		e.at = st.ModTime()
	}
	return e
}

// watcher is one Watch.
type watcher struct {
	d    *Driver
	out  chan driver.Event
	told map[driver.Event]bool
	hits map[ids.SandboxID]uint64 // of the limit of processes, as told last
}

// Watch implements driver.Watcher.
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Event, error) {
	w := &watcher{d: d, out: make(chan driver.Event, watchBuffer), told: map[driver.Event]bool{}, hits: map[ids.SandboxID]uint64{}}
	news := make(chan struct{}, 1)
	d.mu.Lock()
	d.news[news] = true
	d.mu.Unlock()
	go func() {
		defer close(w.out)
		defer func() {
			d.mu.Lock()
			delete(d.news, news)
			d.mu.Unlock()
		}()
		t := time.NewTicker(watchPeriod)
		defer t.Stop()
		for ctx.Err() == nil {
			w.look(ctx)
			select {
			case <-news:
			case <-t.C:
			case <-ctx.Done():
			}
		}
	}()
	return w.out, nil
}

// look tells of kills for memory, of processes that could not be made, and then of first processes that have ended.
func (w *watcher) look(ctx context.Context) {
	if len(w.told) > maxTold {
		clear(w.told)
	}
	w.d.mu.Lock()
	known := make(map[ids.SandboxID]record, len(w.d.known))
	for id, r := range w.d.known {
		known[id] = r
	}
	w.d.mu.Unlock()
	maps.DeleteFunc(w.hits, func(id ids.SandboxID, _ uint64) bool { _, there := known[id]; return !there })
	for id, r := range known {
		if !r.Whole {
			continue
		}
		if s, err := w.d.cgroup.Stats(w.d.cgroupOf(id)); err == nil {
			if s.OOMKills > 0 {
				w.tell(ctx, driver.Event{ID: id, Kind: driver.EventOOM}, time.Now())
			}
			w.limit(ctx, id, s.PIDsHits)
		}
		if !r.alive() {
			e := w.d.endOf(id)
			if e.status == order.ExitMemory { // the module was refused memory, and no kernel had to kill
				w.tell(ctx, driver.Event{ID: id, Kind: driver.EventOOM}, e.at)
			}
			w.tell(ctx, driver.Event{ID: id, Kind: driver.EventExited, ExitStatus: e.status}, e.at)
		}
	}
}

// limit tells that the sandbox ran into its limit of processes since the last look.
func (w *watcher) limit(ctx context.Context, id ids.SandboxID, hits uint64) {
	if hits <= w.hits[id] {
		return
	}
	w.hits[id] = hits
	select {
	case w.out <- driver.Event{ID: id, Kind: driver.EventPIDs, At: time.Now()}:
	case <-ctx.Done():
	}
}

// tell tells an event once; the key is the event without its time.
func (w *watcher) tell(ctx context.Context, key driver.Event, at time.Time) {
	if w.told[key] {
		return
	}
	w.told[key] = true
	e := key
	e.At = at
	select {
	case w.out <- e:
	case <-ctx.Done():
	}
}
