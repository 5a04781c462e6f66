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
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

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
			eventually(t, 20*time.Second, "the warm one is gone", func() bool { return drv.count() == 1 && len(p.warm().GetWarm()) == 0 })
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
			eventually(t, 20*time.Second, "one sandbox is left", func() bool { return drv.count() == 1 })
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
