package scheduler

import (
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"google.golang.org/protobuf/types/known/durationpb"
)

func (w *world) drain(host string, on bool, within time.Duration) *schedulerv1.HostRecord {
	w.t.Helper()
	r, err := bus.Invoke[*schedulerv1.DrainReply](bustest.Context(w.t), w.op, "scheduler", "drain",
		&schedulerv1.DrainRequest{Host: host, On: on, Within: durationpb.New(within)})
	if err != nil {
		w.t.Fatalf("drain: %v", err)
	}
	return r.GetHost()
}

func (w *world) removeHost(host string, lose bool) (*schedulerv1.RemoveHostReply, error) {
	return bus.Invoke[*schedulerv1.RemoveHostReply](bustest.Context(w.t), w.op, "scheduler", "remove_host",
		&schedulerv1.RemoveHostRequest{Host: host, LoseUnsaved: lose})
}

func (w *world) exited(h *fakeHost, ref *corev1.SessionRef) {
	w.t.Helper()
	h.lose()
	if _, err := bus.Invoke[*schedulerv1.ReportReply](bustest.Context(w.t), h.conn, "scheduler", "report",
		&schedulerv1.ReportRequest{Session: ref, What: "exited", Reason: "it was killed"}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) drained(host string) {
	w.t.Helper()
	w.until(host+" is drained", func() bool { return w.hostRecord(host).GetDrained() })
	w.fleet(host, "drained", 1)
}

// Sleeping sessions leave a host that is drained: saved ones at once, unsaved
// ones once they are saved, over a change of leader.
func TestDrainOfSleepers(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "r1"))
	must[sleepReply](t)(w.close(1, "r2"))
	must[wakeReply](t)(w.open(2, "r1"))
	must[sleepReply](t)(w.close(2, "r2"))
	r := must[wakeReply](t)(w.open(2, "r3"))
	w.exited(h1, r.GetSession()) // what it wrote is on h1 alone
	if rec := w.become(2, corev1.State_STATE_ASLEEP); !rec.GetUnsaved() || rec.GetNewestHost() != "h1" {
		t.Fatalf("record: %v", rec)
	}
	open := h1.block("sleep")
	if rec := w.drain("h1", true, time.Minute); !rec.GetDraining() || rec.GetDrainDeadline() == nil || rec.GetDrained() {
		t.Errorf("host: %v", rec)
	}
	h1.await(t, "sleep") // the save
	w.until("the saved session has left", func() bool { return w.show(1).GetHost() == "" })
	if rec := w.hostRecord("h1"); rec.GetDrained() {
		t.Errorf("drained too early: %v", rec)
	}
	w.restart()
	open()
	w.drained("h1")
	if rec := w.show(2); rec.GetState() != corev1.State_STATE_ASLEEP || rec.GetUnsaved() || rec.GetHost() != "" {
		t.Errorf("record of what was unsaved: %v", rec)
	}
	w.withHost(t, "h2", 0)
	for n := range 2 {
		if r := must[wakeReply](t)(w.open(n+1, "r9")); r.GetHost() != "h2" || r.GetOrigin() != corev1.Origin_ORIGIN_RESUMED {
			t.Errorf("open of %d: %v", n+1, r)
		}
	}
	w.events(1, "admitted placed active asleep admitted placed active")
	w.fleet("h1", "draining", 1)
}

// shortDrain has a drain look often and wait briefly for idle sessions.
func shortDrain(c *Config) {
	c.times.drainLook, c.times.drainIdle = 50*time.Millisecond, 200*time.Millisecond
}

// Awake sessions leave when they are idle; busy ones at the deadline, whoever
// uses them.
func TestDrainOfAwakeSessions(t *testing.T) {
	w := newWorld(t, shortDrain)
	h1 := w.withHost(t, testHost, 0)
	for n := range 2 {
		must[wakeReply](t)(w.open(n, "r1"))
	}
	a := admission(2, "r1")
	a.Terms.Persistence = corev1.Persistence_PERSISTENCE_EPHEMERAL
	must[wakeReply](t)(w.openWith(a))
	w.withHost(t, "h2", 0)
	h1.setBusyWith(testKey(1).String())
	w.drain("h1", true, time.Minute)
	rec := w.activeOn(0, "h2")
	if rec.GetOrigin() != corev1.Origin_ORIGIN_RESUMED || rec.GetUnsaved() {
		t.Errorf("record of what was idle: %v", rec)
	}
	w.events(0, "admitted placed active asleep placed active")
	all := w.told(0)
	if e := all[len(all)-1].GetActive(); e.GetCause() != corev1.Cause_CAUSE_HANDOFF || e.GetFromHost() != "h1" {
		t.Errorf("active: %v", e)
	}
	if all[3].GetAsleep().GetReason() != "drain" {
		t.Errorf("asleep: %v", all[3])
	}
	w.restart()
	for _, n := range []int{1, 2} {
		if rec := w.show(n); rec.GetState() == corev1.State_STATE_ASLEEP || rec.GetHost() != "h1" {
			t.Errorf("session %d, which is in use: %v", n, rec)
		}
	}
	w.drain("h1", true, 0) // the deadline is now
	w.activeOn(1, "h2")
	w.drained("h1")
	w.become(2, corev1.State_STATE_DELETED)
	if rec := w.drain("h1", false, 0); rec.GetDraining() || rec.GetDrained() || rec.GetDrainDeadline() != nil {
		t.Errorf("after it: %v", rec)
	}
	h2 := must[wakeReply](t)(w.open(5, "r1"))
	if h2.GetHost() != "h1" { // it has more room
		t.Errorf("placed on %s", h2.GetHost())
	}
}

// A drained host's sessions move a few at a time.
func TestDrainIsNoStampede(t *testing.T) {
	const n = 40
	w := newWorld(t, func(c *Config) { shortDrain(c); c.HandoffRate = 1000; c.HandoffParallel = 4 })
	w.withHost(t, testHost, 0)
	for i := range n {
		must[wakeReply](t)(w.open(i, "r1"))
	}
	h2 := w.withHost(t, "h2", 0)
	w.drain("h1", true, 0)
	for i := range n {
		w.activeOn(i, "h2")
	}
	w.drained("h1")
	h2.mu.Lock()
	defer h2.mu.Unlock()
	if h2.wakMax > w.cfg.HandoffParallel || h2.wakes != n {
		t.Errorf("%d of %d wakes at once", h2.wakMax, h2.wakes)
	}
}

// A host is removed only when it has nothing left that others do not have, or
// somebody says that it may be lost; then it stays away.
func TestRemoveHost(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "r1"))
	if _, err := w.removeHost("h1", true); !errs.Is(err, errkind.Conflict) || !strings.Contains(err.Error(), "drain it first") {
		t.Errorf("a host with a lease and a session: %v", err)
	}
	if _, err := w.removeHost("nobody", true); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a host that never joined: %v", err)
	}
	w.withHost(t, "h2", 0)
	w.drain("h1", true, 0)
	w.drained("h1")
	if r, err := w.removeHost("h1", false); err != nil || len(r.GetLost())+len(r.GetRewound()) != 0 {
		t.Errorf("remove: %v, %v", r, err)
	}
	for range 2 {
		if _, err := h1.tryJoin(t); !errs.Is(err, errkind.Denied) {
			t.Errorf("join of a removed host: %v", err)
		}
		w.restart()
	}
	if _, err := w.removeHost("h1", false); err != nil {
		t.Errorf("said again: %v", err)
	}
	if w.hostRecord("h1") != nil {
		t.Error("it is still listed")
	}
	w.fleet("h1", "removed", 1)
	w.activeOn(1, "h2")
}

// A lost host that never comes back is removed with what it had alone: saved
// sessions go back to their manifest and say so, the others have failed.
func TestRemoveALostHost(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	w.awakeAndSaved(t, 1)
	must[wakeReply](t)(w.open(2, "r1"))
	w.lost(t, h1)
	w.until("h1 is lost", func() bool { return w.hostRecord("h1").GetLost() })
	if _, err := w.removeHost("h1", false); !errs.Is(err, errkind.Conflict) {
		t.Errorf("with unsaved files: %v", err)
	}
	r, err := w.removeHost("h1", true)
	if err != nil || len(r.GetRewound()) != 1 || r.GetRewound()[0].GetSession() != testKey(1).String() ||
		len(r.GetLost()) != 1 || r.GetLost()[0].GetSession() != testKey(2).String() {
		t.Fatalf("remove: %v, %v", r, err)
	}
	if rec := w.show(2); rec.GetState() != corev1.State_STATE_FAILED || rec.GetFailure().GetKind() != errkind.DataLoss.String() {
		t.Errorf("what was never saved: %v", rec)
	}
	w.withHost(t, "h2", 0)
	if rec := w.activeOn(1, "h2"); rec.GetOrigin() != corev1.Origin_ORIGIN_RESTORED {
		t.Errorf("what was saved: %v", rec)
	}
}

// An empty host that holds a lease is removed at once.
func TestRemoveAnEmptyHost(t *testing.T) {
	w := newWorld(t, nil)
	w.withHost(t, testHost, 0)
	if _, err := w.removeHost("h1", false); err != nil {
		t.Error(err)
	}
	if w.hostRecord("h1") != nil {
		t.Error("it is still listed")
	}
}

// Explain says what a wake would get now, and why not where.
func TestExplain(t *testing.T) {
	w := newWorld(t, nil)
	w.withHost(t, testHost, 10)
	w.withHost(t, "h2", 5)
	must[wakeReply](t)(w.open(1, "r1"))
	must[sleepReply](t)(w.close(1, "r2"))
	explain := func() *schedulerv1.ExplainReply {
		t.Helper()
		r, err := bus.Invoke[*schedulerv1.ExplainReply](bustest.Context(t), w.op, "scheduler", "explain",
			&schedulerv1.ExplainRequest{Tenant: "acme", Session: testKey(1).String()})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := explain()
	if r.GetRecord().GetManifest() != "m1" || r.GetNow().GetHost() != "h1" || len(r.GetNow().GetRows()) != 2 || len(r.GetNow().GetRows()[0].GetRanks()) == 0 {
		t.Errorf("explain: %v", r)
	}
	w.drain("h1", true, 0)
	w.drained("h1")
	r = explain()
	if r.GetNow().GetHost() != "h2" {
		t.Errorf("after the drain: %v", r.GetNow())
	}
	for _, row := range r.GetNow().GetRows() {
		if row.GetHost() == "h1" && !strings.Contains(row.GetRefused(), "drain") {
			t.Errorf("row of the drained host: %v", row)
		}
	}
	if _, err := bus.Invoke[*schedulerv1.ExplainReply](bustest.Context(t), w.op, "scheduler", "explain",
		&schedulerv1.ExplainRequest{Tenant: "acme", Session: testKey(9).String()}); !errs.Is(err, errkind.NotFound) {
		t.Errorf("of nothing: %v", err)
	}
}
