package scheduler

import (
	"sync"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
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

// TestABatchHoldsOneEventOfASession: a stream may lose one message of a batch
// and keep the next, which must not be the same session's.
func TestABatchHoldsOneEventOfASession(t *testing.T) {
	ev := func(session, host string) *core.Event {
		return &core.Event{Session: ids.SessionKey(session), Host: ids.Host(host)}
	}
	all := []*core.Event{ev("a", "h1"), ev("b", "h1"), ev("", "h1"), ev("", "h2"), ev("b", "h2"), ev("c", "h1")}
	if got := oneEach(all); len(got) != 4 {
		t.Errorf("%d events in the batch, want the 4 before the second of b", len(got))
	}
	if got := oneEach(all[4:]); len(got) != 2 {
		t.Errorf("%d events in the batch, want both", len(got))
	}
}

func (w *world) eventsOf(n int) {
	w.t.Helper()
	rec := w.show(n)
	deadline := time.Now().Add(patience)
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
