package hostagent

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// TestComputeRemovedFromOutsideIsNoticed: by an event, and without events by looking.
func TestComputeRemovedFromOutsideIsNoticed(t *testing.T) {
	for _, events := range []bool{true, false} {
		drv := newProcs(t)
		if !events {
			drv.ev = nil
		}
		r := newRig(t, drv)
		if events {
			r.cfg.Poll = time.Hour
		}
		r.start()
		told, err := r.bus.Connect(r.context(), operator())
		must(t, err)
		t.Cleanup(told.Close)
		sub, err := told.NATS().SubscribeSync("berth.v1.session.acme.*.exited")
		must(t, err)
		must(t, told.NATS().Flush())
		one := ref("ann", 5, 6)
		r.mustWake(one, nil)
		c := r.client(one)
		s := c.mustOpen(execOp("x1", "sleep", "60"))
		began := time.Now()
		drv.murder(driver.ID(key("ann"), grant.GenerationOf(one.GetGeneration()), grant.EpochOf(one.GetEpoch())))
		eventually(t, 5*time.Second, "the loss is reported", func() bool { return r.sched.reported() == 1 })
		t.Logf("events %v: reported after %s", events, time.Since(began))
		if _, err := sub.NextMsg(5 * time.Second); err != nil {
			t.Errorf("no event: %v", err)
		}
		if _, err := s.drain(); kindIn(err) != "unavailable" {
			t.Errorf("the exec's stream ended with %v; an exit must not be invented", err)
		}
		eventually(t, 20*time.Second, "the rest is removed", func() bool { return drv.count() == 0 })
		two := ref("ann", 5, 9)
		if reply := r.mustWake(two, resume(r, one)); reply.GetOrigin() != corev1.Origin_ORIGIN_RESUMED {
			t.Errorf("origin %s", reply.GetOrigin())
		}
		r.halt()
	}
}

// TestStartingSandboxCannotBeDestroyed: the fault's name; here it can.
func TestStartingSandboxCannotBeDestroyed(t *testing.T) {
	drv := newProcs(t)
	drv.slow = make(chan struct{})
	r := newRig(t, drv)
	r.start()
	one := ref("ann", 5, 6)
	woke := make(chan error, 1)
	go func() {
		_, err := r.wake(one, nil)
		woke <- err
	}()
	s := r.run.h.session(key("ann"))
	eventually(t, 20*time.Second, "the wake is under way", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.op != nil })
	if err := r.delete(one); err != nil {
		t.Fatalf("delete while waking: %v", err)
	}
	if err := <-woke; err == nil {
		t.Error("the wake went well")
	}
	inv, _ := r.disks.List()
	if drv.count() != 0 || len(inv.Disks) != 0 {
		t.Errorf("left: %d sandboxes, %d disks", drv.count(), len(inv.Disks))
	}
}

// TestNewerEpochSupersedesAWake: a wake that hangs does not block the next one.
func TestNewerEpochSupersedesAWake(t *testing.T) {
	drv := newProcs(t)
	slow := make(chan struct{})
	drv.slow = slow
	r := newRig(t, drv)
	r.start()
	woke := make(chan error, 1)
	go func() {
		_, err := r.wake(ref("ann", 5, 6), nil)
		woke <- err
	}()
	s := r.run.h.session(key("ann"))
	eventually(t, 20*time.Second, "the wake is under way", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.op != nil })
	drv.mu.Lock()
	drv.slow = nil
	drv.mu.Unlock()
	r.mustWake(ref("ann", 5, 7), nil)
	if err := <-woke; err == nil {
		t.Error("the older wake went well")
	}
	r.mustWake(ref("ann", 5, 8), func(w *hostv1.WakeRequest) { w.Fresh, w.LastActiveEpoch = false, ref("ann", 5, 7).GetEpoch() })
	if drv.count() != 1 {
		t.Errorf("%d sandboxes", drv.count())
	}
}

// TestRestartAdoptsLiveSandboxes: hostagent goes and comes; sandboxes, execs and their output stay.
func TestRestartAdoptsLiveSandboxes(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 7, 8)
	r.mustWake(one, nil)
	r.mustWake(two, nil)
	c := r.client(one)
	s := c.mustOpen(execOp("x1", "sh", "-c", "echo before; sleep 2; echo after; exit 9"))
	if f, err := s.recv(5 * time.Second); err != nil || string(f.GetData().GetData()) != "before\n" {
		t.Fatalf("%v %v", f, err)
	}
	for range 3 {
		r.halt()
		r.start()
	}
	if drv.count() != 2 || r.sched.reported() != 0 {
		t.Fatalf("%d sandboxes, %d reports", drv.count(), r.sched.reported())
	}
	if got, err := r.sleep(one, time.Now(), false); err != nil || !got.GetBusy() {
		t.Errorf("sleep while the adopted exec runs: %v %v", got, err)
	}
	o, err := c.mustOpen(attachOp("x1", 7)).drain()
	if err != nil || string(o.stdout) != "after\n" || o.exit.GetCode() != 9 {
		t.Errorf("%q %v %v", o.stdout, o.exit, err)
	}
	if again, err := r.wake(one, nil); err != nil || again.GetOrigin() != corev1.Origin_ORIGIN_CREATED {
		t.Errorf("a repeated wake after the restart: %v %v", again, err)
	}
	if got, err := r.sleep(two, time.Now(), false); err != nil || got.GetBusy() {
		t.Errorf("sleep of an adopted session: %v %v", got, err)
	}
}

// TestRestartReportsWhatIsGone: a sandbox that died while nobody looked.
func TestRestartReportsWhatIsGone(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 7, 8)
	r.mustWake(one, nil)
	r.mustWake(two, nil)
	r.halt()
	id := driver.ID(key("ann"), grant.GenerationOf(one.GetGeneration()), grant.EpochOf(one.GetEpoch()))
	must(t, drv.kill(id))
	r.sched.disown(two)
	r.sched.set(ref("cat", 9, 9), corev1.State_STATE_ACTIVE) // nothing of it is here
	r.start()
	eventually(t, 5*time.Second, "both are reported", func() bool { return r.sched.reported() == 2 })
	eventually(t, 20*time.Second, "what is not owned is removed", func() bool { return drv.count() == 0 })
	inv, _ := r.disks.List()
	if len(inv.Disks) != 2 {
		t.Errorf("%d disks are left, a sweep must keep both", len(inv.Disks))
	}
}

// TestSweepNeedsACompleteAnswer: an unreachable, partial or empty control plane removes nothing.
func TestSweepNeedsACompleteAnswer(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.cfg.Sweep = 100 * time.Millisecond
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	joins := func() (n int) { r.sched.with(func() { n = r.sched.joins }); return n }
	after := func(n int) {
		t.Helper()
		from := joins()
		eventually(t, 10*time.Second, "more joins", func() bool { return joins() >= from+n })
	}
	r.sched.with(func() { r.sched.partial = true; clear(r.sched.owned) })
	after(5)
	r.sched.with(func() { r.sched.mute = true })
	time.Sleep(300 * time.Millisecond)
	r.sched.with(func() { r.sched.mute, r.sched.partial = false, false })
	after(1)
	if drv.count() != 1 {
		t.Fatal("an answer that was partial, missing or empty once removed a sandbox")
	}
	drv.mu.Lock()
	drv.listFails = true
	drv.mu.Unlock()
	after(4)
	drv.mu.Lock()
	drv.listFails = false
	drv.mu.Unlock()
	if drv.count() != 1 {
		t.Fatal("a driver that could not list lost a sandbox")
	}
	// Another session is owned: the answer is positive, and this one is not in it.
	r.sched.set(ref("bob", 7, 8), corev1.State_STATE_ASLEEP)
	eventually(t, 20*time.Second, "what is not owned is removed", func() bool { return drv.count() == 0 })
	eventually(t, 20*time.Second, "its disk is kept, detached", func() bool {
		inv, _ := r.disks.List()
		return len(inv.Disks) == 1 && !inv.Disks[0].Mounted
	})
	r.sched.with(func() { r.sched.erased = append(r.sched.erased, one) })
	eventually(t, 20*time.Second, "an erased disk is removed", func() bool {
		inv, _ := r.disks.List()
		return len(inv.Disks) == 0
	})
}

// TestSleepGoesOnWhereItStopped: fails at the stop, at the commit, and across a restart.
func TestSleepGoesOnWhereItStopped(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	c.exec("x1", "true")
	drv.mu.Lock()
	drv.stopFails = 1
	drv.mu.Unlock()
	if _, err := r.sleep(one, time.Time{}, true); err == nil {
		t.Fatal("a sleep whose stop failed was acknowledged")
	}
	r.sched.set(one, corev1.State_STATE_SLEEPING)
	if _, err := c.open(execOp("x2", "true")); err == nil {
		t.Error("work was admitted to a session that is going to sleep")
	}
	r.sched.with(func() { r.sched.refuse = 1 })
	if _, err := r.sleep(one, time.Time{}, true); !errs.Is(err, errkind.Conflict) {
		t.Fatalf("a sleep whose manifest was not committed gave %v", err)
	}
	r.sched.set(one, corev1.State_STATE_SLEEPING)
	r.halt()
	r.start()
	got, err := r.sleep(one, time.Time{}, true)
	if err != nil || got.GetManifest().GetId() == "" {
		t.Fatalf("%v %v", got, err)
	}
	again, err := r.sleep(one, time.Time{}, true)
	if err != nil || again.GetManifest().GetId() != got.GetManifest().GetId() {
		t.Errorf("a repeated sleep: %v %v", again, err)
	}
	r.mustWake(ref("ann", 5, 9), resume(r, one))
}

// TestLapsedLeaseFences: without a lease nothing begins; with a fresh one it goes on.
func TestLapsedLeaseFences(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.cfg.Margin = 100 * time.Millisecond
	r.sched.lease = 600 * time.Millisecond
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	r.sched.with(func() { r.sched.mute = true })
	eventually(t, 20*time.Second, "openings are refused", func() bool {
		_, err := c.open(execOp("x1", "true"))
		return kindIn(err) == "unavailable"
	})
	if _, err := r.wake(ref("bob", 7, 8), nil); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("a wake without a lease gave %v", err)
	}
	if _, err := r.sleep(one, time.Time{}, true); err == nil {
		t.Error("a sleep without a lease was acknowledged")
	}
	r.sched.set(one, corev1.State_STATE_SLEEPING)
	r.sched.with(func() { r.sched.mute = false })
	eventually(t, 20*time.Second, "the sleep goes on", func() bool {
		_, err := r.sleep(one, time.Time{}, true)
		return err == nil
	})
}

// TestGuestChannelLostIsAttachedAgain: a broken channel costs the streams, not the execs.
func TestGuestChannelLostIsAttachedAgain(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	s := c.mustOpen(execOp("x1", "sh", "-c", "sleep 1; echo still; exit 4"))
	sess := r.run.h.session(key("ann"))
	sess.mu.Lock()
	old := sess.sb
	sess.mu.Unlock()
	_ = old.guest.Close()
	if _, err := s.drain(); kindIn(err) != "unavailable" {
		t.Errorf("the stream ended with %v", err)
	}
	var st *cstream
	eventually(t, 20*time.Second, "the exec can be attached again", func() bool {
		var err error
		st, err = c.open(attachOp("x1", 0))
		return err == nil
	})
	if o, err := st.drain(); err != nil || string(o.stdout) != "still\n" || o.exit.GetCode() != 4 {
		t.Errorf("%q %v %v", o.stdout, o.exit, err)
	}
	if r.sched.reported() != 0 {
		t.Error("it was reported as gone")
	}
}

// TestAnInventoryTellsEverything: what runs and what is stored, for operators.
func TestAnInventoryTellsEverything(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	c.mustOpen(execOp("x1", "sleep", "60"))
	op, err := r.bus.Connect(r.context(), operator())
	must(t, err)
	t.Cleanup(op.Close)
	inv, err := invokeInventory(r, op)
	if err != nil || len(inv.GetSandboxes()) != 1 || len(inv.GetDisks()) != 1 || len(inv.GetStrays()) != 0 {
		t.Fatalf("%v %v", inv, err)
	}
	if sb := inv.GetSandboxes()[0]; sb.GetSession().GetSession() != one.GetSession() || sb.GetExecs() == 0 {
		t.Errorf("%v", sb)
	}
}

// TestADropThatFailsIsStartedAgainAfterAPause: a wake of a newer epoch needs the older compute to be gone, and
// the driver cannot stop it for a while. The host tries again with pauses, and the wake goes well.
func TestADropThatFailsIsStartedAgainAfterAPause(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	one, two := ref("ann", 5, 6), ref("ann", 5, 9)
	r.mustWake(one, nil)
	const plenty = 1 << 30
	drv.mu.Lock()
	drv.stopFails = plenty
	drv.mu.Unlock()
	r.sched.set(two, corev1.State_STATE_WAKING)
	woke := make(chan error, 1)
	go func() { _, err := r.wake(two, resume(r, one)); woke <- err }()
	time.Sleep(time.Second)
	drv.mu.Lock()
	tries := plenty - drv.stopFails
	drv.stopFails = 0
	drv.mu.Unlock()
	if tries < 2 || tries > 20 {
		t.Errorf("%d tries in a second", tries)
	}
	must(t, <-woke)
}
