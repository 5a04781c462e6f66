package replica

import (
	"bytes"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/hashicorp/raft"
)

// TestFollowerThatIsFarBehindGetsASnapshot, as does a new one: the entries that
// it lacks are not in any log any more.
func TestFollowerThatIsFarBehindGetsASnapshot(t *testing.T) {
	g := newGroup(t, 3, func(c *Config) { c.TrailingLogs = 1 })
	lead := g.leader()
	apply(t, lead, joinEntry())
	behind := g.follower(lead)
	g.stop(behind)
	lead = g.leader()
	for n := range 60 {
		apply(t, lead, openEntry(n))
	}
	for range 4 { // more than are kept
		apply(t, lead, openEntry(1000))
		if err := lead.raft.Snapshot().Error(); err != nil {
			t.Fatal(err)
		}
	}
	if first, err := lead.log.entries.FirstIndex(); err != nil || first < 50 {
		t.Fatalf("the log still begins at %d: %v", first, err)
	}
	snaps, err := raft.NewFileSnapshotStoreWithLogger(lead.cfg.Dir, 3, newLogger(quiet()))
	if err != nil {
		t.Fatal(err)
	}
	if list, err := snaps.List(); err != nil || len(list) < 2 {
		t.Errorf("%d snapshots are kept, want 2 or more: %v", len(list), err)
	}
	g.start(behind)
	wiped := g.join("m1")
	if err := lead.AddPeer(within(t, 20*time.Second), "m1", wiped.Bind); err != nil {
		t.Fatal(err)
	}
	g.same()
	for _, id := range []string{behind, "m1"} {
		r := g.live[id]
		eventually(t, id+" has applied all", func() bool { return r.Applied() >= lead.Applied() })
	}
}

// TestViewsGoOnWhileAStateIsRestored; the race detector watches.
func TestViewsGoOnWhileAStateIsRestored(t *testing.T) {
	m := newMachine()
	raw := func(e core.Entry) []byte {
		b, err := e.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	m.Apply(&raft.Log{Index: 1, Type: raft.LogCommand, Data: raw(joinEntry())})
	var snap bytes.Buffer
	m.view(func(s *core.State) {
		if _, err := s.Clone().WriteTo(&snap); err != nil {
			t.Error(err)
		}
	})
	stop, done := make(chan struct{}), make(chan struct{})
	for range 4 {
		go func() {
			defer func() { done <- struct{}{} }()
			var kept []*core.Session // may be read after the view
			for {
				select {
				case <-stop:
					return
				default:
				}
				for _, s := range kept {
					_ = fmt.Sprint(s.Key, s.State, s.Host)
				}
				m.view(func(s *core.State) { kept = s.Sessions() })
			}
		}()
	}
	changed, release := m.hub.wait(key(1).String())
	defer release()
	for n := range 30 {
		m.Apply(&raft.Log{Index: uint64(n + 2), Type: raft.LogCommand, Data: raw(openEntry(n))})
		if err := m.Restore(io.NopCloser(bytes.NewReader(snap.Bytes()))); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	for range 4 {
		<-done
	}
	select {
	case <-changed:
	default:
		t.Error("who waits for a session was not told of the other state")
	}
	if n := m.applied.Load(); n != 1 {
		t.Errorf("applied is %d after the restore of a snapshot at 1", n)
	}
}

// TestOldAnswerIsNoContact: what was sent before a question proves nothing, nor
// does the answer of another term or of a replica without a vote.
func TestOldAnswerIsNoContact(t *testing.T) {
	c, now := newContacts(), time.Now()
	voters := []raft.ServerID{"a", "b", "c"}
	check := func(want bool, why string) {
		t.Helper()
		if c.majority(voters, "a", 7, now) != want {
			t.Errorf("majority is %v: %s", !want, why)
		}
	}
	check(false, "nobody answered")
	c.answered("b", contact{sent: now.Add(-time.Nanosecond), term: 7})
	check(false, "it was sent before")
	c.answered("b", contact{sent: now, term: 6})
	check(false, "it was of an older term")
	c.answered("d", contact{sent: now, term: 7})
	check(false, "it has no vote")
	c.answered("b", contact{sent: now, term: 7})
	check(true, "b answered")
	c.answered("b", contact{sent: now.Add(-time.Second), term: 7})
	check(true, "an old answer came late")
	if c.majority(append(voters, "d2", "e"), "a", 7, now) {
		t.Error("two of five are a majority")
	}
}
