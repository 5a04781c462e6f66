package scheduler

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// fakePool is a pool in memory on the real subjects.
type fakePool struct {
	mu      sync.Mutex
	asked   []*poolv1.ReserveRequest
	settled chan *poolv1.SettleRequest
	// answer is its word on one request; without one it reserves on the first host.
	answer func(*poolv1.ReserveRequest) (*poolv1.ReserveReply, error)
	mute   bool          // it answers nobody
	probed chan struct{} // a look whether it still answers
}

// patient has a placement wait for the pool's answer for as long as a busy machine may take.
func patient(c *Config) {
	c.pool = poolTimes{soon: 10 * time.Second, most: 10 * time.Second, look: 10 * time.Second}
}

func newFakePool(t testing.TB, w *world) *fakePool {
	p := &fakePool{settled: make(chan *poolv1.SettleRequest, 64), probed: make(chan struct{}, 64)}
	svc, err := bustest.Connect(t, w.bus, subjects.Service("pool")).Serve(bustest.Context(t), bus.ServiceConfig{Name: "pool"})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{bus.Handle(svc, "reserve", p.reserve), bus.Handle(svc, "settle", p.settle)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p *fakePool) reserve(ctx context.Context, _ bus.Request, r *poolv1.ReserveRequest) (*poolv1.ReserveReply, error) {
	p.mu.Lock()
	mute, answer := p.mute, p.answer
	if r.GetSession() != "" {
		p.asked = append(p.asked, r)
	}
	n := len(p.asked)
	p.mu.Unlock()
	switch {
	case mute:
		<-ctx.Done()
		return nil, ctx.Err()
	case r.GetSession() == "":
		p.probed <- struct{}{}
		return nil, errs.E("fake reserve", errkind.Invalid, "", "it names no session")
	case answer != nil:
		return answer(r)
	}
	return &poolv1.ReserveReply{Verdict: poolv1.Verdict_VERDICT_RESERVED, Reservation: fmt.Sprint("p", n), Host: r.GetHosts()[0]}, nil
}

// settle finds the pool by template and tier, as the real one does.
func (p *fakePool) settle(_ context.Context, _ bus.Request, r *poolv1.SettleRequest) (*poolv1.SettleReply, error) {
	if r.GetTemplate() == "default" && r.GetTier() == corev1.Tier_TIER_NULL {
		p.settled <- r
	}
	return &poolv1.SettleReply{}, nil
}

func (p *fakePool) requests() []*poolv1.ReserveRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}

func (p *fakePool) next(t testing.TB) *poolv1.SettleRequest {
	t.Helper()
	select {
	case r := <-p.settled:
		return r
	case <-time.After(patience):
		t.Fatalf("the pool was not told within %s", patience)
		return nil
	}
}

// pooled are hosts that tell of a pool of the template of an admission.
func (w *world) pooled(t testing.TB, ids ...subjects.Caller) (out []*fakeHost) {
	for _, c := range ids {
		conn := w.host
		if c.Host != testHost {
			conn = bustest.Connect(t, w.bus, c)
		}
		h := newFakeHostOn(t, w, c.Host, conn, "b1")
		h.load = &schedulerv1.HostLoad{Warm: map[string]uint32{"default/null": 0}}
		h.join(t)
		h.keepLease(t)
		out = append(out, h)
	}
	return out
}

// TestReservationReachesTheHost: the host that the pool names gets the session,
// with the reservation, and the pool is told what was claimed.
func TestReservationReachesTheHost(t *testing.T) {
	w := newWorld(t, patient)
	p := newFakePool(t, w)
	hosts := w.pooled(t, subjects.Host(testHost), subjects.Host("h2"))
	p.answer = func(r *poolv1.ReserveRequest) (*poolv1.ReserveReply, error) {
		return &poolv1.ReserveReply{Verdict: poolv1.Verdict_VERDICT_RESERVED, Reservation: "p1", Host: r.GetHosts()[1]}, nil
	}
	rep := must[*schedulerv1.WakeReply](t)(w.open(1, "r1"))
	asked := p.requests()
	if len(asked) != 1 || asked[0].GetTemplate() != "default" || asked[0].GetTier() != corev1.Tier_TIER_NULL || len(asked[0].GetHosts()) != 2 {
		t.Fatalf("the pool was asked %v", asked)
	}
	if rep.GetHost() != asked[0].GetHosts()[1] {
		t.Errorf("it woke on %s, reserved was %s", rep.GetHost(), asked[0].GetHosts()[1])
	}
	on := hosts[slices.IndexFunc(hosts, func(h *fakeHost) bool { return h.id.String() == rep.GetHost() })]
	if on.asked.GetReservation() != "p1" || on.asked.GetCold() {
		t.Errorf("the host was asked %v", on.asked)
	}
	if s := p.next(t); s.GetReservation() != "p1" || s.GetWarm() != "warm-of-p1" || s.GetFailed() || s.GetHost() != rep.GetHost() {
		t.Errorf("the pool was told %v", s)
	}
	if steps := rep.GetTiming().GetSteps(); steps[0].GetName() != "scheduler.reserve" {
		t.Errorf("steps: %v", steps)
	}
	// An active session, and a request that was answered, ask for nothing.
	must[*schedulerv1.WakeReply](t)(w.open(1, "r2"))
	must[*schedulerv1.WakeReply](t)(w.open(1, "r1"))
	if n := len(p.requests()); n != 1 {
		t.Errorf("the pool was asked %d times", n)
	}
}

// TestWarmNeverMovesADisk: a session whose disk is on a host asks for a warm
// sandbox there alone.
func TestWarmNeverMovesADisk(t *testing.T) {
	w := newWorld(t, patient)
	p := newFakePool(t, w)
	w.pooled(t, subjects.Host(testHost), subjects.Host("h2"))
	rep := must[*schedulerv1.WakeReply](t)(w.open(1, "r1"))
	must[*schedulerv1.SleepReply](t)(w.close(1, "c1"))
	must[*schedulerv1.WakeReply](t)(w.open(1, "r2"))
	asked := p.requests()
	if len(asked) != 2 || !slices.Equal(asked[1].GetHosts(), []string{rep.GetHost()}) {
		t.Errorf("the pool was asked %v; the disk is on %s", asked, rep.GetHost())
	}
}

// TestMutePoolDelaysNobody: opens go on without a pool that takes requests and
// answers none, and it is left alone for a while.
func TestMutePoolDelaysNobody(t *testing.T) {
	var l *leader
	w := newWorld(t, func(c *Config) { c.onLead = func(now *leader) { l = now } })
	p := newFakePool(t, w)
	p.mute = true
	h := w.pooled(t, subjects.Host(testHost))[0]
	must[*schedulerv1.WakeReply](t)(w.open(1, "r1"))
	if h.asked.GetReservation() != "" || h.asked.GetCold() {
		t.Errorf("the host was asked %v", h.asked)
	}
	// The open may be over before the pool has its request.
	w.until("the pool was asked", func() bool { return len(p.requests()) > 0 })
	l.pools.mu.Lock()
	rest := l.pools.rest
	l.pools.mu.Unlock()
	if rest.IsZero() || len(p.requests()) != 1 {
		t.Errorf("it rests until %s after %d requests", rest, len(p.requests()))
	}
}

// TestNoPoolServesAtAll: likewise when nobody serves the pool's methods.
func TestNoPoolServesAtAll(t *testing.T) {
	w := newWorld(t, nil)
	w.pooled(t, subjects.Host(testHost))
	for n := range 3 {
		must[*schedulerv1.WakeReply](t)(w.open(n, "r1"))
	}
}

// TestPoolThatWaitsIsWaitedFor: a pool that has a sandbox made, and says that
// it is there meanwhile, is given its time.
func TestPoolThatWaitsIsWaitedFor(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.pool = poolTimes{soon: 2 * time.Second, most: time.Minute, look: time.Second} })
	p := newFakePool(t, w)
	h := w.pooled(t, subjects.Host(testHost))[0]
	p.answer = func(r *poolv1.ReserveRequest) (*poolv1.ReserveReply, error) {
		for range 2 { // what is tested is that this is waited for
			select {
			case <-p.probed:
			case <-time.After(patience):
				t.Error("nobody makes sure that the pool still answers")
			}
		}
		return &poolv1.ReserveReply{Verdict: poolv1.Verdict_VERDICT_RESERVED, Reservation: "p1", Host: r.GetHosts()[0]}, nil
	}
	a := admission(1, "r1")
	a.Deadline = timestamppb.New(time.Now().Add(time.Minute)) // a quarter of it is for the pool
	must[*schedulerv1.WakeReply](t)(w.openWith(a))
	if h.asked.GetReservation() != "p1" {
		t.Errorf("the host was asked %v", h.asked)
	}
}

// TestOverShareStartsCold, and why is told to who asks.
func TestOverShareStartsCold(t *testing.T) {
	w := newWorld(t, patient)
	p := newFakePool(t, w)
	h := w.pooled(t, subjects.Host(testHost))[0]
	h.coldReason = "its tenant has had its share"
	p.answer = func(*poolv1.ReserveRequest) (*poolv1.ReserveReply, error) {
		return &poolv1.ReserveReply{Verdict: poolv1.Verdict_VERDICT_OVER_SHARE}, nil
	}
	must[*schedulerv1.WakeReply](t)(w.open(1, "r1"))
	if !h.asked.GetCold() || h.asked.GetReservation() != "" {
		t.Errorf("the host was asked %v", h.asked)
	}
	if s := p.next(t); s.GetWarm() != "" || s.GetFailed() {
		t.Errorf("the pool was told %v", s)
	}
	var names []string
	for _, s := range w.show(1).GetLastWake().GetSteps() {
		names = append(names, s.GetName())
	}
	if !slices.Contains(names, "host.cold (its tenant has had its share)") {
		t.Errorf("steps of the wake: %v", names)
	}
}

// TestNoRoomAsksNoPool: a session for which there is no room keeps no warm
// sandbox from others.
func TestNoRoomAsksNoPool(t *testing.T) {
	w := newWorld(t, patient)
	p := newFakePool(t, w)
	w.pooled(t, subjects.Host(testHost))
	a := admission(1, "r1")
	a.Terms.Limits.MemoryBytes = 1 << 50
	a.Deadline.Seconds = time.Now().Add(time.Second).Unix()
	if _, err := w.openWith(a); err == nil {
		t.Error("it was placed")
	}
	if n := len(p.requests()); n != 0 {
		t.Errorf("the pool was asked %d times", n)
	}
}

// TestUnusedReservationIsGivenBack: of two opens of one session at once, one
// is placed; the other's reservation is free at once.
func TestUnusedReservationIsGivenBack(t *testing.T) {
	w := newWorld(t, patient)
	p := newFakePool(t, w)
	w.pooled(t, subjects.Host(testHost))
	var begun atomic.Bool
	p.answer = func(r *poolv1.ReserveRequest) (*poolv1.ReserveReply, error) {
		name := "later"
		if !begun.Swap(true) {
			name = "first"
			if _, err := w.open(1, "r2"); err != nil {
				t.Error(err)
			}
		}
		return &poolv1.ReserveReply{Verdict: poolv1.Verdict_VERDICT_RESERVED, Reservation: name, Host: r.GetHosts()[0]}, nil
	}
	must[*schedulerv1.WakeReply](t)(w.open(1, "r1"))
	for range 2 {
		switch s := p.next(t); s.GetReservation() {
		case "later":
			if s.GetFailed() || s.GetWarm() != "warm-of-later" {
				t.Errorf("the pool was told %v", s)
			}
		case "first":
			if !s.GetFailed() || s.GetHost() != "" {
				t.Errorf("the pool was told %v", s)
			}
		}
	}
}

// TestEveryAttemptHasItsReservation: a wake that failed is placed anew under a
// reservation of its own, and the pool is told of both.
func TestEveryAttemptHasItsReservation(t *testing.T) {
	w := newWorld(t, patient)
	p := newFakePool(t, w)
	h := w.pooled(t, subjects.Host(testHost))[0]
	h.failing("wake", errs.E("fake wake", errkind.Internal, "", "the runtime broke"))
	done := make(chan error, 1)
	go func() {
		_, err := w.open(1, "r1")
		done <- err
	}()
	if s := p.next(t); s.GetReservation() != "p1" || !s.GetFailed() || s.GetHost() != testHost.String() {
		t.Errorf("the pool was told %v", s)
	}
	h.failing("wake", nil)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	asked := p.requests()
	for i, r := range asked {
		if !strings.HasPrefix(r.GetAttempt(), fmt.Sprintf("r1-%d-", i+1)) || slices.ContainsFunc(asked[:i], func(o *poolv1.ReserveRequest) bool { return o.GetAttempt() == r.GetAttempt() }) {
			t.Errorf("attempt %d is called %s", i+1, r.GetAttempt())
		}
	}
	if last := fmt.Sprint("p", len(asked)); len(asked) < 2 || h.asked.GetReservation() != last {
		t.Errorf("asked %d times, the host was told %s", len(asked), h.asked.GetReservation())
	}
}

// TestReservationOutlivesTheLeader: the next leader has the host claim what the
// placement was committed with.
func TestReservationOutlivesTheLeader(t *testing.T) {
	w := newWorld(t, patient)
	newFakePool(t, w)
	h := w.pooled(t, subjects.Host(testHost))[0]
	taken := h.swallow(t, "wake")
	go func() { _, _ = w.open(1, "r1") }()
	taken()
	w.restart()
	w.become(1, corev1.State_STATE_ACTIVE)
	if h.asked.GetReservation() != "p1" {
		t.Errorf("the host was asked %v", h.asked)
	}
}
