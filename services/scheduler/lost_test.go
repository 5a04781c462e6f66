package scheduler

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
)

// newLedWorld is a world and its leader.
func newLedWorld(t *testing.T, change func(*Config)) (*world, *leader) {
	var l *leader
	w := newWorld(t, func(c *Config) {
		if change != nil {
			change(c)
		}
		c.onLead = func(now *leader) { l = now }
	})
	return w, l
}

// Many leases run out at once and the hosts are given up one after the other. One
// that joined again meanwhile runs its sessions, which are not given to others.
func TestHostThatJoinedAgainIsNotLost(t *testing.T) {
	w, l := newLedWorld(t, nil)
	w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "r1"))
	l.lose(bustest.Context(t), testHost) // found to have no lease before it joined
	if h := w.hostRecord("h1"); h.GetLost() || !h.GetAlive() {
		t.Errorf("the host holds a lease and counts as lost: %v", h)
	}
	if s := w.show(1); s.GetState() != corev1.State_STATE_ACTIVE {
		t.Errorf("its session is %s", s.GetState())
	}
}

// A loss that is being recorded is in the log before a join that comes in, so
// that the host's lease is not one that the state knows nothing of.
func TestJoinWaitsForALossUnderWay(t *testing.T) {
	w, l := newLedWorld(t, nil)
	h := w.withHost(t, testHost, 0)
	turn := l.leases.turn(testHost)
	turn.Lock()
	joined := make(chan error, 1)
	go func() { _, err := h.tryJoin(t); joined <- err }()
	select {
	case err := <-joined:
		t.Errorf("joined: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	turn.Unlock()
	if err := <-joined; err != nil {
		t.Error(err)
	}
}

// A boot that was given a lease, but whose join came to nothing, and that is never
// heard of again: the host is lost all the same.
func TestHostIsLostThoughANewBootDidNotGetIn(t *testing.T) {
	w, l := newLedWorld(t, func(c *Config) { c.Lease, c.LeaseDrift = time.Second, 0 })
	h := w.withHost(t, testHost, 0)
	h.lease()
	l.leases.grant(testHost, "b2")
	w.until("the host is lost", func() bool { return w.hostRecord("h1").GetLost() })
}

// The leases of a fleet are made shorter, and the next leader gives such ones. A
// host that it never hears from may still act on a longer one, which a leader
// before gave it: its sessions are not given away before that is over.
func TestShorterLeaseDoesNotEndALongerOne(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Lease, c.LeaseDrift = 20*time.Second, 0 })
	h := newFakeHost(t, w, "b1")
	h.join(t)
	if rec := w.hostRecord("h1"); rec.GetLeaseLeft().AsDuration() > 20*time.Second {
		t.Errorf("left: %s", rec.GetLeaseLeft().AsDuration())
	}
	w.cfg.Lease = time.Second
	w.restart()
	began := time.Now()
	if left := w.hostRecord("h1").GetLeaseLeft().AsDuration(); left < 12*time.Second {
		t.Errorf("the new leader gives the host's sessions away in %s", left)
	}
	if rec := w.hostRecord("h1"); rec.GetLost() || time.Since(began) > 12*time.Second {
		t.Errorf("host: %v", rec)
	}
	h.boot = "b2" // a new boot has only what it is given now
	if lease := h.join(t).GetLease().AsDuration(); lease != time.Second {
		t.Errorf("lease: %s", lease)
	}
	if left := w.hostRecord("h1").GetLeaseLeft().AsDuration(); left > time.Second {
		t.Errorf("left: %s", left)
	}
}

// Leases are made longer: a renewal gives none that is not in the log, since the
// next leader may give shorter ones again.
func TestLongerLeaseIsGivenOnceItIsRecorded(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Lease = 5 * time.Second })
	h := newFakeHost(t, w, "b1")
	h.join(t)
	w.cfg.Lease = 20 * time.Second
	w.restart()
	renew := func() time.Duration {
		return must[*schedulerv1.LeaseReply](t)(bus.Invoke[*schedulerv1.LeaseReply](bustest.Context(t), h.conn, "scheduler", "lease",
			&schedulerv1.LeaseRequest{Host: "h1", Boot: "b1"})).GetLease().AsDuration()
	}
	if got := renew(); got != 5*time.Second {
		t.Errorf("before the join: %s", got)
	}
	h.join(t)
	if got := renew(); got != 20*time.Second {
		t.Errorf("after the join: %s", got)
	}
}
