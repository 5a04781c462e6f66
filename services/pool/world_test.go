package pool

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

const patience = 30 * time.Second

// world is a bus with hosts that keep what they were told in memory, a scheduler that lists them, and
// as many instances of the service as a test starts.
type world struct {
	// events of pools, and the names of those that were read.
	events jetstream.Consumer
	heard  []string

	t     testing.TB
	bus   *bus.Embedded
	op    *bus.Conn
	sched *bus.Conn
	cfg   Config

	mu    sync.Mutex
	hosts map[string]*fakeHost
	total map[string]int // what exists that nobody has claimed, by template
	peak  map[string]int // the most that it ever was
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newWorld(t testing.TB, hosts ...string) *world {
	w := &world{t: t, hosts: map[string]*fakeHost{}, total: map[string]int{}, peak: map[string]int{}, cfg: NewConfig()}
	var callers []subjects.Caller
	for _, h := range hosts {
		callers = append(callers, subjects.Host(ids.Host(h)))
	}
	w.bus = bustest.Start(t, callers...)
	w.op = bustest.Connect(t, w.bus, subjects.Operator())
	w.sched = bustest.Connect(t, w.bus, subjects.Service("scheduler"))
	w.cfg.Lease, w.cfg.RenewEvery, w.cfg.HostsEvery, w.cfg.WarmEvery = 600*time.Millisecond, 50*time.Millisecond, 100*time.Millisecond, 50*time.Millisecond
	w.cfg.WarmTimeout = 300 * time.Millisecond
	limits := Limits{CPUMillis: 100, MemoryBytes: 64 << 20, Pids: 64, DiskBytes: 1 << 30}
	w.cfg.Templates = map[string]Template{"default": {Image: "default", Tier: "null", Limits: limits}, "other": {Image: "default", Tier: "null", Limits: limits}}
	svc, err := w.sched.Serve(t.Context(), bus.ServiceConfig{Name: "scheduler"})
	must(t, err)
	must(t, bus.Handle(svc, "hosts", w.list))
	for _, h := range hosts {
		w.hosts[h] = newFakeHost(w, h)
	}
	return w
}

func (w *world) list(context.Context, bus.Request, *schedulerv1.HostsRequest) (*schedulerv1.HostsReply, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := &schedulerv1.HostsReply{}
	for name := range w.hosts {
		out.Hosts = append(out.Hosts, &schedulerv1.HostRecord{Host: name, Boot: "b", Alive: true, Tiers: []corev1.Tier{corev1.Tier_TIER_NULL},
			Capacity: &corev1.Limits{CpuMillis: 1 << 20, MemoryBytes: 1 << 40, Pids: 1 << 20, DiskBytes: 1 << 50}})
	}
	return out, nil
}

// fakeHost does what a host promises: it refuses earlier terms, and keeps to the cap.
type fakeHost struct {
	w    *world
	name string

	mu      sync.Mutex
	term    uint64
	warm    map[string]*hostv1.WarmSandbox
	used    map[string]bool
	hangs   bool          // prepare is never answered
	slow    time.Duration // of prepare
	fails   error         // of prepare
	keeps   error         // of retire
	told    int           // to retire
	asked   int           // preparations
	retired int
	claims  uint64
	begun   uint64 // term of the latest preparation that began
	stale   int    // requests of earlier terms
}

func newFakeHost(w *world, name string) *fakeHost {
	h := &fakeHost{w: w, name: name, warm: map[string]*hostv1.WarmSandbox{}, used: map[string]bool{}}
	conn := bustest.Connect(w.t, w.bus, subjects.Host(ids.Host(name)))
	svc, err := conn.Serve(w.t.Context(), bus.ServiceConfig{Name: "host"})
	must(w.t, err)
	must(w.t, bus.Handle(svc, "prepare", h.prepare))
	must(w.t, bus.Handle(svc, "retire", h.retire))
	must(w.t, bus.Handle(svc, "warm", h.list))
	return h
}

func (h *fakeHost) hears(term uint64) error {
	if term < h.term {
		h.stale++
		return errs.Errorf("", errkind.StaleEpoch, "term %d is over: %d leads", term, h.term)
	}
	h.term = term
	return nil
}

func (h *fakeHost) prepare(ctx context.Context, _ bus.Request, r *hostv1.PrepareRequest) (*hostv1.PrepareReply, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asked++
	if err := h.hears(r.GetTerm()); err != nil {
		return nil, err
	}
	if h.fails != nil {
		return nil, h.fails
	}
	if w := h.warm[r.GetWarm()]; w != nil {
		return &hostv1.PrepareReply{Warm: w}, nil
	}
	if h.used[r.GetWarm()] || time.Now().After(r.GetDeadline().AsTime()) {
		return nil, errs.E("", errkind.Expired, "", "it is too late for this one")
	}
	if n := h.count(r.GetTerms().GetTemplate()); n >= int(r.GetCap()) {
		return nil, errs.Errorf("", errkind.Exhausted, "there are %d, and the cap is %d", n, r.GetCap())
	}
	s := &hostv1.WarmSandbox{Warm: r.GetWarm(), Template: r.GetTerms().GetTemplate(), Tier: r.GetTerms().GetTier(), TemplateDigest: r.GetTemplateDigest(),
		State: hostv1.WarmState_WARM_STATE_PREPARING, MadeAt: timestamppb.Now(), MemoryBytes: 1 << 20}
	h.warm[s.Warm], h.used[s.Warm], h.begun = s, true, r.GetTerm()
	h.w.add(s.Template, 1)
	if h.hangs {
		h.mu.Unlock()
		<-ctx.Done()
		h.mu.Lock()
		return nil, ctx.Err()
	}
	h.mu.Unlock()
	time.Sleep(h.slow)
	h.mu.Lock()
	if h.warm[s.Warm] != s {
		return nil, errs.E("", errkind.Canceled, "", "it was retired meanwhile")
	}
	done := &hostv1.WarmSandbox{Warm: s.Warm, Template: s.Template, Tier: s.Tier, TemplateDigest: s.TemplateDigest,
		State: hostv1.WarmState_WARM_STATE_READY, MadeAt: s.MadeAt, MemoryBytes: s.MemoryBytes}
	h.warm[s.Warm] = done
	return &hostv1.PrepareReply{Warm: done}, nil
}

// count is how many of a template there are; the lock is held.
func (h *fakeHost) count(template string) (n int) {
	for _, s := range h.warm {
		if s.GetTemplate() == template {
			n++
		}
	}
	return n
}

func (h *fakeHost) retire(_ context.Context, _ bus.Request, r *hostv1.RetireRequest) (*hostv1.RetireReply, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.hears(r.GetTerm()); err != nil {
		return nil, err
	}
	if h.told++; h.keeps != nil {
		return nil, h.keeps
	}
	for _, id := range r.GetWarm() {
		if s := h.warm[id]; s != nil {
			h.retired++
			h.w.add(s.GetTemplate(), -1)
		}
		delete(h.warm, id)
	}
	return &hostv1.RetireReply{Gone: r.GetWarm()}, nil
}

func (h *fakeHost) list(_ context.Context, _ bus.Request, r *hostv1.WarmRequest) (*hostv1.WarmReply, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.hears(r.GetTerm()); err != nil {
		return nil, err
	}
	out := &hostv1.WarmReply{Boot: "b", Uses: []*hostv1.PoolUse{{Template: "default", Tier: corev1.Tier_TIER_NULL, Claimed: h.claims}}}
	for _, s := range h.warm {
		out.Warm = append(out.Warm, s)
	}
	return out, nil
}

// claim takes one that is ready, as a wake does.
func (h *fakeHost) claim() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, s := range h.warm {
		if s.GetState() == hostv1.WarmState_WARM_STATE_READY {
			delete(h.warm, id)
			h.w.add(s.GetTemplate(), -1)
			h.claims++
			return id
		}
	}
	return ""
}

func (h *fakeHost) ready() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.warm {
		if s.GetState() == hostv1.WarmState_WARM_STATE_READY {
			n++
		}
	}
	return n
}

func (h *fakeHost) set(change func(*fakeHost)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(h)
}

// add counts what exists on all hosts. The lock of the host is held.
func (w *world) add(template string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.total[template] += n
	w.peak[template] = max(w.peak[template], w.total[template])
}

func (w *world) most(template string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.peak[template]
}

func (w *world) ready() (n int) {
	for _, h := range w.hosts {
		n += h.ready()
	}
	return n
}

// instance is one process of the service.
type instance struct {
	conn *bus.Conn
	kv   *flakyKV
	stop func() // in order
	kill func() // as if the process had died
}

// start starts an instance.
func (w *world) start() *instance {
	w.t.Helper()
	conn, err := w.bus.Connect(bustest.Context(w.t), subjects.Service("pool"))
	must(w.t, err)
	bucket, err := conn.OpenBucket(bustest.Context(w.t), bucketName)
	must(w.t, err)
	i := &instance{conn: conn, kv: &flakyKV{kv: bucket}}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	s := &server{cfg: w.cfg, conn: conn, log: bustest.Log(w.t)}
	s.file, err = w.cfg.declared()
	must(w.t, err)
	go func() { done <- s.run(ctx, i.kv, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		w.t.Fatalf("pool ended: %v", err)
	}
	var once sync.Once
	i.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Errorf("pool ended: %v", err)
			}
			conn.Close()
		})
	}
	i.kill = func() {
		once.Do(func() {
			conn.Close()
			cancel()
			<-done
		})
	}
	w.t.Cleanup(i.stop)
	return i
}

// flakyKV is a bucket that can be away, or lose its answers.
type flakyKV struct {
	kv
	mu    sync.Mutex
	away  bool
	loses bool      // writes happen, and nobody hears of it
	seat  time.Time // when the leader's key was written last
}

func (f *flakyKV) set(away, loses bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.away, f.loses = away, loses
}

var errAway = errs.E("", errkind.Unavailable, "", errors.New("the store is away"))

func (f *flakyKV) state() (away, loses bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.away, f.loses
}

func (f *flakyKV) sat(key string, err error) {
	if key == leaderKey && err == nil {
		f.mu.Lock()
		f.seat = time.Now()
		f.mu.Unlock()
	}
}

// leads reports whether f renewed later than g.
func (f *flakyKV) leads(g *flakyKV) bool {
	f.mu.Lock()
	at := f.seat
	f.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	return at.After(g.seat)
}

func (f *flakyKV) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	if away, _ := f.state(); away {
		return nil, 0, errAway
	}
	return f.kv.Get(ctx, key)
}

func (f *flakyKV) Create(ctx context.Context, key string, value []byte) (uint64, error) {
	away, loses := f.state()
	if away {
		return 0, errAway
	}
	rev, err := f.kv.Create(ctx, key, value)
	f.sat(key, err)
	if loses {
		return 0, errAway
	}
	return rev, err
}

func (f *flakyKV) Update(ctx context.Context, key string, value []byte, last uint64) (uint64, error) {
	away, loses := f.state()
	if away {
		return 0, errAway
	}
	rev, err := f.kv.Update(ctx, key, value, last)
	f.sat(key, err)
	if loses {
		return 0, errAway
	}
	return rev, err
}

// apply declares pools by a file.
func (w *world) apply(file string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := bus.Invoke[*poolv1.ApplyReply](ctx, w.op, "pool", "apply", &poolv1.ApplyRequest{File: []byte(file)})
	return err
}

func (w *world) show(template string) *poolv1.Status {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	reply, err := bus.Invoke[*poolv1.ShowReply](ctx, w.op, "pool", "show", &poolv1.ShowRequest{Template: template})
	must(w.t, err)
	return reply.GetPools()[0]
}

var attempts struct {
	sync.Mutex
	n int
}

func (w *world) reserve(tenant string) (*poolv1.ReserveReply, error) {
	attempts.Lock()
	attempts.n++
	n := attempts.n
	attempts.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var hosts []string
	for name := range w.hosts {
		hosts = append(hosts, name)
	}
	return bus.Invoke[*poolv1.ReserveReply](ctx, w.sched, "pool", "reserve", &poolv1.ReserveRequest{Tenant: tenant, Session: "s1", Attempt: fmt.Sprint(n),
		Template: "default", Tier: corev1.Tier_TIER_NULL, Hosts: hosts})
}

// until waits for something to become true.
func (w *world) until(what string, is func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			reply, err := bus.Invoke[*poolv1.ShowReply](ctx, w.op, "pool", "show", &poolv1.ShowRequest{})
			cancel()
			w.t.Fatalf("%s: not within %s; pools stand so: %v %v", what, patience, reply, err)
		}
	}
}
