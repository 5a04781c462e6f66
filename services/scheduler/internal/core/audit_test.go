package core

import (
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

func (c *cell) join(h ids.Host) Outcome {
	return c.apply(Entry{Join: &Host{ID: h, Boot: "b1", Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR}, Capacity: Limits{MemoryBytes: 1 << 40}}})
}

func (c *cell) lose(h ids.Host) Outcome {
	return c.apply(Entry{HostLost: &HostLost{Host: h, Boot: "b1", Reason: "its lease ran out"}})
}

func (c *cell) openIn(key ids.SessionKey, req string, t Terms, hosts ...ids.Host) Outcome {
	t.Tier, t.Idle = corev1.Tier_TIER_GVISOR, time.Minute
	return c.apply(Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: t, Request: ids.RequestID(req), Hash: []byte("h"),
		StoredAt: Time(c.now), Deadline: Time(c.now + time.Minute), Keys: []ids.SessionKey{key}, Candidates: named(hosts...)}})
}

// A session whose wake failed on a host that is lost since has no compute: it
// must not use up what the plan allows until that host is back or removed.
func TestFailedWakeOnLostHostDoesNotCountAsAwake(t *testing.T) {
	c := newCell(t)
	c.join("h2")
	plan := Terms{Plan: "free", MaxAwake: 1}
	c.openIn("sa", "r1", plan, "h1")
	c.apply(Entry{WakeFailed: &WakeFailed{Ref: c.ref("sa"), Failure: Failure{Kind: errkind.Unavailable, Reason: "no answer"}}})
	if s := c.s.Session("sa"); s.State != Failed || !s.NeedsStop {
		t.Fatalf("%+v", s)
	}
	if out := c.openIn("sb", "r1", plan, "h2"); out.Session.State != New {
		t.Errorf("while the host holds a lease, %s", StateName(out.Session.State))
	}
	c.lose("h1")
	if out := c.openIn("sc", "r1", plan, "h2"); out.Session.State != Waking {
		t.Errorf("a second session is %s: %s", StateName(out.Session.State), out.Session.Wake.Unplaced)
	}
	if out := c.openIn("sd", "r1", plan, "h2"); out.Session.State != New {
		t.Errorf("a third session is %s, the plan allows one", StateName(out.Session.State))
	}
}

// A host that is removed while it drains is gone, not drained.
func TestRemovedHostIsNotToldToBeDrained(t *testing.T) {
	c := newCell(t)
	c.asleep("sa")
	c.apply(Entry{Drain: &Drain{Host: "h1", On: true, Deadline: Time(c.now + time.Hour)}})
	c.lose("h1")
	from := c.s.OutSeq
	if out := c.apply(Entry{RemoveHost: &RemoveHost{Host: "h1"}}); out.Refused != nil {
		t.Fatal(out.Refused)
	}
	var told []EventKind
	for _, e := range c.s.EventsAfter(from, 10) {
		told = append(told, e.Kind)
	}
	if !slices.Equal(told, []EventKind{HostRemoved}) {
		t.Errorf("told %v", told)
	}
}

// A host tells that it removed a stale disk, and the word comes late: meanwhile
// the session was placed there again and went away again. The host has a disk
// once more, which must be erased with the session.
func TestLateWordOfADroppedDiskForgetsNoNewOne(t *testing.T) {
	c := newCell(t)
	c.join("h2")
	c.asleep("sa")
	wakeOn := func(h, req string) {
		c.apply(Entry{Move: &Move{Session: "sa", Generation: c.ref("sa").Generation, Host: c.s.Session("sa").Host}})
		c.openIn("sa", req, Terms{}, ids.Host(h))
		c.woke("sa", corev1.Origin_ORIGIN_RESUMED)
	}
	sleep := func() {
		s := c.s.Session("sa")
		c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{"sa"}, Reason: "close"}})
		c.apply(Entry{Slept: &Slept{Ref: c.ref("sa"), Manifest: ManifestInfo{ID: s.Manifest + "x", Parent: s.Manifest}}})
	}
	wakeOn("h2", "r2") // the disk of h1 is stale as of now
	late := Dropped{Session: "sa", Generation: c.ref("sa").Generation, Host: "h1", Epoch: c.ref("sa").Epoch}
	sleep()
	wakeOn("h1", "r3")
	sleep()
	wakeOn("h2", "r4")
	c.refused(c.apply(Entry{Dropped: &late}), errkind.StaleEpoch)
	if s := c.s.Session("sa"); !slices.Contains(s.Holders, "h1") {
		t.Errorf("holders %v", s.Holders)
	}
	late.Epoch = c.ref("sa").Epoch
	if out := c.apply(Entry{Dropped: &late}); out.Refused != nil || slices.Contains(c.s.Session("sa").Holders, "h1") {
		t.Errorf("%+v, holders %v", out.Refused, c.s.Session("sa").Holders)
	}
}
