package replica

import (
	"net"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/testport"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/hashicorp/raft"
)

// cutGroup is a group of three of which one follower can be cut off from the others.
func cutGroup(t *testing.T) (g *group, lead *Replica, away string, cut *gate) {
	t.Helper()
	gates := map[string]*gate{}
	g = newGroup(t, 3, func(c *Config) {
		gt := newGate()
		gates[c.ID] = gt
		c.wrapConn = func(n net.Conn, _ bool) net.Conn { return gated{n, gt} }
	})
	lead = g.leader()
	away = g.follower(lead)
	t.Cleanup(func() { gates[away].set(false, false) })
	return g, lead, away, gates[away]
}

// silent waits until a replica has not answered for a while.
func silent(t *testing.T, lead *Replica, id string) {
	t.Helper()
	eventually(t, id+" is not heard from", func() bool {
		c, _ := lead.contacts.of(raft.ServerID(id), lead.raft.CurrentTerm())
		return time.Since(c.sent) > lead.cfg.Heartbeat
	})
}

// TestATransferToOneThatIsAwayIsRefused: raft takes no entries while it tries.
func TestATransferToOneThatIsAwayIsRefused(t *testing.T) {
	g, lead, away, cut := cutGroup(t)
	apply(t, lead, joinEntry())
	cut.set(false, true)
	silent(t, lead, away)
	if err := lead.Transfer(within(t, 20*time.Second), away); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("handed over to one that is away: %v", err)
	}
	apply(t, lead, openEntry(1))
	if err := lead.Transfer(within(t, 20*time.Second), ""); err != nil {
		t.Errorf("hand over to the other: %v", err)
	}
	cut.set(false, false)
	g.same()
}

// TestATransferThatIsCutWedgesNothing: the one that is named goes away between the choice and the word,
// before it has the last entries, and after.
func TestATransferThatIsCutWedgesNothing(t *testing.T) {
	for name, entries := range map[string]int{"with all entries": 0, "behind": 5} {
		t.Run(name, func(t *testing.T) {
			g, lead, away, cut := cutGroup(t)
			apply(t, lead, joinEntry())
			g.same()
			cut.set(false, true)
			silent(t, lead, away)
			for n := range entries {
				apply(t, lead, openEntry(n+1))
			}
			servers, _, err := lead.servers()
			if err != nil {
				t.Fatal(err)
			}
			to := servers[slices.IndexFunc(servers, func(s raft.Server) bool { return string(s.ID) == away })]
			if err := lead.handTo(within(t, 20*time.Second), to); err == nil {
				t.Error("handed over to one that is cut off")
			}
			lead = g.leader()
			ctx := within(t, 20*time.Second) // the cut stays
			for done := false; !done; {
				_, err := lead.Apply(ctx, openEntry(20))
				if done = err == nil; !done && !errs.Is(err, errkind.NotLeader) {
					t.Fatalf("nothing is taken any more: %v", err)
				}
			}
			cut.set(false, false)
			g.same()
		})
	}
}

// An address that was mistyped took a living member's vote away: the next
// replica that was lost took the group with it.
func TestAMemberIsNotMovedToWhereItDoesNotAnswer(t *testing.T) {
	g := newGroup(t, 3)
	lead := g.leader()
	before, err := lead.Peers()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range before {
		if err := lead.AddPeer(within(t, 10*time.Second), p.ID, testport.Addr(t)); err == nil {
			t.Errorf("%s was moved to where nobody is", p.ID)
		}
	}
	if after, err := lead.Peers(); err != nil || !slices.Equal(after, before) {
		t.Errorf("the group was %v and is %v (%v)", before, after, err)
	}
}
