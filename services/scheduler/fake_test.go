package scheduler

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const testHost ids.Host = "h1"

// box is what the fake host has of one session.
type box struct {
	unsaved                    bool // its compute is gone and its disk not saved
	generation, epoch, running string
	manifest                   string
	disk, recalled             bool
	asked                      string // epoch of the sleep that was asked for last
	origin                     corev1.Origin
}

// fakeHost is a host in memory on the real subjects. It keeps the contract:
// exact epochs, manifests committed before a sleep is acknowledged.
type fakeHost struct {
	id   ids.Host
	conn *bus.Conn
	boot string

	mu       sync.Mutex
	boxes    map[string]*box
	wakes    int
	busy     bool
	gate     map[string]chan struct{} // blocks a method until closed
	fail     map[string]error
	reached  chan string
	manifest int
	// The last wake that was asked for; deaf: it does not do what it is not used to.
	asked *hostv1.WakeRequest
	tiers []corev1.Tier // none: null alone
	// onWake may refuse a wake.
	onWake func(*hostv1.WakeRequest) error
	deaf   bool
	// stored: the store is not clean of what the host removed.
	stored bool
	// coldReason is why it takes no warm one though it is told of a reservation.
	coldReason string
	// Sessions in the order of their wakes, how many wake now and did at most,
	// and how many were awake at most.
	order          []string
	waking, wakMax int
	awakeMax       int
	memory         uint64
	load           *schedulerv1.HostLoad
	lease          func() // ends the renewals
	busyWith       map[string]bool
	sleeps         map[string]*sync.Mutex
}

func newFakeHost(t testing.TB, w *world, boot string) *fakeHost {
	return newFakeHostOn(t, w, testHost, w.host, boot)
}

func newFakeHostOn(t testing.TB, _ *world, id ids.Host, conn *bus.Conn, boot string) *fakeHost {
	h := &fakeHost{id: id, conn: conn, boot: boot, boxes: map[string]*box{}, gate: map[string]chan struct{}{}, fail: map[string]error{}, reached: make(chan string, 64)}
	svc, err := h.conn.Serve(bustest.Context(t), bus.ServiceConfig{Name: "host"})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{bus.Handle(svc, "wake", h.wake), bus.Handle(svc, "sleep", h.sleep), bus.Handle(svc, "delete", h.delete)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func key(r *corev1.SessionRef) (string, string) {
	return generationOf(r.GetGeneration()).String(), epochOf(r.GetEpoch()).String()
}

// pass tells the test that a method was reached and waits for its gate.
func (h *fakeHost) pass(ctx context.Context, method string) error {
	h.mu.Lock()
	g, err := h.gate[method], h.fail[method] // those of now: who is told may change them
	h.mu.Unlock()
	select {
	case h.reached <- method:
	default:
	}
	if g != nil {
		select {
		case <-g:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}

func (h *fakeHost) wake(ctx context.Context, _ bus.Request, r *hostv1.WakeRequest) (*hostv1.WakeReply, error) {
	h.mu.Lock()
	h.order = append(h.order, r.GetSession().GetSession())
	h.waking++
	h.wakMax = max(h.wakMax, h.waking)
	h.mu.Unlock()
	err := h.pass(ctx, "wake")
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waking--
	if err == nil && h.onWake != nil {
		err = h.onWake(r)
	}
	if err != nil {
		return nil, err
	}
	h.wakes++
	// The recall of an earlier epoch may come last.
	if h.asked == nil || epochOf(r.GetSession().GetEpoch()).Compare(epochOf(h.asked.GetSession().GetEpoch())) >= 0 {
		h.asked = r
	}
	if r.GetRestore() != "" && !h.deaf {
		return h.bringBack(ctx, r)
	}
	g, e := key(r.GetSession())
	b := h.boxes[r.GetSession().GetSession()]
	origin := corev1.Origin_ORIGIN_RESUMED
	switch {
	case b == nil || b.generation != g:
		switch {
		case r.GetFresh():
			origin = corev1.Origin_ORIGIN_CREATED
		case r.GetManifest() == "":
			return nil, errs.E("fake wake", errkind.DataLoss, "", "no disk of it here")
		case r.GetUnsaved():
			origin = corev1.Origin_ORIGIN_RESTORED
		}
		b = &box{generation: g}
		h.boxes[r.GetSession().GetSession()] = b
	case b.running == e: // the same wake again, or the recall of a sleep
		b.recalled = b.asked == e
		origin = b.origin
	case r.GetFresh():
		origin = corev1.Origin_ORIGIN_CREATED
	}
	b.recalled = b.recalled && b.epoch == e
	b.epoch, b.running, b.unsaved, b.disk, b.origin = e, e, false, true, origin
	h.awakeMax = max(h.awakeMax, h.awake())
	warm := ""
	if r.GetReservation() != "" && h.coldReason == "" {
		warm = "warm-of-" + r.GetReservation()
	}
	return &hostv1.WakeReply{Origin: origin, ImageDigest: "sha256:abc", Warm: warm, ColdReason: h.coldReason, Timing: &corev1.Timing{Total: durationpb.New(time.Millisecond),
		Steps: []*corev1.Step{{Name: "host.disk.attach", Took: durationpb.New(time.Millisecond)}}}}, nil
}

// bringBack makes an earlier snapshot the head before the session is awake. mu is held.
func (h *fakeHost) bringBack(ctx context.Context, r *hostv1.WakeRequest) (*hostv1.WakeReply, error) {
	g, e := key(r.GetSession())
	m := h.newManifest(r.GetManifest())
	m.RestoredFrom = r.GetRestore()
	if _, err := bus.Invoke[*schedulerv1.CommitManifestReply](ctx, h.conn, "scheduler", "commit_manifest",
		&schedulerv1.CommitManifestRequest{Session: r.GetSession(), Manifest: m}); err != nil {
		return nil, err
	}
	h.boxes[r.GetSession().GetSession()] = &box{generation: g, epoch: e, running: e, disk: true, origin: corev1.Origin_ORIGIN_RESTORED}
	return &hostv1.WakeReply{Origin: corev1.Origin_ORIGIN_RESTORED, RestoredAsOf: timestamppb.New(time.Unix(1000, 0))}, nil
}

// awake is how many sessions run here. mu is held.
func (h *fakeHost) awake() (n int) {
	for _, b := range h.boxes {
		if b.running != "" {
			n++
		}
	}
	return n
}

// lose ends what runs here, as a watchdog or a reboot does; disks stay.
func (h *fakeHost) lose() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range h.boxes {
		if b.running != "" {
			b.running, b.unsaved = "", true
		}
	}
}

func (h *fakeHost) newManifest(parent string) *corev1.Manifest {
	h.manifest++
	id := fmt.Sprint("m", h.manifest)
	if h.id != testHost {
		id += "-" + h.id.String()
	}
	return &corev1.Manifest{Id: id, Parent: parent, ImageDigest: "sha256:abc", Host: h.id.String()}
}

// alone lets one sleep of a session at a time do its work, as a host does:
// that of a leader which is gone, and of the next.
func (h *fakeHost) alone(session string) (done func()) {
	h.mu.Lock()
	if h.sleeps == nil {
		h.sleeps = map[string]*sync.Mutex{}
	}
	m := h.sleeps[session]
	if m == nil {
		m = &sync.Mutex{}
		h.sleeps[session] = m
	}
	h.mu.Unlock()
	m.Lock()
	return m.Unlock
}

func (h *fakeHost) sleep(ctx context.Context, _ bus.Request, r *hostv1.SleepRequest) (*hostv1.SleepReply, error) {
	h.mu.Lock()
	if b := h.boxes[r.GetSession().GetSession()]; b != nil {
		_, b.asked = key(r.GetSession())
	}
	h.mu.Unlock()
	if err := h.pass(ctx, "sleep"); err != nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		if b := h.boxes[r.GetSession().GetSession()]; b != nil && errs.Is(err, errkind.Unsaved) {
			b.running, b.unsaved = "", true
		}
		return nil, err
	}
	defer h.alone(r.GetSession().GetSession())()
	h.mu.Lock()
	_, e := key(r.GetSession())
	b := h.boxes[r.GetSession().GetSession()]
	switch {
	case b != nil && b.epoch == e && b.running == "" && b.manifest != "": // asked again
		defer h.mu.Unlock()
		return &hostv1.SleepReply{Manifest: &corev1.Manifest{Id: b.manifest}}, nil
	case b == nil && r.GetReason() == core.ReasonDrain && r.GetForce():
		h.mu.Unlock()
		return &hostv1.SleepReply{Missing: true}, nil
	case b == nil || b.running != e && (!b.unsaved || b.epoch != e):
		h.mu.Unlock()
		return nil, errs.E("fake sleep", errkind.NotFound, "", "no sandbox of that epoch")
	case b.recalled || (h.busy || h.busyWith[r.GetSession().GetSession()]) && !r.GetForce():
		b.recalled, b.asked = false, ""
		h.mu.Unlock()
		return &hostv1.SleepReply{Busy: true, LastActivity: timestamppb.Now()}, nil
	}
	m := h.newManifest(r.GetParent())
	h.mu.Unlock()
	if _, err := bus.Invoke[*schedulerv1.CommitManifestReply](ctx, h.conn, "scheduler", "commit_manifest",
		&schedulerv1.CommitManifestRequest{Session: r.GetSession(), Manifest: m}); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	b.running, b.unsaved, b.manifest = "", false, m.GetId()
	return &hostv1.SleepReply{Manifest: m}, nil
}

func (h *fakeHost) delete(ctx context.Context, _ bus.Request, r *hostv1.DeleteRequest) (*hostv1.DeleteReply, error) {
	if err := h.pass(ctx, "delete"); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	g, _ := key(r.GetSession())
	if b := h.boxes[r.GetSession().GetSession()]; b != nil && b.generation == g {
		delete(h.boxes, r.GetSession().GetSession())
	}
	return &hostv1.DeleteReply{Removed: !h.stored}, nil
}

func (h *fakeHost) block(method string) (open func()) {
	g := make(chan struct{})
	var once sync.Once
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gate[method] = g
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.gate[method] == g {
			delete(h.gate, method)
		}
		once.Do(func() { close(g) })
	}
}

// swallow keeps the next call of a method for ever, as a process does that is killed.
func (h *fakeHost) swallow(t testing.TB, method string) (taken func()) {
	t.Cleanup(h.block(method))
	return func() {
		t.Helper()
		h.await(t, method)
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.gate, method)
	}
}

func (h *fakeHost) failing(method string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fail[method] = err
}

// keepLease renews until the test ends, or until lease is called.
func (h *fakeHost) keepLease(t testing.TB) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	h.lease = func() { cancel(); <-done }
	t.Cleanup(h.lease)
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			_, _ = bus.Invoke[*schedulerv1.LeaseReply](ctx, h.conn, "scheduler", "lease", &schedulerv1.LeaseRequest{Host: h.id.String(), Boot: h.boot, Load: h.load})
			select {
			case <-ctx.Done():
			case <-time.After(300 * time.Millisecond):
			}
		}
	}()
}

// lost ends the host's renewals and its lease: the leader finds the host lost
// without a wait for the lease to run out.
func (w *world) lost(t testing.TB, h *fakeHost) {
	t.Helper()
	h.lease()
	l := w.led.Load()
	l.leases.expire(h.id)
	l.lose(bustest.Context(t), h.id)
}

// expire has the lease of a host run out now.
func (l *leases) expire(h ids.Host) {
	l.mu.Lock()
	defer l.mu.Unlock()
	cur := l.held[h]
	cur.until = time.Now().Add(-time.Nanosecond)
	l.held[h] = cur
}

func (h *fakeHost) setBusy(b bool) { h.mu.Lock(); defer h.mu.Unlock(); h.busy = b }

func (h *fakeHost) setBusyWith(session string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.busyWith = map[string]bool{session: true}
}

func (h *fakeHost) await(t testing.TB, method string) {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case m := <-h.reached:
			if m == method {
				return
			}
		case <-deadline:
			t.Fatalf("host.%s was not called within %s", method, patience)
		}
	}
}

func (h *fakeHost) join(t testing.TB) *schedulerv1.JoinReply {
	t.Helper()
	r, err := h.tryJoin(t)
	if err != nil {
		t.Fatalf("join: %v", err)
	}
	return r
}

func (h *fakeHost) tryJoin(t testing.TB) (*schedulerv1.JoinReply, error) {
	memory := h.memory
	if memory == 0 {
		memory = 1 << 40
	}
	tiers := h.tiers
	if tiers == nil {
		tiers = []corev1.Tier{corev1.Tier_TIER_NULL}
	}
	return bus.Invoke[*schedulerv1.JoinReply](bustest.Context(t), h.conn, "scheduler", "join", &schedulerv1.JoinRequest{
		Host: h.id.String(), Boot: h.boot, HostKey: "XKEY", Tiers: tiers, Load: h.load,
		Capacity: &corev1.Limits{CpuMillis: 2_000_000, MemoryBytes: memory, Pids: 1 << 20, DiskBytes: 1 << 50}})
}

// withHost is another host on the same bus, with a lease. Rooms is how many
// sessions of an admission have room in its memory; 0: any number.
func (w *world) withHost(t testing.TB, id ids.Host, rooms int) *fakeHost {
	conn := w.host
	if id != testHost {
		conn = bustest.Connect(t, w.bus, subjects.Host(id))
	}
	h := newFakeHostOn(t, w, id, conn, "b1")
	h.memory = uint64(rooms) << 20
	h.join(t)
	h.keepLease(t)
	return h
}
