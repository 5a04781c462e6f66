package core

import (
	"testing"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// What follows from every answer of a host.
func TestWhatFollowsFromAnAnswer(t *testing.T) {
	s := &Session{Key: "sa", Host: "h1", State: Waking, Generation: ids.Generation{Incarnation: 1, Index: 2}, Epoch: ids.Epoch{Incarnation: 1, Index: 3},
		Terms: &Terms{}, Wake: &Wake{Attempt: 1, Terms: &Terms{}}}
	open, closing, other := *s, *s, *s
	closing.Wake, closing.Pending = nil, []Pending{{VerbClose, "c1"}}
	other.Epoch.Index++
	rest := closing
	rest.Pending = nil
	fail := func(k errkind.Kind) *Failure { return &Failure{Kind: k, Reason: "x"} }
	for _, c := range []struct {
		name  string
		now   *Session
		a     Answer
		tries int
		want  string // the entry; empty: again
		retry bool
	}{
		{"awake", s, Answer{Kind: HostWake, Woke: &Woke{Origin: corev1.Origin_ORIGIN_RESUMED}}, 3, "woke", false},
		{"no answer", s, Answer{Kind: HostWake, Err: fail(errkind.Unavailable)}, 3, "wake_failed", true},
		{"too often", s, Answer{Kind: HostWake, Err: fail(errkind.Unavailable)}, 1, "wake_failed", false},
		{"stale there", s, Answer{Kind: HostWake, Err: fail(errkind.StaleEpoch)}, 3, "wake_failed", true},
		{"hopeless", s, Answer{Kind: HostWake, Err: fail(errkind.DataLoss)}, 3, "wake_failed", false},
		{"nothing said", s, Answer{Kind: HostWake}, 3, "wake_failed", true},
		{"asleep", s, Answer{Kind: HostSleep, Slept: &Slept{}}, 3, "slept", false},
		{"busy", s, Answer{Kind: HostSleep, Busy: true, BusySince: 7}, 3, "sleep_refused", false},
		{"no sandbox", s, Answer{Kind: HostSleep, NotFound: true, Err: fail(errkind.NotFound)}, 3, "exited", false},
		{"cut off", s, Answer{Kind: HostSleep, Err: fail(errkind.Unavailable)}, 3, "", false},
		{"no word", s, Answer{Kind: HostSleep}, 3, "", false},
		{"not saved, an open waits", &open, Answer{Kind: HostSleep, Err: fail(errkind.Unsaved)}, 3, "exited", false},
		{"not saved, a close waits", &closing, Answer{Kind: HostSleep, Err: fail(errkind.Unsaved)}, 3, "sleep_delayed", false},
		{"not saved, none waits", &rest, Answer{Kind: HostSleep, Err: fail(errkind.Unsaved)}, 3, "", false},
		{"not saved, of the past", &other, Answer{Kind: HostSleep, Err: fail(errkind.Unsaved)}, 3, "", false},
		{"not saved, deleted since", nil, Answer{Kind: HostSleep, Err: fail(errkind.Unsaved)}, 3, "", false},
		{"stopped", s, Answer{Kind: HostStop}, 3, "stopped", false},
		{"nothing to stop", s, Answer{Kind: HostStop, NotFound: true, Err: fail(errkind.StaleEpoch)}, 3, "stopped", false},
		{"stopped, unsaved", s, Answer{Kind: HostStop, Err: fail(errkind.Unsaved)}, 3, "stopped", false},
		{"not stopped", s, Answer{Kind: HostStop, Err: fail(errkind.Deadline)}, 3, "", false},
		{"deleted", s, Answer{Kind: HostDelete, Hosts: []ids.Host{"h1"}}, 3, "removed", false},
		{"not deleted", s, Answer{Kind: HostDelete, Err: fail(errkind.Deadline)}, 3, "", false},
		{"cleared", s, Answer{Kind: HostClear, Left: Left{Host: "h2", Epoch: ids.Epoch{Incarnation: 1, Index: 1}}}, 3, "cleared", false},
		{"not cleared", s, Answer{Kind: HostClear, Err: fail(errkind.Deadline)}, 3, "", false},
		{"unknown", s, Answer{Kind: Revoke}, 3, "", false},
	} {
		c.a.Session = s
		e, ok := After(c.now, c.a, c.tries, named("h2"))
		if got := e.Name(); ok != (c.want != "") || ok && got != c.want {
			t.Errorf("%s: %s, %v", c.name, got, ok)
		}
		if e.WakeFailed != nil && e.WakeFailed.Retry != c.retry {
			t.Errorf("%s: again %v", c.name, e.WakeFailed.Retry)
		}
		if e.Cleared != nil && (e.Cleared.Host != "h2" || e.Cleared.Epoch != c.a.Left.Epoch) {
			t.Errorf("%s: %+v", c.name, e.Cleared)
		}
	}
}

// A wake that brought the wrong disk fails; any other refusal says that
// somebody else decides by now.
func TestWhatFollowsFromARefusal(t *testing.T) {
	w := Entry{Woke: &Woke{Ref: Ref{Session: "sa"}}}
	for kind, want := range map[errkind.Kind]bool{errkind.DataLoss: true, errkind.Conflict: true, errkind.StaleEpoch: false} {
		if e, ok := Refused(w, Failure{Kind: kind}); ok != want || ok && (e.WakeFailed == nil || e.WakeFailed.Retry) {
			t.Errorf("%s: %+v, %v", kind, e, ok)
		}
	}
	if _, ok := Refused(Entry{Slept: &Slept{}}, Failure{Kind: errkind.Conflict}); ok {
		t.Error("a sleep that was refused came to something")
	}
}

// A sleep is not asked for any more once its open gave up, or once the disk
// cannot be saved and an open waits for it.
func TestWhatFollowsWithoutAnAnswer(t *testing.T) {
	s := Session{Key: "sa", Host: "h1", State: Sleeping, Terms: &Terms{}}
	w := s
	w.Wake = &Wake{Deadline: 10, Terms: &Terms{}}
	if _, ok := Before(&s, 20, "", true, nil); ok {
		t.Error("nobody waits")
	}
	if e, ok := Before(&w, 20, "why", false, nil); !ok || e.Place == nil || e.Place.Why != "why" {
		t.Errorf("the deadline passed: %+v", e)
	}
	if e, ok := Before(&w, 5, "why", true, named("h2")); !ok || e.Exited == nil || len(e.Exited.Candidates) != 1 {
		t.Errorf("cannot be saved: %+v", e)
	}
	if _, ok := Before(&w, 5, "", false, nil); ok {
		t.Error("the sleep goes on")
	}
}

// Removing a host ends what the deleted have to do there, under every key.
func TestRemovedHostCountsAsErased(t *testing.T) {
	c := newCell(t)
	c.host("h2")
	c.asleep("sa")
	c.openOn(0, "sa", "r9", "h2") // h1 has the disk, and holds a lease: h2 gets it all the same
	c.delete("sa", "d1", c.now)
	c.apply(Entry{Removed: &Removed{Ref: c.ref("sa"), Erased: true, Hosts: []ids.Host{"h2"}}})
	c.apply(Entry{HostLost: &HostLost{Host: "h1", Boot: "b1"}})
	before := c.s.OutSeq
	if out := c.apply(Entry{RemoveHost: &RemoveHost{Host: "h1"}}); out.Refused != nil {
		t.Fatal(out.Refused)
	}
	if kinds := kindsAfter(c.s, before); kinds != "erased removed" || len(c.s.Tombstone("sa").Erase) != 0 {
		t.Errorf("events %s", kinds)
	}
}

// A host that removed a session and has not cleaned the store yet ends the
// session, and confirms the erasure later.
func TestDeletedSessionIsErasedOnceTheStoreIsClean(t *testing.T) {
	c := newCell(t)
	c.host("h2")
	c.asleep("sa")
	c.delete("sa", "d1", c.now)
	before := c.s.OutSeq
	e, ok := After(c.s.Session("sa"), Answer{Kind: HostDelete, Session: c.s.Session("sa"), Hosts: []ids.Host{"h1"}, Stored: true}, 3, nil)
	if !ok {
		t.Fatal("the answer came to nothing")
	}
	c.apply(e)
	if kinds := kindsAfter(c.s, before); kinds != "deleted" {
		t.Fatalf("events %s", kinds)
	}
	before = c.s.OutSeq
	c.apply(Entry{RemoveHost: &RemoveHost{Host: "h1"}})
	if kinds := kindsAfter(c.s, before); kinds != "removed" {
		t.Fatalf("events %s", kinds)
	}
	tomb := c.s.Tombstone("sa")
	c.apply(Entry{Removed: &Removed{Ref: tomb.Erase[0].Ref(tomb), Erased: true, Hosts: []ids.Host{"h2"}}})
	if kinds := kindsAfter(c.s, before); kinds != "removed erased" || len(c.s.Tombstone("sa").Erase) != 0 {
		t.Errorf("events %s, left %+v", kinds, c.s.Tombstone("sa").Erase)
	}
}

// A list of terms, words or holders that many sessions share is the same memory,
// also after a restore.
func TestSleepersShareTheirMemory(t *testing.T) {
	s, _ := Fill(2, 40)
	a, b := s.Session(FillKey(0)), s.Session(FillKey(20))
	if a.Terms != b.Terms || &a.Holders[0] != &b.Holders[0] || a.Actor.Tenant != "tenant-0" || len(a.LastWake.Steps) != 0 {
		t.Errorf("%+v\n%+v", a, b)
	}
	if n := len(s.in.terms); n != 1 {
		t.Errorf("%d different terms", n)
	}
	if n, m := s.Usage(FillHost(0)), s.Usage(FillHost(1)); n.Sessions != 20 || m.Sessions != 20 || n.MemoryBytes != 0 {
		t.Errorf("usage %+v, %+v", n, m)
	}
}
