package hostagent

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// slept makes a session that slept saved in epoch 6 of generation 5, was awake again in epoch 9 without
// writing, and lost its compute. It returns the head.
func (r *rig) slept(drv *procs) (head string) {
	r.t.Helper()
	one, two := ref("ann", 5, 6), ref("ann", 5, 9)
	r.mustWake(one, nil)
	r.client(one).exec("x1", "true")
	r.sched.set(one, corev1.State_STATE_SLEEPING)
	got, err := r.sleep(one, time.Time{}, true)
	must(r.t, err)
	head = got.GetManifest().GetId()
	r.sched.set(two, corev1.State_STATE_WAKING)
	r.mustWake(two, func(w *hostv1.WakeRequest) { w.Fresh, w.Manifest, w.LastActiveEpoch = false, head, one.GetEpoch() })
	drv.murder(driverID(two))
	eventually(r.t, 5*time.Second, "the rest is removed", func() bool { return r.sched.reported() == 1 && drv.count() == 0 })
	return head
}

// TestADiskThatWasNotWrittenToIsSavedAtRest: it was awake, so that scheduler takes it for unsaved. The
// save answers with the head, also in an epoch that was placed in vain.
func TestADiskThatWasNotWrittenToIsSavedAtRest(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	head := r.slept(drv)
	k := disk.Key{Session: key("ann"), Generation: grant.GenerationOf(ref("ann", 5, 9).GetGeneration())}
	if rec, err := r.disks.Get(k); err != nil || rec.State == disk.Blank {
		t.Fatalf("%+v %v", rec, err)
	}
	now := ref("ann", 5, 12)
	r.sched.set(now, corev1.State_STATE_SLEEPING)
	if got, err := r.drain(now); err != nil || got.GetMissing() || got.GetManifest().GetId() != head {
		t.Errorf("%v %v, the head was %s", got, err, head)
	}
}

// TestABlankDiskIsSavedAtRest: the session was awake, never had a stream and was never saved, and lost its
// compute. A drain saves it, also in an epoch that was placed in vain; before, each save answered that there
// was nothing to do and the drain never ended.
func TestABlankDiskIsSavedAtRest(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	one, now := ref("ann", 5, 6), ref("ann", 5, 9)
	r.mustWake(one, nil)
	drv.murder(driverID(one))
	eventually(t, 5*time.Second, "the rest is removed", func() bool { return r.sched.reported() == 1 && drv.count() == 0 })
	k := disk.Key{Session: key("ann"), Generation: grant.GenerationOf(one.GetGeneration())}
	if rec, err := r.disks.Get(k); err != nil || rec.State != disk.Blank {
		t.Fatalf("%+v %v", rec, err)
	}
	r.sched.set(now, corev1.State_STATE_SLEEPING)
	req := &hostv1.SleepRequest{Session: now, Reason: drainReason, Force: true, LastActiveEpoch: one.GetEpoch()}
	got, err := bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", req)
	if err != nil || got.GetMissing() || got.GetManifest().GetId() == "" {
		t.Errorf("%v %v", got, err)
	}
}

// TestASaveOfADiskThatIsNotHereIsToldSo: the pool needed its room. Else a drain would ask for ever. What
// only stops an epoch is not told that.
func TestASaveOfADiskThatIsNotHereIsToldSo(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	r.slept(drv)
	k := disk.Key{Session: key("ann"), Generation: grant.GenerationOf(ref("ann", 5, 9).GetGeneration())}
	must(t, r.disks.Delete(t.Context(), k))
	for _, epoch := range []uint64{9, 12} {
		now := ref("ann", 5, epoch)
		r.sched.set(now, corev1.State_STATE_SLEEPING)
		if got, err := r.drain(now); err != nil || !got.GetMissing() || got.GetManifest() != nil {
			t.Errorf("epoch %d: %v %v", epoch, got, err)
		}
	}
	stop := &hostv1.SleepRequest{Session: ref("ann", 5, 12), Reason: "failed", Force: true}
	if got, err := bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", stop); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("a stop: %v %v", got, err)
	}
}

// TestALateWakeMakesNoDiskOnAHostThatWasForgotten: the session lives on elsewhere, the host said that it
// has nothing of it, and then a wake of an epoch before that arrives.
func TestALateWakeMakesNoDiskOnAHostThatWasForgotten(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.cfg.Sweep = 100 * time.Millisecond
	r.start()
	r.sched.with(func() { r.sched.stale = []*corev1.SessionRef{ref("ann", 5, 20)} })
	eventually(t, 20*time.Second, "it says that it has nothing", func() (told bool) {
		r.sched.with(func() { told = len(r.sched.reports) > 0 && r.sched.reports[0].GetWhat() == "dropped" })
		return told
	})
	if got, err := r.wake(ref("ann", 5, 9), nil); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("the late wake: %v %v", got, err)
	}
	inv, err := r.disks.List()
	must(t, err)
	if len(inv.Disks) != 0 || drv.count() != 0 {
		t.Errorf("%d disks, %d sandboxes", len(inv.Disks), drv.count())
	}
}
