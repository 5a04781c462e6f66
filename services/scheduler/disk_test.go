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
	"github.com/berth-dev/berth/schemas/subjects"
	"go.opentelemetry.io/otel"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func (w *world) restore(n int, snapshot string) (*schedulerv1.RestoreReply, error) {
	rec := w.show(n)
	return bus.Invoke[*schedulerv1.RestoreReply](bustest.Context(w.t), w.op, "scheduler", "restore", &schedulerv1.RestoreRequest{
		Tenant: "acme", Session: testKey(n).String(), Generation: rec.GetSession().GetGeneration(), Head: rec.GetManifest(),
		Snapshot: snapshot, AsOf: timestamppb.New(time.Unix(1000, 0))})
}

// secondHost is another host on the same bus, with a lease.
func (w *world) secondHost(t *testing.T) *fakeHost {
	h := newFakeHostOn(t, w, "h2", bustest.Connect(t, w.bus, subjects.Host("h2")), "b1")
	h.join(t)
	h.keepLease(t)
	return h
}

func (h *fakeHost) lastWake() (restore string, unsaved bool, terms *corev1.Terms) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked.GetRestore(), h.asked.GetUnsaved(), h.asked.GetTerms()
}

func TestRestoreToAnEarlierSnapshot(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	if _, err := w.restore(1, "m1"); !errs.Is(err, errkind.Conflict) {
		t.Errorf("of a session that is awake: %v", err)
	}
	must[sleepReply](t)(w.close(1, "r2"))
	must[wakeReply](t)(w.open(1, "r3"))
	must[sleepReply](t)(w.close(1, "r4"))
	for range 2 { // said twice, it is told once
		r, err := w.restore(1, "m1")
		if err != nil || r.GetRecord().GetRestore() != "m1" || r.GetRecord().GetManifest() != "m2" {
			t.Fatalf("restore: %v, %v", r, err)
		}
	}
	w.restart()
	r := must[wakeReply](t)(w.open(1, "r5"))
	if r.GetOrigin() != corev1.Origin_ORIGIN_RESTORED || r.GetRestoredAsOf().GetSeconds() != 1000 {
		t.Errorf("wake: %v", r)
	}
	if restore, unsaved, _ := h.lastWake(); restore != "m1" || unsaved {
		t.Errorf("the host was asked for %q, unsaved %t", restore, unsaved)
	}
	rec := w.show(1)
	if rec.GetRestore() != "" || rec.GetManifest() != "m3" || rec.GetRestoredAsOf().GetSeconds() != 1000 {
		t.Errorf("record: %v", rec)
	}
	w.events(1, "admitted placed active asleep admitted placed active asleep rewound admitted placed active")
	for _, m := range w.stream("BERTH_SESSIONS") {
		e := &schedulerv1.Event{}
		if err := proto.Unmarshal(m.Data, e); err == nil && e.GetRewound() != nil {
			if d := e.GetRewound(); d.GetSnapshot() != "m1" || d.GetHead() != "m2" || d.GetAsOf().GetSeconds() != 1000 {
				t.Errorf("rewound: %v", d)
			}
		}
	}
}

// A host that does not know how to bring a snapshot back never makes the newest
// files pass for it.
func TestSnapshotThatIsNotBroughtBack(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	must[sleepReply](t)(w.close(1, "r2"))
	if _, err := w.restore(1, "m0"); err != nil {
		t.Fatal(err)
	}
	h.deaf = true
	if _, err := w.open(1, "r3"); !errs.Is(err, errkind.Conflict) || !strings.Contains(err.Error(), "did not bring back snapshot m0") {
		t.Errorf("open: %v", err)
	}
	if rec := w.become(1, corev1.State_STATE_FAILED); rec.GetRestore() != "m0" || rec.GetFailure().GetReason() == "" {
		t.Errorf("record: %v", rec)
	}
}

func TestSnapshotTermsReachTheHost(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	a := admission(1, "r1")
	want := &corev1.Snapshots{Every: durationpb.New(time.Minute), KeepAll: durationpb.New(time.Hour),
		KeepHourly: durationpb.New(24 * time.Hour), KeepDaily: durationpb.New(720 * time.Hour)}
	a.Terms.Snapshots = want
	must[wakeReply](t)(w.openWith(a))
	w.restart()
	_, _, asked := h.lastWake()
	for name, got := range map[string]*corev1.Terms{"wake": asked, "record": w.show(1).GetTerms(), "join": h.join(t).GetOwned()[0].GetTerms()} {
		if !proto.Equal(got.GetSnapshots(), want) {
			t.Errorf("%s: %v", name, got.GetSnapshots())
		}
	}
}

// The store is away while the session goes to sleep: its compute is gone and
// its disk is whole on its host, so an open wakes it from there at once.
func TestStoreAwayWhileASleepingSessionIsOpened(t *testing.T) {
	for name, first := range map[string]bool{"the open comes later": false, "the open waits already": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			h := newFakeHost(t, w, "b1")
			h.join(t)
			before := must[wakeReply](t)(w.open(1, "r1"))
			release := func() {}
			if first {
				release = h.block("sleep")
			}
			h.failing("sleep", errs.E("fake", errkind.Unsaved, "", "the store does not answer"))
			closed := make(chan error, 1)
			go func() { _, err := w.close(1, "c1"); closed <- err }()
			h.await(t, "sleep")
			if !first {
				h.await(t, "sleep") // again and again
			}
			opened := make(chan error, 1)
			var r wakeReply
			go func() { var err error; r, err = w.open(1, "r2"); opened <- err }()
			if first {
				h.await(t, "wake") // the recall, which is too late
			}
			release()
			if err := <-opened; err != nil {
				t.Fatal(err)
			}
			if r.GetOrigin() != corev1.Origin_ORIGIN_RESUMED || epochOf(r.GetSession().GetEpoch()) == epochOf(before.GetSession().GetEpoch()) {
				t.Errorf("open: %v", r)
			}
			if _, unsaved, _ := h.lastWake(); !unsaved {
				t.Error("the host was not told that its disk is unsaved")
			}
			if err := <-closed; !errs.Is(err, errkind.Unsaved) || !strings.Contains(err.Error(), "the store does not answer") {
				t.Errorf("a close was acknowledged though nothing was saved: %v", err)
			}
			w.events(1, "admitted placed active admitted displaced asleep placed active")
		})
	}
}

// Whoever closes while the store is away is told at once that it is not saved
// yet; the sleep goes on, and ends when the store is back.
func TestAnUnsavedCloseIsToldAtOnce(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	h.failing("sleep", errs.E("fake", errkind.Unsaved, "", "the store does not answer"))
	if _, err := w.close(1, "c1"); !errs.Is(err, errkind.Unsaved) || !strings.Contains(err.Error(), "the store does not answer") {
		t.Errorf("the close: %v", err)
	}
	w.become(1, corev1.State_STATE_SLEEPING)
	h.failing("sleep", nil)
	w.become(1, corev1.State_STATE_ASLEEP)
	w.events(1, "admitted placed active asleep")
}

// It is known that the disk cannot be saved, and the host tries once more: an
// open does not wait for the end of that try.
func TestOpenDoesNotWaitForAnotherTryToSave(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	h.failing("sleep", errs.E("fake", errkind.Unsaved, "", "the store does not answer"))
	go func() { _, _ = w.close(1, "c1") }()
	h.await(t, "sleep")
	h.await(t, "sleep")
	t.Cleanup(h.block("sleep"))
	h.await(t, "sleep")
	if r := must[wakeReply](t)(w.open(1, "r2")); r.GetState() != corev1.State_STATE_ACTIVE {
		t.Errorf("open: %v", r)
	}
}

// The host is busy with a sleep that it cannot end: an open says why it waits
// in vain, and a delete still works.
func TestStoreAwayForLong(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	h.failing("sleep", errs.E("fake", errkind.Unavailable, "", "the store does not answer"))
	h.failing("wake", errs.E("fake", errkind.StaleEpoch, "", "the sleep cannot be taken back"))
	go func() { _, _ = w.close(1, "c1") }()
	for range 3 {
		h.await(t, "sleep")
	}
	a := admission(1, "r2")
	a.Deadline = timestamppb.New(time.Now().Add(700 * time.Millisecond))
	if _, err := w.openWith(a); !errs.Is(err, errkind.Deadline) || !strings.Contains(err.Error(), "the store does not answer") {
		t.Errorf("open: %v", err)
	}
	if s := w.show(1).GetState(); s != corev1.State_STATE_SLEEPING {
		t.Errorf("the session is %s", s)
	}
	must[deleteReplyT](t)(w.delete(1, "d1"))
	w.events(1, "admitted placed active admitted deleted erased")
}

// A host says busy when it cannot reach the store and compute still runs.
func TestStoreAwayBeforeASleep(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	r := must[wakeReply](t)(w.open(1, "r1"))
	h.setBusy(true)
	s, err := bus.Invoke[sleepReply](bustest.Context(t), w.life, "scheduler", "sleep", &schedulerv1.SleepRequest{Tenant: "acme",
		Session: testKey(1).String(), Reason: "idle", IdleSince: timestamppb.New(time.Now().Add(time.Hour)),
		Generation: r.GetSession().GetGeneration(), Epoch: r.GetSession().GetEpoch()})
	if err != nil || s.GetState() != corev1.State_STATE_ACTIVE || s.GetBusySince() == nil {
		t.Errorf("sleep: %v, %v", s, err)
	}
}

// A session that is saved wakes elsewhere while its host is away, and is erased
// once that host, too, has nothing left of it.
func TestSavedSessionWakesElsewhere(t *testing.T) {
	w := newWorld(t, nil)
	h := w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "r1"))
	must[sleepReply](t)(w.close(1, "r2"))
	must[wakeReply](t)(w.open(2, "r1"))
	h2 := w.secondHost(t)
	w.lost(t, h)
	if rec := w.become(2, corev1.State_STATE_ASLEEP); !rec.GetUnsaved() { // h1 is lost
		t.Errorf("record of a session that was awake: %v", rec)
	}
	r := must[wakeReply](t)(w.open(1, "r3"))
	if r.GetHost() != "h2" || r.GetOrigin() != corev1.Origin_ORIGIN_RESUMED {
		t.Errorf("open: %v", r)
	}
	a := admission(2, "r2")
	a.Deadline = timestamppb.New(time.Now().Add(500 * time.Millisecond))
	if r, err := w.openWith(a); err == nil {
		t.Errorf("a session whose newest files are on h1 woke elsewhere: %v", r)
	}
	h2.await(t, "wake")
	must[deleteReplyT](t)(w.delete(1, "d1"))
	w.events(1, "admitted placed active asleep admitted placed active deleted")
	j := h.join(t)
	h.keepLease(t)
	if len(j.GetErased()) != 1 || j.GetErased()[0].GetSession() != testKey(1).String() {
		t.Errorf("h1 is told to erase %v", j.GetErased())
	}
	w.events(1, "admitted placed active asleep admitted placed active deleted erased")
	var hosts []string
	for _, m := range w.stream("BERTH_SESSIONS") {
		e := &schedulerv1.Event{}
		if err := proto.Unmarshal(m.Data, e); err == nil && e.GetErased() != nil {
			hosts = e.GetErased().GetHosts()
		}
	}
	if strings.Join(hosts, " ") != "h1 h2" {
		t.Errorf("erased on %v", hosts)
	}
	if j := h.join(t); len(j.GetErased()) != 0 {
		t.Errorf("h1 is told again to erase %v", j.GetErased())
	}
}

// TestRefusedCommitsAreCounted: an old owner, another host, a slow upload and a
// wake that commits what nobody asked for move no head, and each is counted.
func TestRefusedCommitsAreCounted(t *testing.T) {
	fences := countFences(t)
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	ref := must[wakeReply](t)(w.open(1, "r1")).GetSession()
	other := bustest.Connect(t, w.bus, subjects.Host("h2"))
	old := proto.Clone(ref).(*corev1.SessionRef)
	old.Epoch.Index--
	earlier := proto.Clone(ref).(*corev1.SessionRef)
	earlier.Generation.Index--
	commit := func(c *bus.Conn, r *corev1.SessionRef, m *corev1.Manifest) error {
		_, err := bus.Invoke[*schedulerv1.CommitManifestReply](bustest.Context(t), c, "scheduler", "commit_manifest",
			&schedulerv1.CommitManifestRequest{Session: r, Manifest: m})
		return err
	}
	for _, m := range []*corev1.Manifest{{Id: "m0"}, {Id: "m1", Parent: "m0"}} {
		if err := commit(h.conn, ref, m); err != nil {
			t.Fatal(err)
		}
	}
	if err := commit(h.conn, ref, &corev1.Manifest{Id: "m1", Parent: "m0"}); err != nil {
		t.Errorf("said again: %v", err)
	}
	was := fences()
	for i, c := range []struct {
		name string
		conn *bus.Conn
		ref  *corev1.SessionRef
		m    *corev1.Manifest
		want errkind.Kind
	}{
		{"epoch of the past", h.conn, old, &corev1.Manifest{Id: "m2", Parent: "m1"}, errkind.StaleEpoch},
		{"generation of the past", h.conn, earlier, &corev1.Manifest{Id: "m2", Parent: "m1"}, errkind.StaleEpoch},
		{"manifest of another epoch", h.conn, ref, &corev1.Manifest{Id: "m2", Parent: "m1", Epoch: old.GetEpoch()}, errkind.StaleEpoch},
		{"another host", other, ref, &corev1.Manifest{Id: "m2", Parent: "m1"}, errkind.Denied},
		{"slow upload of the same owner", h.conn, ref, &corev1.Manifest{Id: "m1x", Parent: "m0"}, errkind.Conflict},
		{"first manifest again", h.conn, ref, &corev1.Manifest{Id: "m0"}, errkind.Conflict},
	} {
		if err := commit(c.conn, c.ref, c.m); !errs.Is(err, c.want) {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
		if got := fences() - was; got != int64(i+1) {
			t.Errorf("%s: %d refusals were counted, want %d", c.name, got, i+1)
		}
	}
	if m := w.show(1).GetManifest(); m != "m1" {
		t.Errorf("the head is %s", m)
	}
}

// countFences returns how many commits were refused since.
func countFences(t *testing.T) func() int64 {
	reader := sdkmetric.NewManualReader()
	was := otel.GetMeterProvider()
	otel.SetMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)))
	t.Cleanup(func() { otel.SetMeterProvider(was) })
	return func() (n int64) {
		var out metricdata.ResourceMetrics
		if err := reader.Collect(bustest.Context(t), &out); err != nil {
			t.Fatal(err)
		}
		for _, scope := range out.ScopeMetrics {
			for _, m := range scope.Metrics {
				sum, ok := m.Data.(metricdata.Sum[int64])
				if !ok || m.Name != "berth.scheduler.fenced" {
					continue
				}
				for _, p := range sum.DataPoints {
					if v, _ := p.Attributes.Value("place"); v.AsString() == "manifest" {
						n += p.Value
					}
				}
			}
		}
		return n
	}
}
