package scheduler

import (
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/nats-io/nats.go"
)

// cable is a connection to the bus that a test can pull out.
type cable struct {
	mu     sync.Mutex
	server nats.InProcessConnProvider
	out    bool
	conns  []net.Conn
}

func (c *cable) InProcessConn() (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out {
		return nil, errors.New("the cable is pulled out")
	}
	conn, err := c.server.InProcessConn()
	if err == nil {
		c.conns = append(c.conns, conn)
	}
	return conn, err
}

func (c *cable) pull(out bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out = out; out {
		for _, conn := range c.conns {
			conn.Close()
		}
		c.conns = nil
	}
}

func (c *cable) option(o *nats.Options) error {
	c.server, o.InProcessServer = o.InProcessServer, c
	return nil
}

// rewire has every replica of a group start again with a cable of its own.
func (g *group) rewire() map[string]*cable {
	cables := map[string]*cable{}
	for _, m := range g.members {
		m.stop()
	}
	for len(g.ready) > 0 {
		<-g.ready
	}
	for _, m := range g.members {
		cables[m.cfg.ReplicaID] = &cable{}
		g.runWith(m, bus.WithNATS(cables[m.cfg.ReplicaID].option))
	}
	g.serving("")
	return cables
}

// A leader that is cut off from the bus, but not from the other replicas,
// leads on: no host can renew, and all of them are declared lost.
func TestLeaderWithoutTheBusHandsLeadershipOver(t *testing.T) {
	g := newGroup(t, 3, func(c *Config) {
		c.times.deafAfter, c.times.newLeadership = 200*time.Millisecond, 500*time.Millisecond
	})
	cables := g.rewire()
	g.withHost(t, testHost, 0)
	g.withHost(t, "h2", 0)
	must[wakeReply](t)(g.open(0, "r1"))
	was := g.leader()
	cables[was].pull(true)
	if now := g.serving(was); now == was {
		t.Fatalf("%s leads on", was)
	}
	must[wakeReply](t)(g.open(1, "r1"))
	if rec := g.show(0); rec.GetState() != corev1.State_STATE_ACTIVE {
		t.Errorf("the session that was awake: %v", rec)
	}
	g.fleet("h1", "lost", 0)
	g.fleet("h2", "lost", 0)
	cables[was].pull(false)
	must[wakeReply](t)(g.open(2, "r1"))
}

// A scheduler that is alone cannot hand over: when the bus was away for longer
// than a lease, it declares every host lost that could not have renewed.
func TestNoLeaseRunsOutWhileTheBusIsAway(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Lease, c.LeaseDrift = 2*time.Second, 0 })
	w.stop()
	c := &cable{}
	w.startWith(bus.WithNATS(c.option))
	w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(0, "r1"))
	c.pull(true)
	time.Sleep(2 * w.cfg.Lease) // that nothing happens in it is what is tested
	c.pull(false)
	must[wakeReply](t)(w.open(1, "r1"))
	if rec := w.show(0); rec.GetState() != corev1.State_STATE_ACTIVE {
		t.Errorf("the session that was awake: %v", rec)
	}
	w.fleet("h1", "lost", 0)
}
