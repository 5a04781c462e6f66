package hostagent

import (
	"context"
	"fmt"
	"os"
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
	"github.com/berth-dev/berth/services/hostagent/driver"
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

// TestTwoWakesNeverGetOneSandbox: 20 wakes at once and ten warm ones.
func TestTwoWakesNeverGetOneSandbox(t *testing.T) {
	r, drv, p := readyRig(t)
	names := p.must(10)
	var wg sync.WaitGroup
	var mu sync.Mutex
	of := map[string]int{}
	for i := range 20 {
		wg.Go(func() {
			reply, err := r.wake(ref(fmt.Sprintf("u%d", i), 5, 6), nil)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Errorf("wake: %v", err)
			} else if of[reply.GetWarm()]++; reply.GetWarm() == "" && reply.GetColdReason() == "" {
				t.Error("nobody says why it started cold")
			}
		})
	}
	wg.Wait()
	for _, n := range names {
		if of[string(n)] != 1 {
			t.Errorf("%s was claimed %d times", n, of[string(n)])
		}
	}
	if of[""] != 10 || drv.count() != 20 || len(drv.warm()) != 0 {
		t.Errorf("%d cold ones, %d sandboxes, %d without a session", of[""], drv.count(), len(drv.warm()))
	}
	reply := p.warm()
	if u := reply.GetUses(); len(u) != 1 || u[0].GetClaimed() != 10 || u[0].GetMissed() != 10 || u[0].GetActive() != 20 {
		t.Errorf("%v", u)
	}
}

// TestAClaimedSandboxServesLikeAnother: it runs, is adopted, inventoried, slept and woken again.
func TestAClaimedSandboxServesLikeAnother(t *testing.T) {
	r, drv, p := readyRig(t)
	name := p.must(1)[0]
	one := ref("ann", 5, 6)
	reply := r.mustWake(one, nil)
	if reply.GetWarm() != string(name) || reply.GetColdReason() != "" {
		t.Fatalf("%v", reply)
	}
	var steps []string
	for _, s := range reply.GetTiming().GetSteps() {
		steps = append(steps, s.GetName())
	}
	if got := strings.Join(steps, " "); !strings.Contains(got, "host.claim.bind") {
		t.Errorf("steps: %s", got)
	}
	if o, err := r.client(one).mustOpen(execOp("x1", "sh", "-c", "exit 3")).drain(); err != nil || o.exit.GetCode() != 3 {
		t.Errorf("%v %v", o, err)
	}
	r.nextLife(drv)
	if drv.count() != 1 || r.sched.reported() != 0 {
		t.Fatalf("after a restart: %d sandboxes, %d reports", drv.count(), r.sched.reported())
	}
	op, err := r.bus.Connect(r.context(), operator())
	must(t, err)
	t.Cleanup(op.Close)
	inv, err := invokeInventory(r, op)
	if err != nil || len(inv.GetSandboxes()) != 1 || !inv.GetSandboxes()[0].GetClaimed() || len(inv.GetStrays()) != 0 {
		t.Errorf("%v %v", inv, err)
	}
	must(t, r.run.h.sweepFolders())
	if o, err := r.client(one).mustOpen(execOp("x2", "true")).drain(); err != nil || o.exit.GetCode() != 0 {
		t.Errorf("%v %v", o, err)
	}
	if _, err := r.sleep(one, time.Time{}, true); err != nil || drv.count() != 0 {
		t.Fatalf("%v, %d sandboxes", err, drv.count())
	}
	next := p.must(1)[0]
	two := ref("ann", 5, 9)
	if reply := r.mustWake(two, resume(r, one)); reply.GetWarm() != string(next) {
		t.Errorf("%v", reply)
	}
	must(t, r.delete(two))
	if drv.count() != 0 {
		t.Errorf("%d sandboxes after the delete", drv.count())
	}
}

// TestAClaimThatFailsStartsCold, wherever it fails; nothing of the warm one is left and it never comes back.
func TestAClaimThatFailsStartsCold(t *testing.T) {
	for _, fault := range []string{claimRefused, claimHalf, claimEnter, claimDead, "host.claim.place", "host.claim.bind", "host.claim.guest"} {
		t.Run(fault, func(t *testing.T) {
			r, drv, p := readyRig(t)
			name := p.must(1)[0]
			drv.set(func() { drv.fault = fault })
			r.run.h.steps.Fault = func(step string) error {
				if step == fault {
					return errs.E(step, errkind.Internal, "", "it was asked to fail")
				}
				return nil
			}
			one := ref("ann", 5, 6)
			reply := r.mustWake(one, nil)
			if reply.GetWarm() != "" || !strings.Contains(reply.GetColdReason(), "claim") {
				t.Errorf("%v", reply)
			}
			if o, err := r.client(one).mustOpen(execOp("x1", "sh", "-c", "exit 3")).drain(); err != nil || o.exit.GetCode() != 3 {
				t.Errorf("%v %v", o, err)
			}
			eventually(t, 5*time.Second, "the warm one is gone", func() bool { return drv.count() == 1 && len(p.warm().GetWarm()) == 0 })
			if _, err := p.prepare(prepareOf(name, 5)); !errs.Is(err, errkind.Conflict) {
				t.Errorf("its name was taken again: %v", err)
			}
			if u := p.warm().GetUses()[0]; u.GetClaimed() != 0 || u.GetMissed() != 1 {
				t.Errorf("%v", u)
			}
		})
	}
}

// TestAWakeThatFailsAfterItsClaimLeavesNothing: also not the warm one; one that fails before gives it back.
func TestAWakeThatFailsAfterItsClaimLeavesNothing(t *testing.T) {
	for _, step := range []string{"host.image", "host.disk.attach", "host.claim", "host.place", "host.driver.create", "host.guest.hello"} {
		t.Run(step, func(t *testing.T) {
			r, drv, p := readyRig(t)
			p.must(1)
			r.run.h.steps.Fault = func(at string) error {
				if at == step {
					return errs.E(at, errkind.Internal, "", "it was asked to fail")
				}
				return nil
			}
			one := ref("ann", 5, 6)
			if _, err := r.wake(one, nil); err == nil {
				t.Fatal("it went well")
			}
			untouched := step == "host.image" || step == "host.disk.attach"
			if back := len(drv.warm()) == 1; drv.count() != len(drv.warm()) || back != untouched {
				t.Errorf("%d sandboxes, %d without a session", drv.count(), len(drv.warm()))
			}
			r.run.h.steps.Fault = nil
			if reply := r.mustWake(one, nil); (reply.GetWarm() != "") != untouched {
				t.Errorf("%v", reply)
			}
			if drv.count() != 1 {
				t.Errorf("%d sandboxes", drv.count())
			}
		})
	}
}

// TestAHostThatDiesAnywhereInAClaimGivesTheSessionOneSandbox: after each step the process ends without a
// word; the next one removes what it should, and the same epoch wakes.
func TestAHostThatDiesAnywhereInAClaimGivesTheSessionOneSandbox(t *testing.T) {
	for _, step := range []string{"warm.driver.prepare", "host.image", "host.disk.attach", "host.claim.place", "host.claim.bind", "host.claim.guest", "host.claim", "host.guest.hello"} {
		t.Run(step, func(t *testing.T) {
			r, drv, p := readyRig(t)
			p.must(2)
			h := r.run.h
			h.steps.Crash = true
			h.steps.Fault = func(at string) error {
				if at == step {
					return errs.E(at, errkind.Internal, "", "the process dies here")
				}
				return nil
			}
			one := ref("ann", 5, 6)
			if step == "warm.driver.prepare" {
				drv.set(func() { drv.stopFails = 1 << 20 })
				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				defer cancel()
				if _, err := h.rpcPrepare(ctx, bus.Request{}, prepareOf(ids.NewWarmID(), 1000)); err == nil {
					t.Fatal("it went well")
				}
				h.cancel()
				drv.set(func() { drv.stopFails = 0 })
			} else if _, err := r.wake(one, nil); err == nil {
				t.Fatal("it went well")
			}
			r.nextLife(drv)
			if n := len(drv.warm()); n != 0 {
				t.Errorf("%d warm ones of the process before", n)
			}
			r.mustWake(one, nil)
			eventually(t, 5*time.Second, "one sandbox is left", func() bool { return drv.count() == 1 })
			if o, err := r.client(one).mustOpen(execOp("x1", "sh", "-c", "exit 3")).drain(); err != nil || o.exit.GetCode() != 3 {
				t.Errorf("%v %v", o, err)
			}
			entries, err := os.ReadDir(r.cfg.Dir + "/run")
			if err == nil && len(entries) > 1 {
				t.Errorf("%d run folders", len(entries))
			}
		})
	}
}

// TestAClaimedSandboxIsAdoptedThoughItsWakeWasNotWrittenDown: the process died between its answer and the
// record.
func TestAClaimedSandboxIsAdoptedThoughItsWakeWasNotWrittenDown(t *testing.T) {
	for _, lost := range []string{"the end", "the record"} {
		r, drv, p := readyRig(t)
		name := p.must(1)[0]
		one := ref("ann", 5, 6)
		r.mustWake(one, nil)
		s := r.run.h.session(key("ann"))
		s.mu.Lock()
		rec := s.rec
		s.mu.Unlock()
		if lost == "the record" {
			must(t, r.run.h.inv.Remove(rec.Session))
		} else {
			rec.Phase, rec.Reply = "waking", nil
			rec.Sandbox = string(driver.ID(rec.Session, rec.Generation, rec.Epoch))
			must(t, r.run.h.inv.Put(rec))
		}
		r.nextLife(drv)
		if drv.count() != 1 || r.sched.reported() != 0 {
			t.Fatalf("without %s: %d sandboxes, %d reports", lost, drv.count(), r.sched.reported())
		}
		if o, err := r.client(one).mustOpen(execOp("x1", "sh", "-c", "exit 3")).drain(); err != nil || o.exit.GetCode() != 3 {
			t.Errorf("%v %v", o, err)
		}
		if _, err := r.sleep(one, time.Time{}, true); err != nil || drv.count() != 0 {
			t.Errorf("without %s: %v, %d sandboxes (%s)", lost, err, drv.count(), name)
		}
		r.halt()
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
		eventually(t, 5*time.Second, "it is removed", func() bool { return drv.count() == 0 && len(p.warm().GetWarm()) == 0 })
		if reply := r.mustWake(ref("ann", 5, 6), nil); reply.GetWarm() != "" || reply.GetColdReason() == "" {
			t.Errorf("%v", reply)
		}
		r.halt()
	}
}

// TestCommandsOfAnOlderLeaderAreRefused, and counted; and a name is used once.
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
	eventually(t, 5*time.Second, "nothing is left", func() bool { return drv.count() == 0 && len(r.run.h.keeper.names()) == 0 })
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
	eventually(t, 5*time.Second, "one makes room", func() bool { return len(drv.warm()) == 2 })
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
		eventually(t, 5*time.Second, "they are gone", func() bool { return drv.count() == 0 })
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
		eventually(t, 5*time.Second, "it is begun", func() bool { return len(r.run.h.keeper.names()) == 1 })
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
	eventually(t, 5*time.Second, "it is begun", func() bool { return r.run.h.keeper.has(name) })
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
	eventually(t, 5*time.Second, "the first is told of", func() bool { n, _ := told(); return n == 1 })
	r.mustWake(ref("ann", 5, 6), nil)
	eventually(t, 5*time.Second, "that none is left", func() bool { n, ok := told(); return ok && n == 0 })
}

// movedImages is a store whose names stand for other digests later.
type movedImages struct {
	images
	mu  sync.Mutex
	now string
}

func (m *movedImages) Ensure(context.Context, string) (driver.Image, error) {
	return driver.Image{Digest: m.Resolved("")}, nil
}
func (m *movedImages) Get(digest string) (driver.Image, error) {
	return driver.Image{Digest: digest}, nil
}
func (m *movedImages) Known() []string { return nil }
func (m *movedImages) Resolved(string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now
}

// TestASessionGetsAWarmSandboxOfItsOwnImageOnly: also once the template has another.
func TestASessionGetsAWarmSandboxOfItsOwnImageOnly(t *testing.T) {
	drv := newReadyProcs(t)
	r := newRig(t, drv)
	img := &movedImages{now: "sha256:old"}
	r.tune = func(h *host) { h.images = img }
	r.start()
	p := newPool(r)
	old := p.must(2)
	img.mu.Lock()
	img.now = "sha256:new"
	img.mu.Unlock()
	for _, w := range p.warm().GetWarm() {
		if w.GetStale() == "" || w.GetImageDigest() != "sha256:old" {
			t.Errorf("%v", w)
		}
	}
	if reply := r.mustWake(ref("new", 5, 6), nil); reply.GetWarm() != "" || !strings.Contains(reply.GetColdReason(), "image") {
		t.Errorf("%v", reply)
	}
	fresh := p.must(1)[0]
	if reply := r.mustWake(ref("two", 5, 6), nil); reply.GetWarm() != string(fresh) {
		t.Errorf("%v", reply)
	}
	pinned := func(w *hostv1.WakeRequest) { w.ImageDigest = "sha256:old" }
	if reply := r.mustWake(ref("old", 5, 6), pinned); reply.GetWarm() != string(old[0]) {
		t.Errorf("not the oldest: %v", reply)
	}
	other := func(w *hostv1.WakeRequest) { w.ImageDigest = "sha256:old"; w.Terms.Limits.Pids = 64 }
	if reply := r.mustWake(ref("fit", 5, 6), other); reply.GetWarm() != "" || !strings.Contains(reply.GetColdReason(), "limits") {
		t.Errorf("one that does not fit: %v", reply)
	}
}
