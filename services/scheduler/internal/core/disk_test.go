package core

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

func named(hosts ...ids.Host) (out []Candidate) {
	for _, h := range hosts {
		out = append(out, Candidate{Host: h})
	}
	return out
}

func (c *cell) host(id ids.Host) {
	c.apply(Entry{Join: &Host{ID: id, Boot: "b1", Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR}, Capacity: Limits{MemoryBytes: 1 << 40}}})
}

// openOn opens a session, by an entry of some format, while some hosts hold a lease.
func (c *cell) openOn(format int, key ids.SessionKey, req string, alive ...ids.Host) Outcome {
	return c.apply(Entry{V: format, Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: corev1.Tier_TIER_GVISOR, Retention: 720 * time.Hour},
		Request: ids.RequestID(req), StoredAt: Time(c.now), Deadline: Time(c.now + time.Minute), Keys: []ids.SessionKey{key}, Candidates: named(alive...), Alive: alive}})
}

// Entries that an older version wrote are read, and come to what they came to then.
func TestEntriesOfAnOlderVersion(t *testing.T) {
	e, err := DecodeEntry([]byte(`{"v":1,"now":5,"open":{"actor":{"tenant":"acme"},"terms":{"plan":"free","tier":3,"limits":{"mem":1},"idle":1},
		"request":"r1","stored_at":1,"deadline":9,"keys":["sa"],"alive":["h1"]}}`))
	if err != nil || e.Open == nil || e.Open.Terms.Plan != "free" || e.Open.Terms.Snapshots != (Snapshots{}) {
		t.Fatalf("%+v, %v", e.Open, err)
	}
	c := newCell(t)
	c.host("h2")
	c.asleep("sa")
	if out := c.openOn(1, "sa", "r9", "h2"); out.Session.State != Asleep {
		t.Errorf("an entry of format 1 moved the session: %+v", out.Session)
	}
	c.delete("sa", "d1", c.now)
	before := c.s.OutSeq
	c.apply(Entry{V: 1, Removed: &Removed{Ref: c.ref("sa")}})
	if kinds := kindsAfter(c.s, before); kinds != "deleted" {
		t.Errorf("events %s", kinds)
	}
	tomb := c.s.Tombstone("sa")
	if want := []Erasure{{Generation: tomb.Generation, Epoch: tomb.Epoch, Host: "h1"}}; !slices.Equal(tomb.Erase, want) {
		t.Fatalf("to be erased: %+v", tomb.Erase)
	}
	before = c.s.OutSeq
	c.apply(Entry{Removed: &Removed{Ref: tomb.Erase[0].Ref(tomb), Erased: true, Hosts: []ids.Host{"h1"}}})
	if kinds := kindsAfter(c.s, before); kinds != "" || len(c.s.Tombstone("sa").Erase) != 0 {
		t.Errorf("events %s, left %+v", kinds, c.s.Tombstone("sa").Erase)
	}
	if _, err := DecodeEntry(fmt.Appendf(nil, `{"v":%d}`, EntryVersion+1)); err == nil {
		t.Error("an entry of a newer format was read")
	}
}

func kindsAfter(s *State, seq uint64) string {
	var out []string
	for _, e := range s.EventsAfter(seq, 100) {
		out = append(out, string(e.Kind))
	}
	return strings.Join(out, " ")
}

// A session that an older version placed knows no list of hosts: the one that
// it was on counts from the first move on.
func TestHolderOfAnOlderVersionIsNotForgotten(t *testing.T) {
	c := newCell(t)
	c.host("h2")
	c.openOn(1, "sa", "r1", "h1")
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{"sa"}}})
	c.apply(Entry{Slept: &Slept{Ref: c.ref("sa"), Manifest: ManifestInfo{ID: "m1"}}})
	if s := c.s.Session("sa"); len(s.Holders) != 0 {
		t.Fatalf("holders %v", s.Holders)
	}
	s := c.openOn(0, "sa", "r2", "h2").Session
	if s.Host != "h2" || !slices.Equal(s.Holders, []ids.Host{"h1", "h2"}) {
		t.Errorf("on %s, held by %v", s.Host, s.Holders)
	}
}

// A session may be on so many hosts, and then only on those.
func TestHoldersAreBounded(t *testing.T) {
	c := newCell(t)
	c.asleep("sa")
	for i := range MaxHolders + 3 {
		h := ids.Host(fmt.Sprint("x", i))
		c.host(h)
		c.now += 2 * time.Minute
		s := c.openOn(0, "sa", fmt.Sprint("r", i), h).Session
		if i < MaxHolders-1 {
			if s.Host != h {
				t.Fatalf("move %d: on %s", i, s.Host)
			}
			c.woke("sa", corev1.Origin_ORIGIN_RESUMED)
			c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{"sa"}}})
			c.apply(Entry{Slept: &Slept{Ref: c.ref("sa"), Manifest: ManifestInfo{ID: s.Manifest}}})
			continue
		}
		if s.State != Asleep || len(s.Holders) != MaxHolders || !strings.Contains(s.Wake.Unplaced, "one more than the 32 hosts") {
			t.Fatalf("move %d: %s on %s: %s", i, StateName(s.State), s.Host, s.Wake.Unplaced)
		}
	}
	if s := c.openOn(0, "sa", "back", "x3").Session; s.Host != "x3" || len(s.Holders) != MaxHolders {
		t.Errorf("back on a host that had it: %+v", s)
	}
}

// The host that has the disk is among those named, and the first, in a fleet too.
func TestOwnHostIsTheFirstCandidate(t *testing.T) {
	c := newCell(t)
	c.asleep("sa")
	for i := range 20 {
		c.host(ids.Host(fmt.Sprint("x", i)))
	}
	c.apply(Entry{Join: &Host{ID: "h1", Boot: "b1", Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR}, Capacity: Limits{MemoryBytes: 1 << 10}}})
	full := c.s.Rank(c.s.Session("sa"), Terms{Tier: corev1.Tier_TIER_GVISOR, Limits: Limits{MemoryBytes: 1 << 20}}, allAlive)
	if len(full) != MaxCandidates+1 || full[MaxCandidates].Host != "h1" {
		t.Errorf("candidates %v", full)
	}
	got := c.s.Rank(c.s.Session("sa"), Terms{Tier: corev1.Tier_TIER_GVISOR}, allAlive)
	if len(got) != MaxCandidates || got[0].Host != "h1" {
		t.Errorf("candidates %v", got)
	}
}

func allAlive(ids.Host) HostFacts { return HostFacts{Alive: true} }

// A restore makes what a host holds of the time before stale, also a disk that
// was saved and never marked so: no epoch that it knows was the last one active.
func TestRestoreMakesLocalImagesStale(t *testing.T) {
	c := newCell(t)
	c.asleep("sa")
	was := c.s.Session("sa")
	if out := c.apply(Entry{Restore: &Restore{Tenant: "acme", Session: "sa", Generation: was.Generation, Head: was.Manifest, Snapshot: "m0"}}); out.Refused != nil {
		t.Fatal(out.Refused)
	}
	c.open("acme", "sa", "r9", "h")
	out := c.apply(Entry{Manifest: &ManifestCmd{Ref: c.ref("sa"), Host: "h1", Manifest: ManifestInfo{ID: "m9", Parent: was.Manifest, RestoredFrom: "m0"}}})
	if out.Refused != nil || out.Session.LastActive == was.LastActive || out.Session.Manifest != "m9" || out.Session.Restore != nil {
		t.Errorf("%+v, %+v", out.Session, out.Refused)
	}
}

// Everything that a session and its end hold survives a snapshot of the log.
func TestSnapshotKeepsDisks(t *testing.T) {
	c := newCell(t)
	c.host("h2")
	c.asleep("sa")
	c.asleep("sb")
	s := c.s.Session("sa")
	c.apply(Entry{Restore: &Restore{Tenant: "acme", Session: "sa", Generation: s.Generation, Head: s.Manifest, Snapshot: "m0", AsOf: 7}})
	c.openOn(0, "sa", "r9", "h2")
	c.openOn(0, "sb", "r9", "h2")
	c.delete("sb", "d1", c.now)
	c.apply(Entry{Removed: &Removed{Ref: c.ref("sb"), Erased: true, Hosts: []ids.Host{"h2"}}})
	r, err := ReadState(bytes.NewReader(dump(t, c.s)))
	if err != nil {
		t.Fatal(err)
	}
	a, b := r.Session("sa"), r.Tombstone("sb")
	if a.Restore == nil || a.Restore.AsOf != 7 || !slices.Equal(a.Holders, []ids.Host{"h1", "h2"}) {
		t.Errorf("session %+v", a)
	}
	if len(b.Erase) != 2 || b.Erase[0].Done || !b.Erase[1].Done || b.Erase[0].Revision != b.Revision {
		t.Errorf("tombstone %+v", b)
	}
}

// A session whose newest files are on one host waits for it, whatever the store has.
func TestUnsavedFilesAreNotLeftBehind(t *testing.T) {
	c := newCell(t)
	c.host("h2")
	c.asleep("sa")
	c.open("acme", "sa", "r9", "h")
	c.woke("sa", corev1.Origin_ORIGIN_RESUMED)
	c.apply(Entry{Exited: &Exited{Ref: c.ref("sa"), Host: "h1", Reason: "killed"}})
	out := c.openOn(0, "sa", "r10", "h2")
	if s := out.Session; s.State != Asleep || !s.Dirty || !strings.Contains(s.Wake.Unplaced, "h1, which has the disk, holds no lease") {
		t.Errorf("%+v", s)
	}
	c.refused(c.apply(Entry{Restore: &Restore{Tenant: "acme", Session: "sa", Generation: out.Session.Generation, Head: "m-sa", Snapshot: "m-sa"}}), errkind.Conflict)
}
