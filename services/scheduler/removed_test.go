package scheduler

import (
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
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
