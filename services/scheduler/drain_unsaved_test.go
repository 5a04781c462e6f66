package scheduler

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// A session whose disk is unsaved on one host and whose last, failed wake was
// on another that drains: it is saved where it is unsaved, then nothing is left.
func TestDrainStepSavesWhereItIsUnsaved(t *testing.T) {
	s := core.Session{Key: testKey(1), Generation: ids.Generation{Incarnation: 1, Index: 1}, Epoch: ids.Epoch{Incarnation: 1, Index: 9},
		State: core.Failed, Terms: &core.Terms{}, Dirty: true, Newest: "h1", Host: "h2", Manifest: "m1"}
	for _, c := range []struct {
		name   string
		change func(*core.Session)
		save   ids.Host
		move   bool
	}{
		{"unsaved elsewhere", func(*core.Session) {}, "h1", false},
		{"unsaved here", func(s *core.Session) { s.Newest = "h2" }, "h2", false},
		{"what failed is not removed yet", func(s *core.Session) { s.NeedsStop = true }, "", false},
		{"an open waits", func(s *core.Session) { s.Wake = &core.Wake{} }, "", false},
		{"saved", func(s *core.Session) { s.Dirty, s.Newest = false, "" }, "", true},
	} {
		v := s
		c.change(&v)
		e, ok := drainStep(&v, "h2", false, time.Second)
		switch {
		case ok != (c.save != "" || c.move), c.move != (e.Move != nil), c.save != "" && (e.Save == nil || e.Save.Host != c.save):
			t.Errorf("%s: %v %+v", c.name, ok, e)
		}
	}
}

// What was unsaved in the books was never written, and its host made room: the
// drain ends, and the next wake says as of when its files are.
func TestDrainOfADiskThatWasEvicted(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	r := w.awakeAndSaved(t, 1)
	w.exited(h1, r.GetSession())
	if rec := w.become(1, corev1.State_STATE_ASLEEP); !rec.GetUnsaved() {
		t.Fatalf("record: %v", rec)
	}
	h1.evict(testKey(1).String())
	w.drain("h1", true, time.Minute)
	w.drained("h1")
	if rec := w.show(1); rec.GetUnsaved() || rec.GetHost() != "" || rec.GetManifest() == "" {
		t.Errorf("record: %v", rec)
	}
	w.withHost(t, "h2", 0)
	if r := must[wakeReply](t)(w.open(1, "r9")); r.GetHost() != "h2" || r.GetOrigin() != corev1.Origin_ORIGIN_RESTORED || r.GetRestoredAsOf() == nil {
		t.Errorf("open: %v", r)
	}
}

// TestASaveInVainLeavesTheOthersTheirTurn: a session was never saved and its host has nothing of it, so that
// each save of it comes to nothing. The sessions behind it are saved all the same, and it is asked for ever
// more slowly.
func TestASaveInVainLeavesTheOthersTheirTurn(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.HandoffParallel = 1 })
	h1 := w.withHost(t, testHost, 0)
	w.exited(h1, must[wakeReply](t)(w.open(1, "r1")).GetSession())
	w.become(1, corev1.State_STATE_ASLEEP)
	h1.evict(testKey(1).String())
	w.exited(h1, w.awakeAndSaved(t, 2).GetSession())
	w.become(2, corev1.State_STATE_ASLEEP)
	w.drain("h1", true, time.Minute)
	w.until("the other session is saved and has left", func() bool { rec := w.show(2); return !rec.GetUnsaved() && rec.GetHost() == "" })
	if rec := w.show(1); !rec.GetUnsaved() || rec.GetNewestHost() != "h1" {
		t.Errorf("nothing is given up: %v", rec)
	}
	asked, pauses := map[ids.SessionKey]ask{}, NewConfig(t.TempDir()).times
	for n := range 12 {
		pauses.noteAsk(asked, core.Entry{Save: &core.Save{Ref: core.Ref{Session: testKey(1)}}})
		if pause, want := time.Until(asked[testKey(1)].at), min(pauses.drainLook<<n, drainSlow); pause > want || pause < want/2 {
			t.Errorf("after save %d: a pause of %s, not %s", n+1, pause, want)
		}
	}
}

// evict takes a disk away, as a pool does that needs its room.
func (h *fakeHost) evict(session string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.boxes, session)
}

// A host that answers anything else to a save has not lost the disk: nothing
// is given up.
func TestASaveThatFailsGivesNothingUp(t *testing.T) {
	s := core.Session{Key: testKey(1), State: core.Sleeping, Terms: &core.Terms{}, Sleep: &core.Sleep{Save: true}, Host: "h1"}
	for _, kind := range []errkind.Kind{errkind.NotFound, errkind.DataLoss, errkind.Internal, errkind.Unavailable} {
		a := core.Answer{Kind: core.HostSleep, Session: &s, NotFound: kind == errkind.NotFound, Err: &core.Failure{Kind: kind}}
		if e, _ := core.After(&s, a, 3, nil); e.Slept != nil {
			t.Errorf("%s: %+v", kind, e)
		}
	}
}
