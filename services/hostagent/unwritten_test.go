package hostagent

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
)

// unwritten makes the record of a session that is awake what it was during its wake.
func (r *rig) unwritten(one *corev1.SessionRef) inventory.Record {
	r.t.Helper()
	s := r.run.h.session(ids.SessionKey(one.GetSession()))
	s.mu.Lock()
	rec := s.rec
	s.mu.Unlock()
	rec.Phase, rec.Reply, rec.Place = "waking", nil, nil
	rec.Sandbox = string(driver.ID(rec.Session, rec.Generation, rec.Epoch))
	must(r.t, r.run.h.inv.Put(rec))
	return rec
}

// TestASandboxWhoseWakeWasNotWrittenDownIsNotRemoved: the process died between its answer and the record,
// which says that the wake goes on; what is awake, claimed or not, stays so, with its disk.
func TestASandboxWhoseWakeWasNotWrittenDownIsNotRemoved(t *testing.T) {
	for _, claimed := range []bool{true, false} {
		r, drv, p := readyRig(t)
		if claimed {
			p.must(1)
		}
		one := ref("ann", 5, 6)
		r.mustWake(one, nil)
		c := r.client(one)
		s := c.mustOpen(execOp("x1", "sh", "-c", "echo before; sleep 2; exit 9"))
		if f, err := s.recv(5 * time.Second); err != nil || string(f.GetData().GetData()) != "before\n" {
			t.Fatalf("%v %v", f, err)
		}
		r.unwritten(one)
		r.nextLife(drv)
		if inv, _ := r.disks.List(); drv.count() != 1 || r.sched.reported() != 0 || len(inv.Disks) != 1 || !inv.Disks[0].Mounted {
			t.Fatalf("claimed %v: %d sandboxes, %d reports, disks %+v", claimed, drv.count(), r.sched.reported(), inv.Disks)
		}
		if o, err := c.mustOpen(attachOp("x1", 7)).drain(); err != nil || o.exit.GetCode() != 9 {
			t.Errorf("claimed %v: %v %v", claimed, o, err)
		}
		r.halt()
	}
}

// TestAWakeThatWasNotWrittenDownAndIsGoneIsReported: with the power went the sandbox, and the record of
// the wake's end.
func TestAWakeThatWasNotWrittenDownAndIsGoneIsReported(t *testing.T) {
	r, drv, _ := readyRig(t)
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	rec := r.unwritten(one)
	r.halt()
	must(t, drv.kill(driver.ID(rec.Session, rec.Generation, rec.Epoch)))
	r.start()
	eventually(t, 20*time.Second, "it is reported once, and nothing is left", func() bool {
		inv, _ := r.disks.List()
		return r.sched.reported() == 1 && drv.count() == 0 && len(inv.Disks) == 1 && !inv.Disks[0].Mounted
	})
	r.mustWake(ref("ann", 5, 9), resume(r, one))
}

// TestRealAHostThatDiedInAClaimStartsAgain: what was claimed holds the session's disk, and no record
// has its name.
func TestRealAHostThatDiedInAClaimStartsAgain(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	for _, tier := range []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR} {
		t.Run(tierName(tier), func(t *testing.T) {
			r := realRig(t)
			r.start()
			if !r.run.h.offers(tier) {
				t.Skipf("skipped: this host has no tier %s", tierName(tier))
			}
			if _, err := newPool(r).prepare(prepareIn(tier)); err != nil {
				t.Fatal(err)
			}
			h, one := r.run.h, ref("ann", 5, 6)
			h.steps.Crash = true
			h.steps.Fault = func(at string) error {
				if at == "host.claim" {
					return errs.E(at, errkind.Internal, "", "the process dies here")
				}
				return nil
			}
			if _, err := r.wake(one, tierTerms(tier)); err == nil {
				t.Fatal("it went well")
			}
			r.sched.set(one, corev1.State_STATE_WAKING)
			r.unwritten(one)
			r.halt()
			began := time.Now()
			r.start()
			t.Logf("started in %s", time.Since(began))
			r.mustWake(one, tierTerms(tier))
			if found, err := r.run.h.drv.List(t.Context()); err != nil || len(found) != 1 {
				t.Errorf("%v %v", found, err)
			}
			if o := r.client(one).exec("x1", "echo", "here"); string(o.stdout) != "here\n" {
				t.Errorf("%q %q", o.stdout, o.stderr)
			}
			must(t, r.delete(one))
		})
	}
}
