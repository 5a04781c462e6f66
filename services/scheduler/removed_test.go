package scheduler

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/berth-dev/berth/services/scheduler/internal/replica"
)

// A host that was removed and not switched off asks to join for as long as it
// runs: that makes no entries of the log, and a drain of it says why.
func TestAJoinOfARemovedHostIsNoEntry(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	if _, err := w.removeHost("h1", false); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := h.tryJoin(t); !errs.Is(err, errkind.Denied) || !strings.Contains(err.Error(), "was removed from the cell") {
			t.Fatalf("join: %v", err)
		}
	}
	_, err := bus.Invoke[*schedulerv1.DrainReply](bustest.Context(t), w.op, "scheduler", "drain", &schedulerv1.DrainRequest{Host: "h1", On: false})
	if !errs.Is(err, errkind.NotFound) || !strings.Contains(err.Error(), "was removed") {
		t.Errorf("resume: %v", err)
	}
}

// The only host of a cell removed a deleted session and has not cleaned the store
// when it is removed itself: the session is erased by the next host that joins.
func TestDeletedSessionIsErasedByAHostThatJoinsLater(t *testing.T) {
	w := newWorld(t, nil)
	h := w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "r1"))
	must[sleepReply](t)(w.close(1, "r2"))
	h.mu.Lock()
	h.stored = true
	h.mu.Unlock()
	must[deleteReplyT](t)(w.delete(1, "d1"))
	h.await(t, "delete")
	h.await(t, "delete") // scheduler asks again
	if _, err := w.removeHost("h1", false); err != nil {
		t.Fatal(err)
	}
	w.fleet("h1", "removed", 1)
	w.events(1, "admitted placed active asleep deleted")
	h2 := w.secondHost(t)
	h2.await(t, "delete")
	w.events(1, "admitted placed active asleep deleted erased")
}

// TestJoinAnswerBoundsTheErasures: the answer to a join names at most erasedPage deleted sessions. The state
// keeps the others, and tidyUp asks the host for them.
func TestJoinAnswerBoundsTheErasures(t *testing.T) {
	rep, err := replica.Open(replica.Config{Dir: t.TempDir(), Log: bustest.Log(t), Fatal: func(err error) { t.Errorf("fatal: %v", err) }})
	if err != nil {
		t.Fatal(err)
	}
	defer rep.Close()
	ctx, host := bustest.Context(t), core.FillHost(0)
	apply := func(e core.Entry) core.Outcome {
		out, err := rep.Apply(ctx, e)
		if err != nil || out.Refused != nil {
			t.Errorf("%s: %v, %+v", e.Name(), err, out.Refused)
		}
		return out
	}
	for leads := false; !leads; {
		select {
		case leads = <-rep.Leadership():
		case <-ctx.Done():
			t.Fatal("the replica does not lead")
		}
	}
	apply(core.Entry{Join: &core.Host{ID: host, Boot: "b1", Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR},
		Capacity: core.Limits{MemoryBytes: 1 << 40, CPUMillis: 1 << 20, PIDs: 1 << 20, DiskBytes: 1 << 50}}})
	const deleted = erasedPage + 3
	var work sync.WaitGroup
	for i := range deleted {
		work.Go(func() {
			s := apply(core.Entry{Open: core.FillOpen(i, fmt.Sprint("r", i), []core.Candidate{{Host: host}})}).Session
			if s == nil {
				return
			}
			apply(core.Entry{Delete: &core.Delete{Tenant: s.Tenant, Keys: []ids.SessionKey{s.Key}, Request: ids.RequestID(fmt.Sprint("d", i))}})
			apply(core.Entry{Removed: &core.Removed{Ref: refOf(s)}})
		})
	}
	work.Wait()
	l := &leader{rep: rep}
	first := l.owned(host, "").GetErased()
	sessions := map[string]bool{}
	for _, s := range first {
		sessions[s.GetSession()] = true
	}
	if len(first) != erasedPage || len(sessions) != erasedPage {
		t.Errorf("the answer names %d erasures of %d sessions, want %d", len(first), len(sessions), erasedPage)
	}
	if n := len(l.owned(host, core.FillKey(0)).GetErased()); n != 0 {
		t.Errorf("the second page names %d erasures", n)
	}
	waiting := 0
	rep.View(func(s *core.State) {
		for _, tomb := range s.Tombstones() {
			waiting += len(tomb.Erase)
		}
	})
	if waiting != deleted {
		t.Errorf("the state keeps %d erasures, want %d", waiting, deleted)
	}
}

// What a plan cannot name is no zone.
func TestZoneAndLabelsAreTokens(t *testing.T) {
	for _, c := range []struct {
		zone   string
		labels map[string]string
		ok     bool
	}{
		{"", nil, true}, {"eu-1", map[string]string{"rack": "a_7", "spot": ""}, true},
		{"EU 1", nil, false}, {"eu.1", nil, false}, {strings.Repeat("z", 64), nil, false},
		{"eu-1", map[string]string{"a.b": "c"}, false}, {"eu-1", map[string]string{"": "c"}, false}, {"eu-1", map[string]string{"a": "b c"}, false},
	} {
		err := checkJoin(&schedulerv1.JoinRequest{Boot: "b1", Tiers: []corev1.Tier{corev1.Tier_TIER_NULL},
			Capacity: &corev1.Limits{MemoryBytes: 1}, Zone: c.zone, Labels: c.labels})
		if (err == nil) != c.ok {
			t.Errorf("zone %q, labels %v: %v", c.zone, c.labels, err)
		}
	}
	if a, b := core.Count(1, "session"), core.Count(2, "session"); a != "1 session" || b != "2 sessions" {
		t.Errorf("%s, %s", a, b)
	}
}
