package hostagent

import (
	"math"
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
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

func prepareOf(name ids.SandboxID, most uint32) *hostv1.PrepareRequest {
	return &hostv1.PrepareRequest{Term: 1, Warm: string(name), Terms: terms(), TemplateDigest: "t1", Cap: most, Deadline: timestampIn(time.Minute)}
}

// pool is the rig's stand-in for the pool service.
type pool struct {
	*rig
	conn *bus.Conn
}

func newPool(r *rig) *pool { return &pool{r, bustest.Connect(r.t, r.bus, subjects.Service("pool"))} }

func (p *pool) prepare(req *hostv1.PrepareRequest) (*hostv1.PrepareReply, error) {
	return bus.InvokeHost[*hostv1.PrepareReply](p.context(), p.conn, testHost, "prepare", req)
}

func (p *pool) must(n int) (out []ids.SandboxID) {
	p.t.Helper()
	for range n {
		name := ids.NewWarmID()
		if _, err := p.prepare(prepareOf(name, 1000)); err != nil {
			p.t.Fatalf("prepare: %v", err)
		}
		out = append(out, name)
	}
	return out
}

func (p *pool) retire(term uint64, names ...ids.SandboxID) (*hostv1.RetireReply, error) {
	req := &hostv1.RetireRequest{Term: term, Reason: "test"}
	for _, n := range names {
		req.Warm = append(req.Warm, string(n))
	}
	return bus.InvokeHost[*hostv1.RetireReply](p.context(), p.conn, testHost, "retire", req)
}

func (p *pool) warm() *hostv1.WarmReply {
	p.t.Helper()
	out, err := bus.InvokeHost[*hostv1.WarmReply](p.context(), p.conn, testHost, "warm", &hostv1.WarmRequest{Term: 1})
	if err != nil {
		p.t.Fatalf("warm: %v", err)
	}
	return out
}

func readyRig(t *testing.T) (*rig, *readyProcs, *pool) {
	t.Helper()
	drv := newReadyProcs(t)
	r := newRig(t, drv)
	r.start()
	return r, drv, newPool(r)
}

// nextLife restarts the host; the driver is another process's too.
func (r *rig) nextLife(drv *readyProcs) {
	r.halt()
	drv.set(func() { drv.life++ })
	r.start()
}

// TestTheCapHoldsUnderManyPreparesAndRestarts.
func TestTheCapHoldsUnderManyPreparesAndRestarts(t *testing.T) {
	r, drv, p := readyRig(t)
	const most = 5
	for life := range 3 {
		var wg sync.WaitGroup
		var mu sync.Mutex
		made := 0
		for range 50 {
			wg.Go(func() {
				_, err := p.prepare(prepareOf(ids.NewWarmID(), most))
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					made++
				case !errs.Is(err, errkind.NoCapacity):
					t.Errorf("%v", err)
				}
			})
		}
		wg.Wait()
		if made != most || drv.most > most || drv.count() != most {
			t.Fatalf("life %d: %d were made, at most %d at once, %d are there", life, made, drv.most, drv.count())
		}
		r.nextLife(drv)
		if n := len(p.warm().GetWarm()); n != 0 || drv.count() != 0 {
			t.Fatalf("after a restart %d are told of and %d are there", n, drv.count())
		}
	}
}

// TestAWarmSandboxThatEndedIsNotGivenOut, by its event, its channel, or by looking.
func TestAWarmSandboxThatEndedIsNotGivenOut(t *testing.T) {
	for _, events := range []bool{true, false} {
		drv := newReadyProcs(t)
		if !events {
			drv.ev = nil
		}
		r := newRig(t, drv)
		r.start()
		p := newPool(r)
		name := p.must(1)[0]
		drv.murder(name)
		eventually(t, 20*time.Second, "it is removed", func() bool { return drv.count() == 0 && len(p.warm().GetWarm()) == 0 })
		if reply := r.mustWake(ref("ann", 5, 6), nil); reply.GetWarm() != "" || reply.GetColdReason() == "" {
			t.Errorf("%v", reply)
		}
		r.halt()
	}
}

// TestCommandsOfAnOlderLeaderAreRefused, and counted, also by the next process; and a name is used once.
func TestCommandsOfAnOlderLeaderAreRefused(t *testing.T) {
	r, drv, p := readyRig(t)
	name := p.must(1)[0]
	if _, err := p.prepare(prepareOf(name, 5)); err != nil || drv.count() != 1 {
		t.Errorf("the same prepare again: %v, %d sandboxes", err, drv.count())
	}
	newer := ids.NewWarmID()
	if out, err := p.retire(3, newer); err != nil || len(out.GetGone()) != 1 {
		t.Fatalf("%v %v", out, err)
	}
	for what, act := range map[string]func() error{
		"host.prepare": func() error { _, err := p.prepare(prepareOf(ids.NewWarmID(), 5)); return err },
		"host.retire":  func() error { _, err := p.retire(2, name); return err },
		"host.warm": func() error {
			_, err := bus.InvokeHost[*hostv1.WarmReply](p.context(), p.conn, testHost, "warm", &hostv1.WarmRequest{Term: 2})
			return err
		},
	} {
		r.noted.clear()
		if err := act(); !errs.Is(err, errkind.StaleEpoch) || !r.noted.have("fenced", what) {
			t.Errorf("%s: %v %v", what, err, r.noted.all)
		}
	}
	if drv.count() != 1 {
		t.Errorf("%d sandboxes", drv.count())
	}
	r.nextLife(drv)
	if _, err := p.prepare(prepareOf(ids.NewWarmID(), 5)); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("an older leader after a restart: %v", err)
	}
	var again *hostv1.PrepareRequest
	name, again = ids.NewWarmID(), prepareOf(newer, 5)
	again.Term, again.Warm = 3, string(name)
	if _, err := p.prepare(again); err != nil {
		t.Fatal(err)
	}
	if _, err := p.retire(3, newer); err != nil {
		t.Fatal(err)
	}
	late := prepareOf(newer, 5)
	late.Term = 3
	if _, err := p.prepare(late); !errs.Is(err, errkind.Conflict) {
		t.Errorf("a prepare after its retire: %v", err)
	}
	r.mustWake(ref("ann", 5, 6), nil)
	if out, err := p.retire(3, name, newer); err != nil || len(out.GetGone()) != 1 {
		t.Errorf("a claimed one was retired: %v %v", out, err)
	}
	if drv.count() != 1 {
		t.Errorf("%d sandboxes", drv.count())
	}
}

// TestBadPrepares are refused before anything is made.
func TestBadPrepares(t *testing.T) {
	r, drv, p := readyRig(t)
	for name, change := range map[string]func(*hostv1.PrepareRequest){
		"no term":          func(q *hostv1.PrepareRequest) { q.Term = 0 },
		"no name":          func(q *hostv1.PrepareRequest) { q.Warm = "" },
		"a session's name": func(q *hostv1.PrepareRequest) { q.Warm = string(ids.NewSandboxID()) },
		"a path":           func(q *hostv1.PrepareRequest) { q.Warm = "w/../../../../../etc/passw" },
		"no template":      func(q *hostv1.PrepareRequest) { q.Terms.Template = "" },
		"no tier":          func(q *hostv1.PrepareRequest) { q.Terms.Tier = 0 },
		"another tier":     func(q *hostv1.PrepareRequest) { q.Terms.Tier = corev1.Tier_TIER_GVISOR },
		"no limits":        func(q *hostv1.PrepareRequest) { q.Terms.Limits = nil },
		"no template name": func(q *hostv1.PrepareRequest) { q.Terms.Template = "../" + strings.Repeat("x", 1<<16) },
		"a huge digest":    func(q *hostv1.PrepareRequest) { q.TemplateDigest = strings.Repeat("d", 1<<16) },
		"all the memory":   func(q *hostv1.PrepareRequest) { q.Terms.Limits.MemoryBytes = math.MaxUint64 },
		"no terms":         func(q *hostv1.PrepareRequest) { q.Terms = nil },
		"cap of zero":      func(q *hostv1.PrepareRequest) { q.Cap = 0 },
		"too late":         func(q *hostv1.PrepareRequest) { q.Deadline = timestampIn(-time.Second) },
		"too far ahead":    func(q *hostv1.PrepareRequest) { q.Deadline = timestampIn(24 * time.Hour) },
	} {
		req := prepareOf(ids.NewWarmID(), 5)
		change(req)
		if _, err := p.prepare(req); err == nil || errs.Is(err, errkind.Internal) {
			t.Errorf("%s: %v", name, err)
		}
	}
	eventually(t, 20*time.Second, "nothing is left", func() bool { return drv.count() == 0 && len(r.run.h.keeper.names()) == 0 })
	if n := len(p.warm().GetUses()); n > 1 { // that of the cap of zero
		t.Errorf("%d kinds are remembered", n)
	}
	if _, err := p.retire(1, slices.Repeat([]ids.SandboxID{ids.NewWarmID()}, maxRetire+1)...); !errs.Is(err, errkind.Invalid) {
		t.Errorf("too many to retire: %v", err)
	}
}

// TestATermOfALostControlPlaneIsForgotten: terms begin anew when the bus has lost what it stored. A host
// that held to the highest it ever heard would take no command of a pool again.
func TestATermOfALostControlPlaneIsForgotten(t *testing.T) {
	r, drv, p := readyRig(t)
	if _, err := p.retire(9000, ids.NewWarmID()); err != nil {
		t.Fatal(err)
	}
	pass := func(d time.Duration) {
		k := r.run.h.keeper
		k.mu.Lock()
		defer k.mu.Unlock()
		k.listened = k.listened.Add(-d)
	}
	pass(termKept - time.Minute)
	if _, err := p.prepare(prepareOf(ids.NewWarmID(), 5)); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("while the later leader may lead: %v", err)
	}
	pass(2 * time.Minute)
	p.must(1)
	r.nextLife(drv)
	p.must(1) // the new term is the one that the next process knows
}

// TestWarmSandboxesLeaveMemoryToSessions: they count, and make room.
func TestWarmSandboxesLeaveMemoryToSessions(t *testing.T) {
	drv := newReadyProcs(t)
	r := newRig(t, drv)
	r.cfg.Capacity.MemoryBytes = 4 * 256 << 20
	r.start()
	p := newPool(r)
	p.must(3)
	r.mustWake(ref("cold", 5, 6), func(w *hostv1.WakeRequest) { w.Cold = true })
	if _, err := p.prepare(prepareOf(ids.NewWarmID(), 100)); !errs.Is(err, errkind.NoCapacity) {
		t.Errorf("a prepare without memory for it: %v", err)
	}
	reply := r.mustWake(ref("ann", 5, 6), func(w *hostv1.WakeRequest) { w.Cold = true })
	if reply.GetWarm() != "" || reply.GetColdReason() != share {
		t.Errorf("%v", reply)
	}
	eventually(t, 20*time.Second, "one makes room", func() bool { return len(drv.warm()) == 2 })
	if reply := r.mustWake(ref("bob", 5, 6), nil); reply.GetWarm() == "" || drv.count() != 4 {
		t.Errorf("a claim needs no room: %v, %d sandboxes", reply, drv.count())
	}
}

// TestWhatWaitsIsRetiredWithItsHost: by a drain, a lost lease, and the removal of the host.
func TestWhatWaitsIsRetiredWithItsHost(t *testing.T) {
	t.Run("drain", func(t *testing.T) {
		r, drv, p := readyRig(t)
		one := ref("ann", 5, 6)
		r.mustWake(one, nil)
		p.must(2)
		_, err := bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", &hostv1.SleepRequest{Session: one, Force: true, Reason: drainReason, Parent: r.sched.head(one)})
		must(t, err)
		eventually(t, 20*time.Second, "they are gone", func() bool { return drv.count() == 0 })
		if _, err := p.prepare(prepareOf(ids.NewWarmID(), 5)); !errs.Is(err, errkind.Unavailable) {
			t.Errorf("a prepare on a draining host: %v", err)
		}
	})
	t.Run("lease", func(t *testing.T) {
		drv := newReadyProcs(t)
		r := newRig(t, drv)
		r.clock = &movedClock{}
		r.sched.lease = time.Minute
		r.start()
		p := newPool(r)
		p.must(2)
		r.suspend()
		if _, err := p.prepare(prepareOf(ids.NewWarmID(), 5)); !errs.Is(err, errkind.Unavailable) {
			t.Errorf("a prepare without a lease: %v", err)
		}
		r.resumed(t)
		if n := len(drv.warm()); n != 0 {
			t.Errorf("%d of before the loss", n)
		}
		p.must(1)
	})
	t.Run("removal", func(t *testing.T) {
		r, drv, p := readyRig(t)
		p.must(2)
		must(t, r.run.h.vacate(t.Context()))
		if drv.count() != 0 {
			t.Errorf("%d sandboxes", drv.count())
		}
		if _, err := p.prepare(prepareOf(ids.NewWarmID(), 5)); !errs.Is(err, errkind.Unavailable) {
			t.Errorf("a prepare on a removed host: %v", err)
		}
	})
	t.Run("end in the middle", func(t *testing.T) {
		r, drv, p := readyRig(t)
		drv.set(func() { drv.stall = make(chan struct{}) })
		done := make(chan error, 1)
		go func() { _, err := p.prepare(prepareOf(ids.NewWarmID(), 5)); done <- err }()
		eventually(t, 20*time.Second, "it is begun", func() bool { return len(r.run.h.keeper.names()) == 1 })
		began := time.Now()
		r.halt()
		if took := time.Since(began); took > stopTime/2 {
			t.Errorf("the host ended after %s", took)
		}
		if err := <-done; err == nil {
			t.Error("it was prepared")
		}
		if drv.count() != 0 {
			t.Errorf("%d sandboxes", drv.count())
		}
	})
}

// TestARetireEndsAPreparing, and what it is of is gone when it is answered.
func TestARetireEndsAPreparing(t *testing.T) {
	r, drv, p := readyRig(t)
	drv.set(func() { drv.stall = make(chan struct{}) })
	name := ids.NewWarmID()
	done := make(chan error, 1)
	go func() { _, err := p.prepare(prepareOf(name, 5)); done <- err }()
	eventually(t, 20*time.Second, "it is begun", func() bool { return r.run.h.keeper.has(name) })
	if out, err := p.retire(1, name); err != nil || len(out.GetGone()) != 1 || r.run.h.keeper.has(name) {
		t.Errorf("%v %v", out, err)
	}
	if err := <-done; err == nil {
		t.Error("it was prepared")
	}
	if drv.count() != 0 {
		t.Errorf("%d sandboxes", drv.count())
	}
}

// TestSchedulerHearsOfWarmSandboxesAtOnce: of the first and of the last, not at the next renewal.
func TestSchedulerHearsOfWarmSandboxesAtOnce(t *testing.T) {
	drv := newReadyProcs(t)
	r := newRig(t, drv)
	r.sched.lease = time.Hour
	r.start()
	p := newPool(r)
	told := func() (n uint32, ok bool) {
		r.sched.with(func() { n, ok = r.sched.load.GetWarm()["default/null"] })
		return n, ok
	}
	if _, ok := told(); ok {
		t.Error("a kind without a pool is told of")
	}
	p.must(1)
	eventually(t, 20*time.Second, "the first is told of", func() bool { n, _ := told(); return n == 1 })
	r.mustWake(ref("ann", 5, 6), nil)
	eventually(t, 20*time.Second, "that none is left", func() bool { n, ok := told(); return ok && n == 0 })
}
