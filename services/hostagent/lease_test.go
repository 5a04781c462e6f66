package hostagent

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// The defaults of the scheduler.
const (
	leaseTerm  = 9 * time.Second
	leaseDrift = time.Second
)

// heldLease is a lease by a clock that the test moves, settled at first.
func heldLease(now *time.Duration) *lease {
	l := newLease(2*time.Second, true)
	l.now = func() time.Duration { return *now }
	n := l.asking()
	l.granted(*now, leaseTerm)
	l.settle(n)
	return l
}

func TestLeaseIsCountedFromTheSending(t *testing.T) {
	now := 100 * time.Second
	l := newLease(2*time.Second, true)
	l.now = func() time.Duration { return now }
	if l.check() == nil {
		t.Error("a host without a lease may act")
	}
	n := l.asking()
	l.granted(now, leaseTerm) // the answer took 3 s
	if l.check() == nil {
		t.Error("it may act before it knows what it owns")
	}
	now += 3 * time.Second
	if !l.settle(n) {
		t.Fatal("not settled")
	}
	if left := l.left(); left != 4*time.Second {
		t.Errorf("%s left", left)
	}
	if p := l.pause(); p != 3*time.Second {
		t.Errorf("renewed every %s", p)
	}
	l.granted(now-8*time.Second, leaseTerm) // an old answer that came late shortens nothing
	l.granted(now, leaseTerm)
	l.granted(now-8*time.Second, leaseTerm)
	if left := l.left(); left != 7*time.Second {
		t.Errorf("%s left after a late answer", left)
	}
	now += 7 * time.Second
	if !errs.Is(l.check(), errkind.Unavailable) {
		t.Error("the margin is not kept")
	}
}

// told records what the fence hears.
type told struct{ freeze, stop time.Duration }

func (f *told) Until(freeze, stop time.Duration) { f.freeze, f.stop = freeze, stop }
func (f *told) Keep(stop time.Duration)          { f.stop = stop }
func (f *told) Freeze()                          { f.freeze = 0 }

// TestALeaseThatWasLostIsNotHadAgainByAGrant: from the moment that it was over here, nothing begins and
// nothing is thawed until the host compared itself with what it owns; what is frozen lives on.
func TestALeaseThatWasLostIsNotHadAgainByAGrant(t *testing.T) {
	now := 100 * time.Second
	f := &told{}
	l := heldLease(&now)
	l.fence = f
	if !l.granted(now, leaseTerm) || f.freeze != 107*time.Second || f.stop != 108500*time.Millisecond {
		t.Fatalf("told %+v", f)
	}
	sent := now + 5*time.Second
	now += 7 * time.Second // the answer comes when the host has stopped to act
	if l.granted(sent, leaseTerm) {
		t.Error("settled by a grant")
	}
	if l.check() == nil || f.freeze != 107*time.Second || f.stop != 113500*time.Millisecond {
		t.Errorf("told %+v", f)
	}
	n := l.asking()
	l.lost() // and while it asks, scheduler says that it does not know the lease
	if f.freeze != 0 {
		t.Error("what runs is not frozen at once")
	}
	if l.settle(n) || l.check() == nil {
		t.Error("settled by an answer from before the loss")
	}
	waited := make(chan error, 1)
	go func() { waited <- l.wait(context.Background()) }()
	n = l.asking()
	l.granted(now, leaseTerm)
	if !l.settle(n) || l.check() != nil || f.freeze != now+7*time.Second {
		t.Errorf("not settled: told %+v", f)
	}
	if err := <-waited; err != nil {
		t.Errorf("who waited for it: %v", err)
	}
}

// TestAFreezeOnlyHostStopsNothing: on one machine nobody else could take a session over.
func TestAFreezeOnlyHostStopsNothing(t *testing.T) {
	now, f := 100*time.Second, &told{}
	l := heldLease(&now)
	l.stops, l.fence = false, f
	l.granted(now, leaseTerm)
	if f.stop != 0 || f.freeze == 0 {
		t.Errorf("told %+v", f)
	}
}

// TestASkewedClockStopsInTime: however a host's clock runs, up to three ninths off, it stops to act
// before the scheduler gives away what it had; a clock that jumps ahead, as one does that counts the time
// of a suspended machine, stops it at once; and the answer to a renewal counts from its sending.
func TestASkewedClockStopsInTime(t *testing.T) {
	for _, skew := range []float64{-3.0 / 9, -0.1, 0, 0.1, 3.0 / 9} {
		for _, delay := range []time.Duration{0, time.Second, 4 * time.Second} {
			t.Run(fmt.Sprintf("%+.2f after %s", skew, delay), func(t *testing.T) {
				var at time.Duration // true time
				l := newLease(2*time.Second, true)
				// A true second takes 1/(1+skew) of its own when it is slow.
				rate := 1 + skew
				if skew < 0 {
					rate = 1 / (1 - skew)
				}
				l.now = func() time.Duration { return 1000*time.Second + time.Duration(float64(at)*rate) }
				n, sent := l.asking(), l.now()
				given := at + delay/2 // scheduler grants half-way
				at += delay
				l.granted(sent, leaseTerm)
				l.settle(n)
				for ; l.check() == nil; at += 10 * time.Millisecond {
				}
				if at > given+leaseTerm+leaseDrift {
					t.Errorf("it acted until %s after the session was given away", at-given-leaseTerm-leaseDrift)
				}
			})
		}
	}
	now := 100 * time.Second
	l := heldLease(&now)
	now += time.Hour
	if l.check() == nil {
		t.Error("it acts after it was suspended")
	}
	l.granted(now-time.Second, leaseTerm)
	if l.check() == nil {
		t.Error("it acts before it knows what it owns")
	}
}

// A leader that is new takes every host for alive. What it asks of one whose lease ran out a moment
// ago was refused at once, on host after host, and the session failed.
func TestAWakeWaitsForTheLeaseThatIsOnItsWay(t *testing.T) {
	var now atomic.Int64
	now.Store(int64(100 * time.Second))
	l := newLease(2*time.Second, true)
	l.now = func() time.Duration { return time.Duration(now.Load()) }
	n := l.asking()
	l.granted(l.now(), leaseTerm)
	l.settle(n)
	now.Add(int64(8 * time.Second))
	if l.check() == nil {
		t.Fatal("it may act")
	}
	waited := make(chan error, 1)
	go func() { waited <- l.wait(context.Background()) }()
	select {
	case err := <-waited:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(50 * time.Millisecond): // less than leaseWait
	}
	n = l.asking()
	l.granted(l.now(), leaseTerm)
	l.settle(n)
	if err := <-waited; err != nil {
		t.Errorf("who waited for it: %v", err)
	}
	now.Add(int64(8 * time.Second))
	if err := l.wait(context.Background()); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("without a lease: %v", err)
	}
}
