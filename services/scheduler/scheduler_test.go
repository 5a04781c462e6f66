package scheduler

import (
	"context"
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
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
)

type wakeReply = *schedulerv1.WakeReply
type sleepReply = *schedulerv1.SleepReply
type deleteReplyT = *schedulerv1.DeleteReply

func TestOpenSleepResumeDelete(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	r := must[wakeReply](t)(w.open(1, "r1"))
	if r.GetOrigin() != corev1.Origin_ORIGIN_CREATED || r.GetHost() != "h1" || r.GetHostKey() != "XKEY" || r.GetState() != corev1.State_STATE_ACTIVE {
		t.Fatalf("first open: %v", r)
	}
	var names []string
	for _, s := range r.GetTiming().GetSteps() {
		names = append(names, s.GetName())
	}
	if got, want := strings.Join(names, " "), "scheduler.apply_placed scheduler.host_wake host.disk.attach scheduler.apply_active"; got != want {
		t.Errorf("steps %q, want %q", got, want)
	}
	again := must[wakeReply](t)(w.open(1, "r2"))
	if again.GetOrigin() != corev1.Origin_ORIGIN_JOINED || !proto.Equal(again.GetSession(), r.GetSession()) {
		t.Errorf("second open: %v", again)
	}
	s := must[sleepReply](t)(w.close(1, "r3"))
	if s.GetState() != corev1.State_STATE_ASLEEP {
		t.Fatalf("close: %v", s)
	}
	if rec := w.show(1); rec.GetManifest() != "m1" || rec.GetState() != corev1.State_STATE_ASLEEP {
		t.Errorf("asleep record: %v", rec)
	}
	r = must[wakeReply](t)(w.open(1, "r4"))
	if r.GetOrigin() != corev1.Origin_ORIGIN_RESUMED || epochOf(r.GetSession().GetEpoch()).Compare(epochOf(again.GetSession().GetEpoch())) <= 0 {
		t.Errorf("resume: %v", r)
	}
	d := must[deleteReplyT](t)(w.delete(1, "r5"))
	if d.GetState() != corev1.State_STATE_DELETED {
		t.Errorf("delete: %v", d)
	}
	if len(w.creds.revoked) == 0 || len(h.boxes) != 0 {
		t.Errorf("after delete: revoked %v, boxes %v", w.creds.revoked, h.boxes)
	}
	r = must[wakeReply](t)(w.open(1, "r6"))
	if r.GetOrigin() != corev1.Origin_ORIGIN_CREATED || generationOf(r.GetSession().GetGeneration()) == generationOf(again.GetSession().GetGeneration()) {
		t.Errorf("a new generation: %v", r)
	}
	w.events(1, "admitted placed active renewed asleep admitted placed active deleted erased admitted placed active")
}

// events checks the kinds on the stream, in order, and that revisions grow.
func (w *world) events(n int, want string) {
	w.t.Helper()
	deadline := time.Now().Add(patience)
	var kinds []string
	for time.Now().Before(deadline) {
		var last uint64
		kinds = nil
		for _, m := range w.stream("BERTH_SESSIONS") {
			sub, err := subjects.ParseSession(m.Subject)
			if err != nil {
				w.t.Fatal(err)
			}
			if sub.Session != testKey(n) {
				continue
			}
			e := &schedulerv1.Event{}
			if err := proto.Unmarshal(m.Data, e); err != nil {
				w.t.Fatal(err)
			}
			if e.GetRevision() <= last {
				continue // a consumer drops what is not newer
			}
			if e.GetRevision() != last+1 {
				w.t.Fatalf("revision %d after %d: an event is missing", e.GetRevision(), last)
			}
			last = e.GetRevision()
			kinds = append(kinds, sub.Event)
		}
		if strings.Join(kinds, " ") == want {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	w.t.Errorf("events\n got %s\nwant %s", strings.Join(kinds, " "), want)
}

func (w *world) stream(name string) []*nats.Msg {
	w.t.Helper()
	ctx := bustest.Context(w.t)
	s, err := w.op.JetStream().Stream(ctx, name)
	if err != nil {
		w.t.Fatal(err)
	}
	var out []*nats.Msg
	info := s.CachedInfo().State
	for seq := info.FirstSeq; seq > 0 && seq <= info.LastSeq; seq++ {
		m, err := s.GetMsg(ctx, seq)
		if err != nil {
			continue
		}
		out = append(out, &nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data})
	}
	return out
}

// TestStuckStates kills the scheduler in every state in between and expects
// the next one to finish the work.
func TestStuckStates(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	call := func(f func()) (wait func()) {
		var wg sync.WaitGroup
		wg.Go(f)
		return wg.Wait
	}

	open := h.block("wake")
	wait := call(func() { _, _ = w.open(1, "r1") })
	h.await(t, "wake")
	w.restart()
	open()
	wait()
	w.become(1, corev1.State_STATE_ACTIVE)
	r := must[wakeReply](t)(w.open(1, "r1")) // the same request, sent again
	if r.GetState() != corev1.State_STATE_ACTIVE || r.GetOrigin() != corev1.Origin_ORIGIN_CREATED {
		t.Errorf("replayed open: %v", r)
	}

	open = h.block("sleep")
	wait = call(func() { _, _ = w.close(1, "r2") })
	h.await(t, "sleep")
	w.restart()
	open()
	wait()
	w.become(1, corev1.State_STATE_ASLEEP)

	open = h.block("delete")
	wait = call(func() { _, _ = w.delete(1, "r3") })
	h.await(t, "delete")
	w.restart()
	open()
	wait()
	w.become(1, corev1.State_STATE_DELETED)
	if d := must[deleteReplyT](t)(w.delete(1, "r3")); d.GetState() != corev1.State_STATE_DELETED {
		t.Errorf("replayed delete: %v", d)
	}
	w.events(1, "admitted placed active asleep deleted erased")
}

// TestReplayedOpenNamesTheSessionAsItIs: the stored outcome of an open comes
// with the state of now, and not at all once another open placed it anew.
func TestReplayedOpenNamesTheSessionAsItIs(t *testing.T) {
	w := newWorld(t, nil)
	newFakeHost(t, w, "b1").join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	_, err := w.close(1, "r2")
	if err != nil {
		t.Fatal(err)
	}
	w.become(1, corev1.State_STATE_ASLEEP)
	if r := must[wakeReply](t)(w.open(1, "r1")); !r.GetReplayed() || r.GetState() != corev1.State_STATE_ASLEEP {
		t.Errorf("asleep: %v", r)
	}
	must[wakeReply](t)(w.open(1, "r3"))
	if r, err := w.open(1, "r1"); !errs.Is(err, errkind.Superseded) {
		t.Errorf("placed anew: %v, %v", r, err)
	}
	if r := must[wakeReply](t)(w.open(1, "r3")); !r.GetReplayed() || r.GetState() != corev1.State_STATE_ACTIVE {
		t.Errorf("active: %v", r)
	}
}

func TestDeleteFromEveryState(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	open := h.block("wake")
	failed := make(chan error, 1)
	go func() { _, err := w.open(1, "r1"); failed <- err }()
	h.await(t, "wake")
	must[deleteReplyT](t)(w.delete(1, "r2"))
	if err := <-failed; !errs.Is(err, errkind.Superseded) {
		t.Errorf("open that a delete overtook: %v", err)
	}
	open()

	must[wakeReply](t)(w.open(2, "r1"))
	open = h.block("sleep")
	go func() { _, _ = w.close(2, "r2") }()
	h.await(t, "sleep")
	must[deleteReplyT](t)(w.delete(2, "r3"))
	open()

	h.failing("wake", errs.E("fake", errkind.Invalid, "", "no"))
	if _, err := w.open(3, "r1"); !errs.Is(err, errkind.Invalid) {
		t.Errorf("failed wake: %v", err)
	}
	must[deleteReplyT](t)(w.delete(3, "r2"))
	must[deleteReplyT](t)(w.delete(4, "r1")) // never existed
	for n := range 4 {
		if s := w.show(n + 1).GetState(); s != corev1.State_STATE_DELETED {
			t.Errorf("session %d is %s", n+1, s)
		}
	}
}

func TestSleepCancelledByOpen(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	first := must[wakeReply](t)(w.open(1, "r1"))
	open := h.block("sleep")
	go func() { _, _ = w.close(1, "r2") }()
	h.await(t, "sleep")
	go func() { h.await(t, "wake"); open() }()
	r := must[wakeReply](t)(w.open(1, "r3"))
	if r.GetState() != corev1.State_STATE_ACTIVE || !proto.Equal(first.GetSession(), r.GetSession()) {
		t.Errorf("an open while processes still run should keep the epoch: %v", r)
	}
}

// The request to recall overtakes the sleep, which then takes place: the open is answered by a wake.
func TestSleepThatIsNotRecalled(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	first := must[wakeReply](t)(w.open(1, "r1"))
	open := h.block("sleep")
	go func() { _, _ = w.close(1, "r2") }()
	h.await(t, "sleep")
	go func() {
		h.await(t, "wake")
		h.mu.Lock()
		h.boxes[testKey(1).String()].recalled = false
		h.mu.Unlock()
		open()
	}()
	r := must[wakeReply](t)(w.open(1, "r3"))
	if r.GetState() != corev1.State_STATE_ACTIVE || proto.Equal(first.GetSession(), r.GetSession()) {
		t.Errorf("an open after the host went to sleep should have a new epoch: %v", r)
	}
	w.events(1, "admitted placed active admitted asleep placed active")
}

func TestBusyHostRefusesSleep(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	r := must[wakeReply](t)(w.open(1, "r1"))
	h.setBusy(true)
	s, err := bus.Invoke[sleepReply](bustest.Context(t), w.life, "scheduler", "sleep", &schedulerv1.SleepRequest{
		Tenant: "acme", Session: testKey(1).String(), Reason: "close", Generation: r.GetSession().GetGeneration(), Epoch: r.GetSession().GetEpoch()})
	// without idle_since it is forced, so the host may not refuse
	if err != nil || s.GetState() != corev1.State_STATE_ASLEEP {
		t.Errorf("forced sleep: %v, %v", s, err)
	}
	stale := &schedulerv1.SleepRequest{Tenant: "acme", Session: testKey(1).String(), Reason: "idle",
		Generation: r.GetSession().GetGeneration(), Epoch: &corev1.Stamp{Incarnation: 1, Index: 1}}
	if _, err := bus.Invoke[sleepReply](bustest.Context(t), w.life, "scheduler", "sleep", stale); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("sleep of another epoch: %v", err)
	}
}

func TestWakeRetriedUnderNewEpoch(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	h.failing("wake", errs.E("fake", errkind.Unavailable, "", "try again"))
	go func() { h.await(t, "wake"); h.failing("wake", nil) }()
	r := must[wakeReply](t)(w.open(1, "r1"))
	if r.GetState() != corev1.State_STATE_ACTIVE {
		t.Errorf("open: %v", r)
	}
	h.failing("wake", errs.E("fake", errkind.Unavailable, "", "never"))
	// The outcome is stored: a kind that asks to send the same request again would bring it again for ever.
	for range 2 {
		if _, err := w.open(2, "r1"); !errs.Is(err, errkind.Unplaceable) {
			t.Errorf("open that fails for good: %v", err)
		}
	}
	if rec := w.show(2); rec.GetState() != corev1.State_STATE_FAILED || rec.GetFailure().GetReason() == "" {
		t.Errorf("record: %v", rec)
	}
	h.failing("wake", nil)
	must[wakeReply](t)(w.open(2, "r2")) // the next open tries again
}

func TestUnplaceableUntilHostJoins(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	got := make(chan error, 1)
	go func() { _, err := w.open(1, "r1"); got <- err }()
	w.awaitSession(1)
	h.join(t)
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	a := admission(2, "r1")
	a.Terms.Limits.MemoryBytes = 1 << 50
	a.Deadline.Seconds = time.Now().Add(2 * time.Second).Unix()
	if _, err := w.openWith(a); !errs.Is(err, errkind.Unplaceable) && !errs.Is(err, errkind.Deadline) {
		t.Errorf("too large: %v", err)
	}
	w.become(2, corev1.State_STATE_FAILED)
	w.events(1, "admitted unplaceable placed active")
	w.events(2, "admitted unplaceable failed")
}

func (w *world) awaitSession(n int) {
	w.t.Helper()
	for range 1000 {
		_, err := bus.Invoke[*schedulerv1.ShowReply](bustest.Context(w.t), w.op, "scheduler", "show", &schedulerv1.ShowRequest{Session: testKey(n).String()})
		if err == nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	w.t.Fatal("the session does not appear")
}

func TestHostRestartFindsItsSessions(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	r := must[wakeReply](t)(w.open(1, "r1"))
	must[wakeReply](t)(w.open(2, "r1"))
	h.boot = "b2" // the host rebooted: no compute is left
	j := h.join(t)
	if len(j.GetOwned()) != 2 || !j.GetComplete() {
		t.Fatalf("owned: %v", j)
	}
	rep, err := bus.Invoke[*schedulerv1.ReportReply](bustest.Context(t), h.conn, "scheduler", "report",
		&schedulerv1.ReportRequest{Session: r.GetSession(), What: "exited", Reason: "the host rebooted"})
	if err != nil || rep.GetState() != corev1.State_STATE_ASLEEP {
		t.Fatalf("report: %v, %v", rep, err)
	}
	r2 := must[wakeReply](t)(w.open(1, "r2"))
	if r2.GetOrigin() != corev1.Origin_ORIGIN_RESUMED {
		t.Errorf("wake after a reboot: %v", r2)
	}
	w.events(1, "admitted placed active displaced asleep admitted placed active")
}

func TestHostLostAndBack(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Lease, c.LeaseDrift = time.Second, 0 })
	h := w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "r1"))
	h.lease() // nobody renews
	w.become(1, corev1.State_STATE_ASLEEP)
	if _, err := bus.Invoke[*schedulerv1.LeaseReply](bustest.Context(t), h.conn, "scheduler", "lease",
		&schedulerv1.LeaseRequest{Host: "h1", Boot: "b1"}); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("lease of a lost host: %v", err)
	}
	a := admission(1, "r2")
	got := make(chan error, 1)
	go func() { _, err := w.openWith(a); got <- err }()
	j := h.join(t)
	h.keepLease(t)
	if len(j.GetOwned()) != 1 || j.GetOwned()[0].GetLastActiveEpoch() == nil {
		t.Errorf("owned: %v", j)
	}
	if err := <-got; err != nil {
		t.Errorf("open after the host is back: %v", err)
	}
}

func TestDeleteWhileHostIsAway(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Lease, c.LeaseDrift = time.Second, 0 })
	h := w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "r1"))
	h.lease()
	w.become(1, corev1.State_STATE_ASLEEP)
	must[deleteReplyT](t)(w.delete(1, "r2"))
	open := h.block("delete") // it may be asked before it has the answer to its join
	j := h.join(t)
	h.keepLease(t)
	if len(j.GetErased()) != 1 || len(j.GetOwned()) != 0 {
		t.Errorf("join: %v", j)
	}
	open()
	h.await(t, "delete")
}

func TestForeignCallersAreRefused(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	r := must[wakeReply](t)(w.open(1, "r1"))
	h2 := bustest.Connect(t, w.bus, subjects.Host("h2"))
	ctx := bustest.Context(t)
	if _, err := bus.Invoke[*schedulerv1.LeaseReply](ctx, h2, "scheduler", "lease", &schedulerv1.LeaseRequest{Host: "h1", Boot: "b1"}); !errs.Is(err, errkind.Denied) {
		t.Errorf("lease for another host: %v", err)
	}
	if _, err := bus.Invoke[*schedulerv1.CommitManifestReply](ctx, h2, "scheduler", "commit_manifest",
		&schedulerv1.CommitManifestRequest{Session: r.GetSession(), Manifest: &corev1.Manifest{Id: "evil"}}); !errs.Is(err, errkind.Denied) {
		t.Errorf("manifest of another host: %v", err)
	}
	if _, err := bus.Invoke[*schedulerv1.ReportReply](ctx, h2, "scheduler", "report",
		&schedulerv1.ReportRequest{Session: r.GetSession(), What: "exited"}); !errs.Is(err, errkind.Denied) {
		t.Errorf("report of another host: %v", err)
	}
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := bus.Invoke[wakeReply](short, w.op, "scheduler", "wake", &schedulerv1.WakeRequest{Admission: admission(2, "r1")}); err == nil {
		t.Error("the operator may not wake")
	}
	if s := w.show(1).GetState(); s != corev1.State_STATE_ACTIVE {
		t.Errorf("session is %s", s)
	}
}

func TestBadInputChangesNothing(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	bad := map[string]func(*corev1.Admission){
		"no actor":   func(a *corev1.Admission) { a.Actor = nil },
		"bad tenant": func(a *corev1.Admission) { a.Actor.Tenant = "A.*" },
		"no keys":    func(a *corev1.Admission) { a.Keys = nil },
		"bad key":    func(a *corev1.Admission) { a.Keys = []string{"s1"} },
		"no request": func(a *corev1.Admission) { a.RequestId = "" },
		"no tier":    func(a *corev1.Admission) { a.Terms.Tier = 0 },
		"long name":  func(a *corev1.Admission) { a.SessionName = strings.Repeat("x", 5000) },
	}
	for name, change := range bad {
		a := admission(1, "r1")
		change(a)
		if _, err := w.openWith(a); err == nil || errs.Kind(err) == errkind.Internal {
			t.Errorf("%s: %v", name, err)
		}
	}
	l, err := bus.Invoke[*schedulerv1.ListReply](bustest.Context(t), w.op, "scheduler", "list", &schedulerv1.ListRequest{})
	if err != nil || len(l.GetRecords()) != 0 {
		t.Errorf("list: %v, %v", l, err)
	}
}

func TestListPages(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	for i := range 7 {
		must[wakeReply](t)(w.open(i, "r1"))
	}
	must[deleteReplyT](t)(w.delete(0, "r2"))
	seen, after := map[string]bool{}, ""
	for range 10 {
		l, err := bus.Invoke[*schedulerv1.ListReply](bustest.Context(t), w.op, "scheduler", "list", &schedulerv1.ListRequest{Tenant: "acme", Limit: 3, After: after, Deleted: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range l.GetRecords() {
			if seen[r.GetSession().GetSession()] {
				t.Error("a session appears twice")
			}
			seen[r.GetSession().GetSession()] = true
		}
		if after = l.GetNext(); after == "" {
			break
		}
	}
	if len(seen) != 7 {
		t.Errorf("pages held %d sessions, want 7", len(seen))
	}
	hs, err := bus.Invoke[*schedulerv1.HostsReply](bustest.Context(t), w.op, "scheduler", "hosts", &schedulerv1.HostsRequest{})
	if err != nil || len(hs.GetHosts()) != 1 || hs.GetHosts()[0].GetActive() != 6 || !hs.GetHosts()[0].GetAlive() {
		t.Errorf("hosts: %v, %v", hs, err)
	}
}
