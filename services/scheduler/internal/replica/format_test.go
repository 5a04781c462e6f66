package replica

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/testport"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/hashicorp/raft"
)

// before is the format of the version before this one.
const before = core.EntryVersion - 1

// mixed starts a group of three in which replicas read only the format before.
func mixed(t *testing.T, older ...string) *group {
	return newGroup(t, 3, func(c *Config) {
		for _, id := range older {
			if c.ID == id {
				c.reads = before
			}
		}
	})
}

// lead hands leadership to a replica.
func (g *group) lead(id string) *Replica {
	g.t.Helper()
	for {
		now := g.leader()
		if now.cfg.ID == id {
			return now
		}
		if err := now.Transfer(within(g.t, 10*time.Second), id); err != nil {
			g.t.Logf("transfer to %s: %v", id, err) // it was just restarted
			continue
		}
		eventually(g.t, "the old leader steps down", func() bool { return !now.IsLeader() || now.cfg.ID == id })
	}
}

// upgrade restarts a replica with the present version.
func (g *group) upgrade(id string) {
	g.t.Helper()
	g.stop(id)
	cfg := g.cfg[id]
	cfg.reads = 0
	g.cfg[id] = cfg
	g.start(id)
}

// formats counts the entries of a replica's log by format.
func formats(t *testing.T, r *Replica) map[int]int {
	t.Helper()
	first, err := r.log.entries.FirstIndex()
	if err != nil {
		t.Fatal(err)
	}
	out := map[int]int{}
	for i := first; i <= r.Applied(); i++ {
		var l raft.Log
		if err := r.log.entries.GetLog(i, &l); err != nil {
			t.Fatal(err)
		}
		if l.Type != raft.LogCommand {
			continue
		}
		e, err := core.DecodeEntry(l.Data)
		if err != nil {
			t.Fatal(err)
		}
		out[e.V]++
	}
	return out
}

// reservedOpen is an open with a reservation and an actor who acts for the user: parts that came with later
// formats than the first.
func reservedOpen(n int) core.Entry {
	e := openEntry(n)
	e.Open.Actor.Acting = "agent"
	e.Open.Candidates = core.Reserved(e.Open.Candidates, "h1", "p1")
	return e
}

// TestMixedGroupReachesOneState: whichever version leads, entries have the older
// format until the last replica is upgraded; then the format rises by itself.
func TestMixedGroupReachesOneState(t *testing.T) {
	g := mixed(t, "n2", "n3")
	apply(t, g.lead("n1"), joinEntry())
	n := 0
	write := func(r *Replica) {
		t.Helper()
		for range 5 {
			n++
			if out := apply(t, r, reservedOpen(n)); out.Refused != nil {
				t.Fatalf("open %d: %+v", n, out.Refused)
			}
		}
		g.same()
	}
	write(g.lead("n1")) // the newer version
	write(g.lead("n2")) // the older version
	g.upgrade("n3")
	write(g.lead("n3"))
	for id, r := range g.live {
		if got := formats(t, r); len(got) != 1 || got[before] == 0 {
			t.Errorf("the log of %s has entries by format %v while n2 is old", id, got)
		}
	}
	g.upgrade("n2")
	eventually(t, "the format rises", func() bool { return g.leader().Format() == core.EntryVersion })
	write(g.leader())
	if got := formats(t, g.leader()); got[core.EntryVersion] < 5 {
		t.Errorf("the log has entries by format %v after the last upgrade", got)
	}
	for id := range g.live {
		g.stop(id)
	}
	g.start("n1", "n2", "n3") // the log has both formats
	g.same()
	if f := g.leader().Format(); f != core.EntryVersion {
		t.Errorf("after a restart the group writes format %d", f)
	}
}

// TestOlderReplicaReadsTheSnapshotOfANewerLeader: it is so far behind that the
// entries are gone from the leader's log.
func TestOlderReplicaReadsTheSnapshotOfANewerLeader(t *testing.T) {
	g := newGroup(t, 3, func(c *Config) {
		c.TrailingLogs = 1
		if c.ID == "n3" {
			c.reads = before
		}
	})
	lead := g.lead("n1")
	apply(t, lead, joinEntry())
	g.stop("n3")
	lead = g.lead("n1")
	for n := range 60 {
		apply(t, lead, reservedOpen(n))
	}
	for range 4 {
		apply(t, lead, reservedOpen(1000))
		if err := lead.raft.Snapshot().Error(); err != nil {
			t.Fatal(err)
		}
	}
	g.start("n3")
	g.same()
}

// TestUnreachableReplicaKeepsTheFormat: its version after it returns is not known, so the format does not rise
// while it is away.
func TestUnreachableReplicaKeepsTheFormat(t *testing.T) {
	g := mixed(t, "n3")
	lead := g.lead("n1")
	apply(t, lead, joinEntry())
	g.stop("n3")
	lead = g.leader()
	if err := lead.raiseFormat(within(t, 10*time.Second)); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("the format was raised without n3: %v", err)
	}
	apply(t, lead, reservedOpen(1))
	if got := lead.Format(); got != before {
		t.Errorf("the leader writes format %d", got)
	}
	g.start("n3")
	g.same()
	if err := lead.RemovePeer(within(t, 10*time.Second), "n3"); err != nil {
		t.Fatal(err)
	}
	g.stop("n3")
	eventually(t, "the format rises without it", func() bool { return g.leader().Format() == core.EntryVersion })
}

// TestOlderReplicaIsNotAddedToANewerGroup: it could not read the log.
func TestOlderReplicaIsNotAddedToANewerGroup(t *testing.T) {
	g := newGroup(t, 1)
	lead := g.leader()
	apply(t, lead, joinEntry())
	g.cfg["m1"] = Config{Dir: t.TempDir(), Log: quiet(), ID: "m1", Bind: testport.Addr(t), TLS: g.ca.conf("m1"), Join: true, reads: before,
		Fatal: func(err error) { t.Error(err) }}
	g.start("m1")
	err := lead.AddPeer(within(t, 20*time.Second), "m1", g.cfg["m1"].Bind)
	want := fmt.Sprintf("replica m1 reads log entries up to format %d, the group writes format %d; start it with the version of the others", before, core.EntryVersion)
	if !errs.Is(err, errkind.Refused) || !strings.Contains(err.Error(), want) {
		t.Errorf("added, or unclear: %v", err)
	}
	if peers, _ := lead.Peers(); len(peers) != 1 {
		t.Errorf("it is a member: %+v", peers)
	}
}

// fatals collects what would end the process.
type fatals struct {
	mu  sync.Mutex
	all []error
}

func (f *fatals) add(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = append(f.all, err)
}

func (f *fatals) got() []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.all
}

// TestDowngradedReplicaStops at the first entry that it cannot read, in one
// sentence; it applies nothing after it, and goes on with the newer version.
func TestDowngradedReplicaStops(t *testing.T) {
	g := newGroup(t, 3)
	lead := g.lead("n1")
	apply(t, lead, joinEntry())
	g.stop("n3")
	old := g.cfg["n3"]
	stopped := &fatals{}
	older := old
	older.reads, older.Fatal = before, stopped.add
	g.cfg["n3"] = older
	g.start("n3")
	lead = g.leader()
	for n := range 5 {
		apply(t, lead, openEntry(n))
	}
	eventually(t, "n3 says why it stops", func() bool { return len(stopped.got()) > 0 })
	err := stopped.got()[0]
	var newer core.NewerFormat
	want := fmt.Sprintf("log entry has format %d, this version reads up to %d", core.EntryVersion, before)
	if !errors.As(err, &newer) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
		t.Errorf("unclear: %v", err)
	}
	if n := sessions(g.live["n3"]); n != 0 {
		t.Errorf("it applied %d entries after the one that it cannot read", n)
	}
	g.stop("n3")
	if all := stopped.got(); len(all) != 1 {
		t.Errorf("%d reasons to stop: %v", len(all), all)
	}
	g.cfg["n3"] = old
	g.start("n3")
	g.same()
}

// TestNewerSnapshotIsRefusedAtTheStart: raft alone would begin with an older
// snapshot, or say only that none could be loaded.
func TestNewerSnapshotIsRefusedAtTheStart(t *testing.T) {
	dir := t.TempDir()
	r := openLeader(t, Config{Dir: dir})
	apply(t, r, joinEntry())
	if err := r.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	old, err := Open(Config{Dir: dir, Log: quiet(), reads: before, Fatal: func(err error) { t.Error(err) }})
	if err == nil {
		_ = old.Close()
		t.Fatal("it started")
	}
	if want := fmt.Sprintf("snapshot has format %d, this version reads up to %d", core.EntryVersion, before); !strings.Contains(err.Error(), want) {
		t.Errorf("unclear: %v", err)
	}
	r = openLeader(t, Config{Dir: dir})
	apply(t, r, openEntry(1))
}

// TestMixedGroupWithTheVersionBefore runs a group with a real binary of the
// version before, killed leaders included; how to build it:
// docs/howto/scheduler-group.md.
func TestMixedGroupWithTheVersionBefore(t *testing.T) {
	older := os.Getenv("BERTH_TEST_OLDER_REPLICA")
	if older == "" {
		t.Skip("BERTH_TEST_OLDER_REPLICA names no test binary of this package at the version before")
	}
	p := newMixedProcesses(t, 3, map[string]string{"n2": older, "n3": older})
	p.must(p.leader(), "join", 0)
	opened, led := 0, map[string]bool{}
	agree := func() {
		t.Helper()
		for _, c := range p.all {
			eventually(t, c.id+" has every session", func() bool { return c.ask("count", 0).N == opened })
		}
	}
	for range 4 {
		lead := p.leader()
		led[lead.id] = true
		for range 10 {
			p.must(lead, "open", opened)
			opened++
		}
		agree()
		p.kill(lead)
		p.must(p.leader(), "open", opened)
		opened++
		p.start(lead.id)
		agree()
	}
	t.Logf("these led: %v", led)
	delete(p.binary, "n2")
	p.kill(p.all["n2"])
	p.start("n2")
	agree()
	if a := p.must(p.all["n1"], "format", 0); a.N != before {
		t.Errorf("n1 writes format %d while n3 is old", a.N)
	}
	delete(p.binary, "n3")
	p.kill(p.all["n3"])
	p.start("n3")
	for id := range p.all {
		eventually(t, "the format rises at "+id, func() bool { return p.all[id].ask("format", 0).N == core.EntryVersion })
	}
	p.must(p.leader(), "open", opened)
	opened++
	agree()
}
