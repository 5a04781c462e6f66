package core

import (
	"fmt"
	"testing"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// A burst of opens queues: memory is never promised twice, a plan never has
// more awake than it may, and everybody gets a turn.
func TestBurstQueuesAndNeverOvercommits(t *testing.T) {
	c := newCell(t)
	c.apply(Entry{HostLost: &HostLost{Host: "h1", Boot: "b1"}})
	for i := range 3 {
		c.apply(Entry{Join: &Host{ID: ids.Host(fmt.Sprint("x", i)), Boot: "b1", Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR},
			Capacity: Limits{MemoryBytes: 10 << 20, CPUMillis: 1000}, CPUPercent: 400}})
	}
	terms := Terms{Tier: corev1.Tier_TIER_GVISOR, Limits: Limits{MemoryBytes: 1 << 20, CPUMillis: 300}, Plan: "p", MaxAwake: 25}
	var keys []ids.SessionKey
	for i := range 100 {
		k := ids.SessionKey(fmt.Sprintf("s%03d", i))
		keys = append(keys, k)
		c.apply(Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: terms, Request: "r1", Keys: []ids.SessionKey{k}, Deadline: 1 << 62,
			Candidates: c.s.Rank(&Session{Tenant: "acme", Key: k}, terms, allAlive)}})
		c.withinLimits()
	}
	if n := c.s.Awake("acme", "p"); n != 25 {
		t.Errorf("%d are awake, 25 may be", n)
	}
	for round := 0; c.count(Asleep) < len(keys); round++ {
		if round > len(keys) {
			t.Fatalf("%d still wait", len(keys)-c.count(Asleep))
		}
		for _, k := range keys {
			switch s := c.s.Session(k); s.State {
			case Waking:
				c.woke(k, corev1.Origin_ORIGIN_CREATED)
			case Active:
				c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{k}}})
				c.apply(Entry{Slept: &Slept{Ref: c.ref(k), Manifest: ManifestInfo{ID: "m"}}})
			case New:
				c.apply(Entry{Place: &Place{Session: k, Generation: s.Generation, Candidates: c.s.Rank(s, terms, allAlive)}})
			}
			c.withinLimits()
		}
	}
}

func (c *cell) withinLimits() {
	c.t.Helper()
	for _, h := range c.s.Hosts() {
		if u := c.s.Usage(h.ID); u.MemoryBytes > h.Capacity.MemoryBytes || h.CPUPercent > 0 && u.CPUMillis > 4*uint64(h.Capacity.CPUMillis) {
			c.t.Fatalf("host %s of %+v has promised %+v", h.ID, h.Capacity, u)
		}
	}
	if n := c.s.Awake("acme", "p"); n > 25 {
		c.t.Fatalf("%d are awake, 25 may be", n)
	}
}

func (c *cell) count(st corev1.State) (n int) {
	for _, s := range c.s.Sessions() {
		if s.State == st {
			n++
		}
	}
	return n
}

// The state takes the first host that Rank gives, so that the plan is what was
// meant; and sessions that come at once are spread.
func TestStateTakesWhatRankGives(t *testing.T) {
	s, index := Fill(40, 200)
	on := map[ids.Host]int{}
	for i := range 120 {
		o := FillOpen(i, "again", nil)
		o.Candidates = s.Rank(s.Session(FillKey(i)), o.Terms, func(h ids.Host) HostFacts { return HostFacts{Alive: h != FillHost(3)} })
		if len(o.Candidates) > MaxCandidates+maxRefused || o.Candidates[0].Host != FillHost(i%40) && i%40 != 3 {
			t.Fatalf("session %d: %+v", i, o.Candidates)
		}
		index++
		out := s.Apply(index, Entry{Open: o})
		if out.Session.Host != o.Candidates[0].Host {
			t.Fatalf("session %d on %s, not as in %+v: %s", i, out.Session.Host, o.Candidates, out.Session.Wake.Unplaced)
		}
		on[out.Session.Host]++
	}
	if on[FillHost(3)] != 0 || len(on) != 39 {
		t.Errorf("on %v", on)
	}
	fresh := map[ids.Host]int{}
	for i := range 39 { // all ranked before any is placed
		n := FillOpen(1000+i, "new", nil)
		fresh[s.Rank(&Session{Tenant: "tenant-x", Key: n.Keys[0]}, n.Terms, allAlive)[0].Host]++
	}
	if len(fresh) < 15 {
		t.Errorf("39 at once go to %d hosts: %v", len(fresh), fresh)
	}
}
