package hostagent

import (
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// ends waits for the end of a stream and returns the reason.
func ends(t *testing.T, s *cstream) string {
	t.Helper()
	_, err := s.drain()
	if err == nil {
		t.Fatal("the stream ended well")
	}
	return err.Error()
}

// TestALateRenewalIsNoLease: the answer to a renewal comes when the host has stopped to act. Though it
// grants a lease, nothing begins until the host has compared itself with what it owns, and what it does
// not own is gone by then; a wake that comes meanwhile waits for it.
func TestALateRenewalIsNoLease(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.sched.lease = 1500 * time.Millisecond
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 7, 8)
	r.mustWake(one, nil)
	r.mustWake(two, nil)
	st := r.client(two).mustOpen(execOp("x1", "sleep", "60"))
	slow := make(chan struct{})
	r.sched.with(func() { r.sched.slow = slow })
	eventually(t, 20*time.Second, "the lease runs out", func() bool { return r.run.h.lease.check() != nil })
	r.sched.set(ref("bob", 7, 9), corev1.State_STATE_WAKING) // placed elsewhere
	r.sched.with(func() { r.sched.slow = nil })
	close(slow)
	r.run.h.askRejoin()
	woke := ref("cat", 1, 2)
	eventually(t, 20*time.Second, "a wake waits and goes well", func() bool { _, err := r.wake(woke, nil); return err == nil })
	if drv.count() != 2 {
		t.Errorf("%d sandboxes when the first wake began", drv.count())
	}
	if why := ends(t, st); !strings.Contains(why, "this host lost its lease") {
		t.Errorf("the stream ended with %q", why)
	}
	if _, err := r.client(one).open(execOp("x2", "true")); err != nil {
		t.Errorf("the session that it owns: %v", err)
	}
}

// TestARenewalThatFailedIsTriedAgain at once, and not after another third of the lease: two lost answers
// would cost it.
func TestARenewalThatFailedIsTriedAgain(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	r.sched.with(func() { r.sched.failing, r.sched.renewed = 2, 0 })
	renewed := 0
	eventually(t, 10*time.Second, "two renewals go well", func() bool {
		r.sched.with(func() { renewed = r.sched.renewed })
		return renewed >= 2
	})
	joins := 0
	r.sched.with(func() { joins = r.sched.joins })
	if err := r.run.h.lease.check(); err != nil || joins != 1 {
		t.Errorf("after two renewals that failed: %v; it joined %d times", err, joins)
	}
}

// TestALeaseThatSchedulerDoesNotKnow is lost at once: the host is another boot to it, or was given up.
func TestALeaseThatSchedulerDoesNotKnow(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.sched.lease = 600 * time.Millisecond
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 7, 8)
	r.mustWake(one, nil)
	r.mustWake(two, nil)
	r.sched.disown(two)
	drv.mu.Lock()
	drv.listFails = true // it cannot compare itself
	drv.mu.Unlock()
	r.sched.with(func() { r.sched.unknown = true })
	eventually(t, 20*time.Second, "nothing begins", func() bool { return r.run.h.lease.check() != nil })
	time.Sleep(700 * time.Millisecond)
	if r.run.h.lease.check() == nil {
		t.Fatal("it goes on without knowing what it owns")
	}
	drv.mu.Lock()
	drv.listFails = false
	drv.mu.Unlock()
	eventually(t, 10*time.Second, "it goes on", func() bool { return r.run.h.lease.check() == nil })
	if drv.count() != 1 {
		t.Errorf("%d sandboxes", drv.count())
	}
}

// TestAStartRemovesWhatIsNotOwnedFirst: before anything is taken over or begins.
func TestAStartRemovesWhatIsNotOwnedFirst(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 7, 8)
	r.mustWake(one, nil)
	r.mustWake(two, nil)
	r.halt()
	r.sched.set(ref("bob", 7, 9), corev1.State_STATE_WAKING)
	r.start()
	if drv.count() != 1 {
		t.Errorf("%d sandboxes once it serves", drv.count())
	}
	if r.sched.reported() != 0 {
		t.Errorf("%d reports", r.sched.reported())
	}
	if _, err := r.client(one).open(execOp("x1", "true")); err != nil {
		t.Error(err)
	}
}

// TestAStreamSaysThatItsSessionIsHandedOver.
func TestAStreamSaysThatItsSessionIsHandedOver(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	st := r.client(one).mustOpen(execOp("x1", "sleep", "60"))
	drain := &hostv1.SleepRequest{Session: one, Reason: "drain", IdleSince: timestampIn(0)}
	got, err := bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", drain)
	if err != nil || !got.GetBusy() || got.GetLastActivity() == nil {
		t.Fatalf("a drain of a busy session: %v %v", got, err)
	}
	drain.Force = true // the deadline
	if got, err = bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", drain); err != nil || got.GetManifest().GetId() == "" {
		t.Fatalf("a drain at its deadline: %v %v", got, err)
	}
	if why := ends(t, st); !strings.Contains(why, "handed over: host h1 is draining") {
		t.Errorf("the stream ended with %q", why)
	}
}

// TestASessionComesBackToItsNewestDisk: its host was lost, another was to take it, and the owner returned
// first: what was never saved is there, and it is resumed, not restored.
func TestASessionComesBackToItsNewestDisk(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	c.exec("x1", "true")
	_, err := r.gate(one).Checkpoint(t.Context())
	must(t, err)
	head := r.sched.head(one)
	c.exec("x2", "true") // written after the head
	r.halt()
	must(t, drv.kill(driverID(one)))
	r.sched.set(ref("ann", 5, 9), corev1.State_STATE_WAKING)
	r.start()
	reply := r.mustWake(ref("ann", 5, 9), func(w *hostv1.WakeRequest) {
		w.Fresh, w.Manifest, w.LastActiveEpoch, w.Unsaved = false, head, one.GetEpoch(), true
	})
	if reply.GetOrigin() != corev1.Origin_ORIGIN_RESUMED || reply.GetRestoredAsOf() != nil {
		t.Errorf("%v", reply)
	}
}

// TestADiskAtRestIsSaved: a session that is at rest, with files that are on its host alone, is sealed by
// a sleep of its epoch, or of a later one that was placed in vain; also by a hostagent that was started
// since, that forgot the session, or that was told it does not own it.
func TestADiskAtRestIsSaved(t *testing.T) {
	for _, c := range []struct {
		name  string
		later uint64
		then  func(r *rig, one *corev1.SessionRef)
	}{
		{"lost", 0, func(*rig, *corev1.SessionRef) {}},
		{"restarted", 0, func(r *rig, _ *corev1.SessionRef) { r.halt(); r.start() }},
		{"forgotten", 0, func(r *rig, one *corev1.SessionRef) {
			r.halt()
			r.start()
			h := r.run.h
			must(r.t, h.inv.Remove(key("ann")))
			h.mu.Lock()
			delete(h.sessions, key("ann"))
			h.mu.Unlock()
		}},
		{"placed elsewhere in vain", 9, func(*rig, *corev1.SessionRef) {}},
		{"disowned", 0, func(r *rig, one *corev1.SessionRef) {
			r.sched.disown(one)
			r.sched.set(ref("bob", 1, 1), corev1.State_STATE_ASLEEP)
			own, err := r.run.h.join(r.context())
			must(r.t, err)
			must(r.t, r.run.h.sweep(r.context(), own))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			drv := newProcs(t)
			r := newRig(t, drv)
			r.start()
			one := ref("ann", 5, 6)
			r.mustWake(one, nil)
			r.client(one).exec("x1", "true")
			drv.murder(driverID(one))
			eventually(t, 5*time.Second, "the loss is reported", func() bool { return r.sched.reported() == 1 })
			eventually(t, 20*time.Second, "the rest is removed", func() bool { return drv.count() == 0 })
			c.then(r, one)
			now := one
			if c.later > 0 {
				now = ref("ann", 5, c.later)
			}
			r.sched.set(now, corev1.State_STATE_SLEEPING)
			if c.later > 0 { // what only stops an epoch saves nothing
				stop := &hostv1.SleepRequest{Session: now, Parent: r.sched.head(now), Reason: "failed", Force: true}
				if _, err := bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", stop); !errs.Is(err, errkind.StaleEpoch) {
					t.Fatalf("a stop: %v", err)
				}
			}
			got, err := r.drain(now)
			if err != nil || got.GetManifest().GetId() == "" || r.sched.head(now) != got.GetManifest().GetId() {
				t.Fatalf("%v %v, head %q", got, err, r.sched.head(now))
			}
			rec, err := r.disks.Get(disk.Key{Session: key("ann"), Generation: grant.GenerationOf(one.GetGeneration())})
			if err != nil || rec.State != disk.Clean {
				t.Errorf("%+v %v", rec, err)
			}
			again, err := r.drain(now)
			if err != nil || again.GetManifest().GetId() != got.GetManifest().GetId() {
				t.Errorf("asked again: %v %v", again, err)
			}
			if later, err := r.drain(ref("ann", 5, 99)); err != nil || later.GetManifest().GetId() != got.GetManifest().GetId() {
				t.Errorf("what is saved is the head in a later epoch, too: %v %v", later, err)
			}
		})
	}
}

// drain asks for what is not saved of a session at rest, as scheduler does.
func (r *rig) drain(ref *corev1.SessionRef) (*hostv1.SleepReply, error) {
	return bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep",
		&hostv1.SleepRequest{Session: ref, Parent: r.sched.head(ref), Reason: "drain", Force: true})
}

// TestAStaleDiskIsDropped: the session lives on elsewhere. Scheduler is told; what may be the newest, or
// is in use, stays.
func TestAStaleDiskIsDropped(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.cfg.Sweep = 100 * time.Millisecond
	r.start()
	left, newest, used := ref("ann", 5, 6), ref("bob", 7, 8), ref("cat", 9, 10)
	for _, one := range []*corev1.SessionRef{left, newest, used} {
		r.mustWake(one, nil)
		r.client(one).exec("x1", "true")
	}
	for _, one := range []*corev1.SessionRef{left, newest} {
		drv.murder(driverID(one))
	}
	eventually(t, 20*time.Second, "both ended", func() bool { return r.sched.reported() == 2 && drv.count() == 1 })
	r.sched.disown(left)
	r.sched.with(func() {
		r.sched.stale = []*corev1.SessionRef{ref("ann", 5, 20), newest, ref("cat", 9, 20), ref("dan", 1, 2)}
	})
	dropped := func() (n int) {
		r.sched.with(func() {
			seen := map[string]bool{}
			for _, rep := range r.sched.reports {
				if rep.GetWhat() == "dropped" {
					seen[rep.GetSession().GetSession()] = true
				}
			}
			n = len(seen)
			if seen[newest.GetSession()] || seen[used.GetSession()] {
				t.Error("a disk that stays was told as dropped")
			}
		})
		return n
	}
	eventually(t, 20*time.Second, "the stale one is dropped, and the one that never was is told too", func() bool { return dropped() == 2 })
	inv, err := r.disks.List()
	must(t, err)
	if len(inv.Disks) != 2 {
		t.Errorf("%d disks", len(inv.Disks))
	}
	for _, d := range inv.Disks {
		if d.ID.Session == key("ann") {
			t.Error("the stale disk is there")
		}
	}
}

// TestAHostSaysHowItIs: with each join and renewal.
func TestAHostSaysHowItIs(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.sched.lease = 600 * time.Millisecond
	r.cfg.Poll = 50 * time.Millisecond
	r.start()
	unhealthy := func() (why string) { r.sched.with(func() { why = r.sched.load.GetUnhealthy() }); return why }
	eventually(t, 20*time.Second, "it is well", func() bool { return unhealthy() == "" })
	drv.mu.Lock()
	drv.listFails = true
	drv.mu.Unlock()
	eventually(t, 20*time.Second, "its runtime does not answer", func() bool {
		return unhealthy() == "On this host the runtime of sandboxes does not answer."
	})
	drv.mu.Lock()
	drv.listFails = false
	drv.mu.Unlock()
	eventually(t, 20*time.Second, "it is well again", func() bool { return unhealthy() == "" })
}

func driverID(ref *corev1.SessionRef) ids.SandboxID {
	return driver.ID(ids.SessionKey(ref.GetSession()), grant.GenerationOf(ref.GetGeneration()), grant.EpochOf(ref.GetEpoch()))
}
