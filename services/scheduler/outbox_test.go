package scheduler

import (
	"sync"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"google.golang.org/protobuf/proto"
)

// TestOutboxLosesNothing opens many sessions over restarts and checks that
// every event is on the stream, in order.
func TestOutboxLosesNothing(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	const n = 60
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for try := 0; ; try++ {
				if _, err := w.open(i, "r1"); err == nil || try > 1000 {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	for range 3 {
		w.restart()
	}
	wg.Wait()
	for i := range n {
		w.become(i, corev1.State_STATE_ACTIVE)
		w.eventsOf(i)
	}
}

func (w *world) eventsOf(n int) {
	w.t.Helper()
	rec := w.show(n)
	deadline := time.Now().Add(10 * time.Second)
	for {
		seen := map[uint64]bool{}
		for _, m := range w.stream("BERTH_SESSIONS") {
			e := &schedulerv1.Event{}
			if err := proto.Unmarshal(m.Data, e); err == nil && e.GetSession().GetSession() == testKey(n).String() {
				seen[e.GetRevision()] = true
			}
		}
		if len(seen) == int(rec.GetRevision()) {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("session %d has revision %d, the stream has %v", n, rec.GetRevision(), seen)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
