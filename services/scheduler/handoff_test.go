package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/proto"
)

// awakeAndSaved makes a session that has a manifest and is awake.
func (w *world) awakeAndSaved(t *testing.T, n int) wakeReply {
	t.Helper()
	must[wakeReply](t)(w.open(n, "a1"))
	must[sleepReply](t)(w.close(n, "a2"))
	return must[wakeReply](t)(w.open(n, "a3"))
}

// told returns the events of a session, newest last.
func (w *world) told(n int) (out []*schedulerv1.Event) {
	w.t.Helper()
	var last uint64
	for _, m := range w.stream("BERTH_SESSIONS") {
		e := &schedulerv1.Event{}
		if err := proto.Unmarshal(m.Data, e); err == nil && e.GetSession().GetSession() == testKey(n).String() && e.GetRevision() > last {
			last = e.GetRevision()
			out = append(out, e)
		}
	}
	return out
}

// fleet checks that the host events of a kind are told as often as wanted.
func (w *world) fleet(host, what string, want int) {
	w.t.Helper()
	got := 0
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		got = 0
		seen := map[string]bool{}
		for _, m := range w.stream("BERTH_FLEET") {
			e := &schedulerv1.HostEvent{}
			if err := proto.Unmarshal(m.Data, e); err == nil && e.GetHost() == host && e.GetWhat() == what && !seen[m.Header.Get("ce-id")] {
				seen[m.Header.Get("ce-id")] = true
				got++
			}
		}
		if got >= want {
			break
		}
	}
	if got != want {
		w.t.Errorf("%s of %s was told %d times, want %d", what, host, got, want)
	}
}

// until waits for something to become true.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("never: %s", what)
		}
	}
}

func (w *world) activeOn(n int, host string) *schedulerv1.SessionRecord {
	w.t.Helper()
	var r *schedulerv1.SessionRecord
	w.until(fmt.Sprintf("session %d is awake on %s", n, host), func() bool {
		r = w.show(n)
		return r.GetState() == corev1.State_STATE_ACTIVE && r.GetHost() == host
	})
	return r
}

func (w *world) hostRecord(id string) *schedulerv1.HostRecord {
	w.t.Helper()
	r, err := bus.Invoke[*schedulerv1.HostsReply](bustest.Context(w.t), w.op, "scheduler", "hosts", &schedulerv1.HostsRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, h := range r.GetHosts() {
		if h.GetHost() == id {
			return h
		}
	}
	return nil
}

// A host is lost: what was awake wakes elsewhere as of its last manifest, with
// one event; what slept waits for its user; what was never saved waits for the
// host, and says so; what is ephemeral has failed.
func TestHostLostWithAwakeSessions(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	w.awakeAndSaved(t, 1)
	must[wakeReply](t)(w.open(2, "r1"))
	must[sleepReply](t)(w.close(2, "r2"))
	must[wakeReply](t)(w.open(3, "r1")) // never saved
	a := admission(4, "r1")
	a.Terms.Persistence = corev1.Persistence_PERSISTENCE_EPHEMERAL
	must[wakeReply](t)(w.openWith(a))
	w.withHost(t, "h2", 0)
	w.lost(t, h1)

	rec := w.activeOn(1, "h2")
	if rec.GetOrigin() != corev1.Origin_ORIGIN_RESTORED || rec.GetUnsaved() || rec.GetNewestHost() != "" || rec.GetHandoffFrom() != "" {
		t.Errorf("record of what was awake: %v", rec)
	}
	w.events(1, "admitted placed active asleep admitted placed active displaced asleep placed active")
	all := w.told(1)
	if e := all[len(all)-1]; e.GetActive().GetCause() != corev1.Cause_CAUSE_HANDOFF || e.GetActive().GetFromHost() != "h1" {
		t.Errorf("active: %v", e)
	}
	if e := all[len(all)-4]; !e.GetDisplaced().GetHandoff() {
		t.Errorf("displaced: %v", e)
	}
	if e := all[len(all)-2].GetPlaced(); e.GetPlan().GetHost() != "h2" || len(e.GetPlan().GetRows()) == 0 || e.GetPlan().GetReason() == "" {
		t.Errorf("placed: %v", e)
	}
	if s := w.show(2).GetState(); s != corev1.State_STATE_ASLEEP {
		t.Errorf("what slept is %s", s)
	}
	if r := must[wakeReply](t)(w.open(2, "r3")); r.GetHost() != "h2" || r.GetOrigin() != corev1.Origin_ORIGIN_RESUMED {
		t.Errorf("open of what slept: %v", r)
	}
	w.until("what was never saved says what it waits for", func() bool { return w.show(3).GetWaiting() != "" })
	if rec := w.show(3); rec.GetState() != corev1.State_STATE_ASLEEP || rec.GetNewestHost() != "h1" || rec.GetHandoffFrom() != "h1" || rec.GetHandoffUntil() == nil {
		t.Errorf("record of what was never saved: %v", rec)
	}
	if s := w.show(4).GetState(); s != corev1.State_STATE_FAILED {
		t.Errorf("what is ephemeral is %s", s)
	}
	if r := w.hostRecord("h1"); !r.GetLost() || r.GetAlive() || r.GetUnsaved() != 1 {
		t.Errorf("host: %v", r)
	}
}

// The lost host is back before another host's wake is active: the session wakes
// there, with its newer disk, and the other host ends what it began.
func TestLostHostIsBackBeforeTheOtherIsActive(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	w.awakeAndSaved(t, 1)
	h2 := w.withHost(t, "h2", 0)
	open := h2.block("wake")
	w.lost(t, h1)
	h2.await(t, "wake")
	h1.lose()
	h1.boot = "b2"
	if j := h1.join(t); len(j.GetOwned()) != 1 || len(j.GetStale()) != 0 {
		t.Errorf("join: %v", j)
	}
	h1.keepLease(t)
	rec := w.activeOn(1, "h1")
	if rec.GetOrigin() != corev1.Origin_ORIGIN_RESUMED || rec.GetUnsaved() {
		t.Errorf("record: %v", rec)
	}
	open()
	h2.await(t, "sleep") // told to end what it began
	w.until("nothing of it counts against h2", func() bool { return w.hostRecord("h2").GetUsed().GetMemoryBytes() == 0 })
	w.events(1, "admitted placed active asleep admitted placed active displaced asleep placed placed active")
}

// The lost host is back when another host has the session: it is told that its
// disk is stale, and is forgotten once it has removed it.
func TestLostHostIsBackAfterTheOtherIsActive(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	was := w.awakeAndSaved(t, 1)
	w.withHost(t, "h2", 0)
	w.lost(t, h1)
	rec := w.activeOn(1, "h2")
	h1.lose()
	h1.boot = "b2"
	j := h1.join(t)
	if len(j.GetOwned()) != 0 || len(j.GetStale()) != 1 || !proto.Equal(j.GetStale()[0], rec.GetSession()) {
		t.Fatalf("join: %v", j)
	}
	// What the old owner still tries is refused.
	if _, err := bus.Invoke[*schedulerv1.CommitManifestReply](bustest.Context(t), h1.conn, "scheduler", "commit_manifest",
		&schedulerv1.CommitManifestRequest{Session: was.GetSession(), Manifest: &corev1.Manifest{Id: "late", Parent: "m1"}}); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("commit of the old owner: %v", err)
	}
	dropped := &schedulerv1.ReportRequest{Session: j.GetStale()[0], What: "dropped"}
	for range 2 {
		if _, err := bus.Invoke[*schedulerv1.ReportReply](bustest.Context(t), h1.conn, "scheduler", "report", dropped); err != nil {
			t.Errorf("report: %v", err)
		}
	}
	if j := h1.join(t); len(j.GetStale()) != 0 {
		t.Errorf("it is told again: %v", j)
	}
	if s := w.show(1).GetState(); s != corev1.State_STATE_ACTIVE {
		t.Errorf("the session is %s", s)
	}
}

// 200 awake sessions of a lost host: never more than so many wake at once, and
// those of higher priority first.
func TestHandoffIsNoStampede(t *testing.T) {
	const n, high = 200, 60
	w := newWorld(t, func(c *Config) { c.HandoffRate = 1000 })
	h1 := w.withHost(t, testHost, 0)
	important := map[string]bool{}
	var mu sync.Mutex
	slots := make(chan struct{}, 16)
	var work sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			for _, id := range []string{"r1", "r2"} {
				a := admission(i, id)
				if i%10 < high*10/n {
					a.Terms.Priority = 50
					mu.Lock()
					important[testKey(i).String()] = true
					mu.Unlock()
				}
				if _, err := w.openWith(a); err != nil {
					t.Error(err)
				}
				if id == "r1" {
					if _, err := w.close(i, "c1"); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	work.Wait()
	h2 := w.withHost(t, "h2", 0)
	w.lost(t, h1)
	for i := range n {
		w.activeOn(i, "h2")
	}
	h2.mu.Lock()
	defer h2.mu.Unlock()
	if h2.wakMax > w.cfg.HandoffParallel || len(h2.order) != n {
		t.Errorf("%d of %d wakes were under way at once, want at most %d", h2.wakMax, len(h2.order), w.cfg.HandoffParallel)
	}
	// Those under way at the same moment may reach the host in any order.
	first := slices.IndexFunc(h2.order, func(k string) bool { return !important[k] })
	if first < len(important)-w.cfg.HandoffParallel {
		t.Errorf("wake %d of %d important ones is one of no importance", first, len(important))
	}
}

// A user's open of a session that waits for its turn to be handed over is
// placed at once, and both are one wake.
func TestOpenOfASessionThatIsHandedOver(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.HandoffParallel = 1 })
	h1 := w.withHost(t, testHost, 0)
	for i := range 3 {
		w.awakeAndSaved(t, i)
	}
	h2 := w.withHost(t, "h2", 0)
	open := h2.block("wake")
	w.lost(t, h1)
	h2.await(t, "wake") // the only handoff under way, and it stays
	h2.mu.Lock()
	first := h2.order[0]
	h2.mu.Unlock()
	n := slices.IndexFunc([]int{0, 1, 2}, func(i int) bool { return testKey(i).String() != first })
	done := make(chan error, 1)
	go func() { _, err := w.open(n, "r9"); done <- err }()
	h2.await(t, "wake")
	h2.mu.Lock()
	if got := h2.order[1]; got != testKey(n).String() {
		t.Errorf("the next wake is of %s", got)
	}
	h2.mu.Unlock()
	open()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for i := range 3 {
		w.activeOn(i, "h2")
	}
}

// Handoffs begin no faster than they may.
func TestHandoffRate(t *testing.T) {
	const n, rate = 6, 20
	w := newWorld(t, func(c *Config) { c.HandoffRate = rate })
	h1 := w.withHost(t, testHost, 0)
	for i := range n {
		w.awakeAndSaved(t, i)
	}
	w.withHost(t, "h2", 0)
	w.lost(t, h1)
	var placed []time.Time
	for i := range n {
		w.activeOn(i, "h2")
		w.eventsOf(i)
		for _, e := range w.told(i) {
			if e.GetPlaced() != nil && e.GetPlaced().GetHost() == "h2" {
				placed = append(placed, e.GetAt().AsTime())
			}
		}
	}
	slices.SortFunc(placed, time.Time.Compare)
	if len(placed) != n {
		t.Fatalf("%d placements", len(placed))
	}
	// Less by one tenth, since the times are those of the wall clock.
	if all, least := placed[n-1].Sub(placed[0]), (n-1)*time.Second/rate*9/10; all < least {
		t.Errorf("%d handoffs began within %s, want at least %s", n, all, least)
	}
}

// The leader dies while a session is being handed over; the next one goes on.
func TestLeaderDiesDuringAHandoff(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.HandoffParallel = 2 })
	h1 := w.withHost(t, testHost, 0)
	const n = 6
	for i := range n {
		w.awakeAndSaved(t, i)
	}
	h2 := w.withHost(t, "h2", 0)
	open := h2.block("wake")
	w.lost(t, h1)
	h2.await(t, "wake")
	w.restart()
	h2.await(t, "wake")
	open()
	for i := range n {
		w.activeOn(i, "h2")
		w.events(i, "admitted placed active asleep admitted placed active displaced asleep placed active")
	}
	h2.mu.Lock()
	defer h2.mu.Unlock()
	if h2.wakMax > 2*w.cfg.HandoffParallel { // the old leader's calls are still in the host
		t.Errorf("%d wakes at once", h2.wakMax)
	}
	w.fleet("h1", "lost", 1)
	w.fleet("h2", "lost", 0)
}

// A host whose wakes fail again and again comes last for a while.
func TestHostWhoseWakesFailIsSetBack(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 100)
	h1.failing("wake", errs.E("fake", errkind.Internal, "", "its disks are broken"))
	for i := range sickAfter {
		if _, err := w.open(i, "r1"); err == nil {
			t.Error("a wake on the broken host worked")
		}
	}
	if u := w.hostRecord("h1").GetUnhealthy(); !strings.Contains(u, "wakes of 3 sessions in a row failed") {
		t.Errorf("h1 is %q", u)
	}
	w.withHost(t, "h2", 10) // smaller, so that it would come second
	for i := range 5 {
		if r := must[wakeReply](t)(w.open(10+i, "r1")); r.GetHost() != "h2" {
			t.Errorf("placed on %s", r.GetHost())
		}
	}
	h1.failing("wake", nil)
	a := admission(20, "r1")
	a.Terms.Limits.MemoryBytes = 50 << 20 // only there: last is not never
	if r := must[wakeReply](t)(w.openWith(a)); r.GetHost() != "h1" {
		t.Errorf("placed on %s", r.GetHost())
	}
	if u := w.hostRecord("h1").GetUnhealthy(); u != "" {
		t.Errorf("h1 is still %q", u)
	}
}

// What a host says of itself is advice for placement: images, warm sandboxes, illness.
func TestWhatAHostSaysOfItself(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 100)
	h2 := newFakeHostOn(t, w, "h2", bustest.Connect(t, w.bus, subjects.Host("h2")), "b1")
	h2.memory = 50 << 20
	h2.load = &schedulerv1.HostLoad{Images: []string{"python:3"}}
	h2.join(t)
	h2.keepLease(t)
	a := admission(1, "r1")
	a.Terms.Image = "python:3"
	if r := must[wakeReply](t)(w.openWith(a)); r.GetHost() != "h2" {
		t.Errorf("the image is on h2, placed on %s", r.GetHost())
	}
	for _, h := range []*fakeHost{h1, h2} { // none is well: nobody gets anything
		h.lease()
		h.load = &schedulerv1.HostLoad{Unhealthy: "containerd does not answer"}
		h.keepLease(t)
	}
	w.until("both are known to be ill", func() bool {
		return w.hostRecord("h1").GetUnhealthy() != "" && w.hostRecord("h2").GetUnhealthy() != ""
	})
	done := make(chan error, 1)
	go func() { _, err := w.open(2, "r1"); done <- err }()
	w.awaitSession(2)
	w.until("it waits", func() bool { return w.show(2).GetWaiting() != "" })
	if r := w.show(2); r.GetState() != corev1.State_STATE_NEW || !strings.Contains(r.GetWaiting(), "containerd does not answer") {
		t.Errorf("record: %v", r)
	}
	h1.lease()
	h1.load = &schedulerv1.HostLoad{}
	h1.keepLease(t)
	if err := <-done; err != nil {
		t.Error(err)
	}
}
