package replica

import (
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// gate stands before the connections of one replica. Held, it keeps answers
// that have arrived, as the sockets of a stopped process do; cut, it drops what
// is sent.
type gate struct {
	mu   sync.Mutex
	free *sync.Cond
	held bool
	cut  bool
	kept int // answers that wait
}

func newGate() *gate {
	g := &gate{}
	g.free = sync.NewCond(&g.mu)
	return g
}

func (g *gate) set(held, cut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held, g.cut = held, cut
	g.free.Broadcast()
}

func (g *gate) waiting() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.kept
}

type gated struct {
	net.Conn
	gate *gate
}

func (c gated) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.gate.mu.Lock()
	defer c.gate.mu.Unlock()
	if c.gate.held && n > 0 {
		c.gate.kept++
		for c.gate.held {
			c.gate.free.Wait()
		}
		c.gate.kept--
	}
	return n, err
}

func (c gated) Write(p []byte) (int, error) {
	c.gate.mu.Lock()
	cut := c.gate.cut
	c.gate.mu.Unlock()
	if cut {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// TestAnswersFromBeforeDoNotVerifyADeposedLeader: raft takes an answer that was
// given before another was elected, and read after, for a sign that the old
// leader leads. n1 has a long time-out, so that its lease is not what saves it.
func TestAnswersFromBeforeDoNotVerifyADeposedLeader(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: waits for elections of seconds")
	}
	g, in := newGate(), newGate() // answers to n1, and what the others ask it
	grp := newGroup(t, 3, func(c *Config) {
		c.Heartbeat = 2 * time.Second
		if c.ID == "n1" {
			c.Heartbeat = 8 * time.Second
			c.wrapConn = func(n net.Conn, dialed bool) net.Conn {
				if dialed {
					return gated{n, g}
				}
				return gated{n, in}
			}
		}
	})
	t.Cleanup(func() { g.set(false, false); in.set(false, false) })
	if lead := grp.leader(); lead.cfg.ID != "n1" {
		if err := lead.Transfer(within(t, 10*time.Second), "n1"); err != nil {
			t.Fatal(err)
		}
	}
	old := grp.leader()
	if old.cfg.ID != "n1" {
		t.Skip("n1 did not stay the leader")
	}
	apply(t, old, joinEntry())
	g.set(true, false)
	in.set(true, false)
	first := make(chan error, 1)
	go func() { first <- old.Verify(within(t, 20*time.Second)) }()
	eventually(t, "both have answered", func() bool { return g.waiting() >= 2 })
	g.set(true, true)
	delete(grp.live, "n1")
	next := grp.leader()
	grp.live["n1"] = old
	apply(t, next, openEntry(1))
	if !old.IsLeader() {
		t.Skip("n1 gave up by itself; the machine is slow")
	}
	second := make(chan error, 1)
	go func() { second <- old.Verify(within(t, 2*time.Second)) }()
	// The question must be with raft before the old answers are read.
	eventually(t, "the second question waits", func() bool { return verifying() >= 2 })
	g.set(false, true)
	if err := <-second; err == nil && sessions(old) == 0 {
		t.Error("n1 verified that it leads, after n2 or n3 had opened a session that it does not know")
	}
	<-first
}

// verifying is how many goroutines wait for raft's word.
func verifying() int {
	buf := make([]byte, 1<<20)
	return strings.Count(string(buf[:runtime.Stack(buf, true)]), "raft.(*deferError).Error(")
}
