package scheduler

import (
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// A host that never answers a wake: every try ends, the last one fails the
// session, its compute is removed, and the next open works.
func TestStuckWaking(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.WakeTimeout = 150 * time.Millisecond })
	h := newFakeHost(t, w, "b1")
	h.join(t)
	open := h.block("wake")
	if _, err := w.open(1, "r1"); !errs.Is(err, errkind.Deadline) {
		t.Errorf("open: %v", err)
	}
	w.become(1, corev1.State_STATE_FAILED)
	h.await(t, "sleep") // removes what may be left
	open()
	if r := must[wakeReply](t)(w.open(1, "r2")); r.GetState() != corev1.State_STATE_ACTIVE {
		t.Errorf("next open: %v", r)
	}
}

// A host that hangs in a sleep is asked again until it answers.
func TestStuckSleeping(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.SleepTimeout = 100 * time.Millisecond })
	h := newFakeHost(t, w, "b1")
	h.join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	open := h.block("sleep")
	done := make(chan error, 1)
	go func() { _, err := w.close(1, "r2"); done <- err }()
	for range 3 {
		h.await(t, "sleep")
	}
	open()
	if err := <-done; err != nil {
		t.Errorf("close: %v", err)
	}
	w.become(1, corev1.State_STATE_ASLEEP)
}

// A delete is tried for ever, also while credentials or the host fail.
func TestStuckDeleting(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	w.creds.set(errs.E("fake", errkind.Unavailable, "", "no"))
	h.failing("delete", errs.E("fake", errkind.Internal, "", "no"))
	done := make(chan error, 1)
	go func() { _, err := w.delete(1, "r2"); done <- err }()
	w.become(1, corev1.State_STATE_DELETING)
	w.creds.set(nil)
	h.await(t, "delete")
	h.await(t, "delete")
	h.failing("delete", nil)
	if err := <-done; err != nil {
		t.Errorf("delete: %v", err)
	}
	w.become(1, corev1.State_STATE_DELETED)
}

func (c *fakeCredentials) set(err error) { c.mu.Lock(); defer c.mu.Unlock(); c.fail = err }

// Ten copies of one request are one wake with one outcome.
func TestDuplicatesAreHarmless(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	a := admission(1, "r1")
	var wg sync.WaitGroup
	var mu sync.Mutex
	epochs := map[string]int{}
	for range 10 {
		wg.Go(func() {
			r, err := w.openWith(a)
			if err != nil {
				t.Error(err)
				return
			}
			_, e := key(r.GetSession())
			mu.Lock()
			defer mu.Unlock()
			epochs[e]++
		})
	}
	wg.Wait()
	if len(epochs) != 1 || h.wakes != 1 {
		t.Errorf("epochs %v, %d wakes", epochs, h.wakes)
	}
	w.events(1, "admitted placed active")
}

// A cell that comes from a backup begins a new incarnation, once per start.
func TestRestoredCellIsANewIncarnation(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	first := must[wakeReply](t)(w.open(1, "r1"))
	w.stop()
	w.cfg.Restored = true
	w.start()
	second := must[wakeReply](t)(w.open(2, "r1"))
	if a, b := first.GetSession().GetEpoch().GetIncarnation(), second.GetSession().GetEpoch().GetIncarnation(); b <= a {
		t.Errorf("incarnation %d after %d", b, a)
	}
}
