package replica

import (
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// watchdog stands before the log and the stable store and notices a write
// that does not come back: a leader whose disk hangs goes on sending
// heartbeats and so keeps the whole group from electing another.
type watchdog struct {
	raft.LogStore
	raft.StableStore

	limit time.Duration
	fatal func(error)
	quit  chan struct{}
	once  sync.Once

	mu    sync.Mutex
	since map[uint64]time.Time
	next  uint64
}

func newWatchdog(l raft.LogStore, s raft.StableStore, limit time.Duration, fatal func(error)) *watchdog {
	w := &watchdog{LogStore: l, StableStore: s, limit: limit, fatal: fatal, quit: make(chan struct{}), since: map[uint64]time.Time{}}
	go w.watch()
	return w
}

func (w *watchdog) stop() { w.once.Do(func() { close(w.quit) }) }

func (w *watchdog) watch() {
	t := time.NewTicker(max(w.limit/10, 10*time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-w.quit:
			return
		case <-t.C:
			if d := w.oldest(); d > w.limit {
				w.fatal(fmt.Errorf("a write to the scheduler's log has not come back for %s: the disk hangs", d.Round(time.Millisecond)))
				return
			}
		}
	}
}

func (w *watchdog) oldest() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var d time.Duration
	for _, t := range w.since {
		d = max(d, time.Since(t))
	}
	return d
}

func (w *watchdog) guard() func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next++
	id := w.next
	w.since[id] = time.Now()
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.since, id)
	}
}

// IsMonotonic implements raft.MonotonicLogStore as the log below does: raft then
// empties a log that a snapshot has overtaken.
func (w *watchdog) IsMonotonic() bool {
	m, ok := w.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// StoreLog implements raft.LogStore.
func (w *watchdog) StoreLog(l *raft.Log) error {
	defer w.guard()()
	return w.LogStore.StoreLog(l)
}

// StoreLogs implements raft.LogStore.
func (w *watchdog) StoreLogs(l []*raft.Log) error {
	defer w.guard()()
	return w.LogStore.StoreLogs(l)
}

// DeleteRange implements raft.LogStore.
func (w *watchdog) DeleteRange(a, b uint64) error {
	defer w.guard()()
	return w.LogStore.DeleteRange(a, b)
}

// Set implements raft.StableStore.
func (w *watchdog) Set(k, v []byte) error {
	defer w.guard()()
	return w.StableStore.Set(k, v)
}

// SetUint64 implements raft.StableStore.
func (w *watchdog) SetUint64(k []byte, v uint64) error {
	defer w.guard()()
	return w.StableStore.SetUint64(k, v)
}
