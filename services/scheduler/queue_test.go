package scheduler

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// openAt opens with a priority and a time to wait, in the background.
func (w *world) openAt(n int, priority uint32, within time.Duration, done func(error)) {
	a := admission(n, "r1")
	a.Terms.Priority, a.Deadline = priority, timestamppb.New(time.Now().Add(within))
	go func() { _, err := w.openWith(a); done(err) }()
	w.awaitSession(n)
}

// 200 opens on two hosts with room for 10 each: each is served once others are
// closed, and no host ever has more awake than it has memory for.
func TestBurstQueuesAndNeverOvercommitsMemory(t *testing.T) {
	const n, rooms = 200, 10
	w := newWorld(t, nil)
	hosts := []*fakeHost{w.withHost(t, testHost, rooms), w.withHost(t, "h2", rooms)}
	var work sync.WaitGroup
	var served atomic.Int64
	for i := range n {
		work.Go(func() {
			a := admission(i, "r1")
			a.Deadline = timestamppb.New(time.Now().Add(60 * time.Second))
			if _, err := w.openWith(a); err != nil {
				t.Errorf("open %d: %v", i, err)
				return
			}
			served.Add(1)
			if _, err := w.close(i, "r2"); err != nil {
				t.Errorf("close %d: %v", i, err)
			}
		})
	}
	work.Wait()
	if served.Load() != n {
		t.Errorf("%d of %d were served", served.Load(), n)
	}
	for _, h := range hosts {
		h.mu.Lock()
		if h.awakeMax > rooms {
			t.Errorf("%s had %d sessions awake in memory for %d", h.id, h.awakeMax, rooms)
		}
		h.mu.Unlock()
		if u := w.hostRecord(h.id.String()).GetUsed().GetMemoryBytes(); u != 0 {
			t.Errorf("%s still counts %d bytes as used", h.id, u)
		}
	}
}

// Room that comes free goes to who has the highest priority, then to who waits
// longest; also when a new open comes at that moment.
func TestRoomGoesByPriorityThenByArrival(t *testing.T) {
	w := newWorld(t, nil)
	w.withHost(t, testHost, 1)
	must[wakeReply](t)(w.open(0, "r1"))
	order := make(chan int, 8)
	for _, o := range []struct {
		n        int
		priority uint32
	}{{1, 0}, {2, 20}, {3, 20}, {4, 5}} {
		w.openAt(o.n, o.priority, 20*time.Second, func(err error) {
			if err != nil {
				t.Errorf("open %d: %v", o.n, err)
			}
			order <- o.n
		})
		w.until("it waits", func() bool { return w.show(o.n).GetWaiting() != "" })
	}
	var got []int
	last := 0
	for range 4 {
		must[sleepReply](t)(w.close(last, "c1"))
		last = <-order
		got = append(got, last)
	}
	if want := []int{2, 3, 4, 1}; !slices.Equal(got, want) {
		t.Errorf("served in the order %v, want %v", got, want)
	}
}

// An open that waits in vain ends at its own deadline, with the reason; one
// that asks for less than those before it is not held up by them.
func TestDeadlineOfAnOpenThatWaitsForRoom(t *testing.T) {
	w := newWorld(t, nil)
	w.withHost(t, testHost, 2)
	must[wakeReply](t)(w.open(0, "r1"))
	must[wakeReply](t)(w.open(1, "r1"))
	done := make(chan error, 1)
	a := admission(2, "r1")
	a.Terms.Limits.MemoryBytes, a.Deadline = 2<<20, timestamppb.New(time.Now().Add(2500*time.Millisecond))
	go func() { _, err := w.openWith(a); done <- err }()
	w.awaitSession(2)
	small := make(chan error, 1)
	w.openAt(3, 0, 20*time.Second, func(err error) { small <- err })
	must[sleepReply](t)(w.close(0, "c1")) // room for the small one alone
	if err := <-small; err != nil {
		t.Error(err)
	}
	if err := <-done; !errs.Is(err, errkind.Unplaceable) && !errs.Is(err, errkind.Deadline) {
		t.Errorf("the large one: %v", err)
	}
	rec := w.become(2, corev1.State_STATE_FAILED)
	if !strings.Contains(rec.GetFailure().GetReason(), "memory") {
		t.Errorf("record: %v", rec)
	}
}

// Opens that wait are served by the next leader.
func TestLeaderDiesWhileOpensWaitForRoom(t *testing.T) {
	w := newWorld(t, nil)
	w.withHost(t, testHost, 1)
	must[wakeReply](t)(w.open(0, "r1"))
	done := make(chan error, 2)
	for n := range 2 {
		w.openAt(n+1, 0, 20*time.Second, func(err error) { done <- err })
	}
	w.restart()
	must[sleepReply](t)(w.close(0, "c1"))
	if err := <-done; err != nil {
		t.Error(err)
	}
	w.withHost(t, "h2", 1) // room that joins
	if err := <-done; err != nil {
		t.Error(err)
	}
	for n := range 2 {
		w.become(n+1, corev1.State_STATE_ACTIVE)
	}
}

// A tenant has no more sessions awake on a plan than the plan allows; the next
// one waits until one sleeps.
func TestMaxAwakeOfAPlan(t *testing.T) {
	w := newWorld(t, nil)
	w.withHost(t, testHost, 0)
	a := admission(0, "r1")
	a.Terms.MaxAwake = 1
	must[wakeReply](t)(w.openWith(a))
	done := make(chan error, 1)
	b := admission(1, "r1")
	b.Terms.MaxAwake = 1
	go func() { _, err := w.openWith(b); done <- err }()
	w.awaitSession(1)
	w.until("it waits", func() bool { return w.show(1).GetWaiting() != "" })
	if rec := w.show(1); rec.GetState() != corev1.State_STATE_NEW {
		t.Errorf("record: %v", rec)
	}
	must[sleepReply](t)(w.close(0, "c1"))
	if err := <-done; err != nil {
		t.Error(err)
	}
}
