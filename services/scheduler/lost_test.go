package scheduler

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
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
	w, l := newLedWorld(t, shortLease)
	h := w.withHost(t, testHost, 0)
	h.lease()
	l.leases.grant(testHost, "b2")
	w.until("the host is lost", func() bool { return w.hostRecord("h1").GetLost() })
}
