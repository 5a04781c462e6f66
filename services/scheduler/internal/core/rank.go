package core

import (
	"fmt"
	"slices"

	"github.com/berth-dev/berth/schemas/ids"
)

const (
	// MaxCandidates is how many hosts that may take a session one entry names at most.
	MaxCandidates = 8
	// maxRefused is how many more are named though they may not, for the plan.
	maxRefused = 4
)

// HostFacts is the leader's fresh knowledge of a host: advice for Rank, never
// a reason to break a limit.
type HostFacts struct {
	Alive     bool   // it holds a lease
	Unhealthy string // why it should get no more sessions now
	// Images reports whether an image is unpacked there; nil: none is known to be.
	Images func(ref string) bool
	// Warm is how many warm sandboxes it has under a name of WarmName; nil: none.
	Warm func(name string) uint32
}

// Candidate is a host that the leader proposes for a session.
type Candidate struct {
	Host ids.Host `json:"h"`
	// Ranks are what speaks for it, in the order in which it counts.
	Ranks []string `json:"r,omitempty"`
	// Refused is why the leader would not take it; it is listed in the plan only.
	Refused string `json:"n,omitempty"`
	// Reservation is the pool's of a warm sandbox there; empty: there is none.
	Reservation string `json:"rv,omitempty"`
	// Cold: the pool said that the session is to start cold.
	Cold bool `json:"cold,omitempty"`
}

// ranked is a host with what speaks for it; less is better.
type ranked struct {
	r    *hostRec
	cost uint64 // disk, image, warm, spread, load, and then a draw
	warm uint32
}

// ranker looks at one host after the other and keeps the best.
type ranker struct {
	s     *State
	q     query
	facts func(ids.Host) HostFacts
	group *groupUse
	warm  string // see WarmName
	draw  uint64

	best    [MaxCandidates]ranked
	n       int
	refused []Candidate
}

// Rank returns hosts that are alive, healthy and may take the session, best
// first, at most MaxCandidates, and after them some that may not, for the plan.
// For a session that is not yet known sess has its tenant and key alone, or is
// nil. It draws lots among equals by the session's key, so that sessions that
// are placed at once spread out.
func (s *State) Rank(sess *Session, t Terms, facts func(ids.Host) HostFacts) []Candidate {
	t = sess.Raised(t)
	k := ranker{s: s, q: newQuery(s, sess, &t, EntryVersion), facts: facts, warm: WarmName(&t)}
	if sess != nil {
		k.group, k.draw = s.groups[group{sess.Tenant, t.Plan}], fnv(string(sess.Key))
	}
	for i, r := range s.order {
		k.look(r, uint64(i))
	}
	out := make([]Candidate, 0, k.n+len(k.refused))
	for i := range k.n {
		out = append(out, Candidate{Host: k.best[i].r.id, Ranks: k.ranks(&k.best[i])})
	}
	room := max(maxRefused, MaxCandidates-k.n)
	return append(out, k.refused[:min(room, len(k.refused))]...)
}

func (k *ranker) look(r *hostRec, i uint64) {
	if k.q.check(r) != fits {
		if !r.h.Lost || k.disk(r) == diskHere {
			k.refuse(r, "") // the state says why itself
		}
		return
	}
	c := ranked{r: r, cost: k.cost(r, i)}
	if k.n == MaxCandidates && c.cost >= k.best[k.n-1].cost {
		return // whatever the leader knows of it, eight others are better
	}
	f := k.facts(r.id)
	switch {
	case !f.Alive:
		k.refuse(r, "holds no lease")
		return
	case f.Unhealthy != "":
		k.refuse(r, "is not well: "+f.Unhealthy)
		return
	}
	if k.noImage(f) {
		c.cost |= costImage
	}
	if f.Warm != nil {
		c.warm = f.Warm(k.warm)
	}
	if c.warm == 0 {
		c.cost |= costWarm
	}
	k.keep(c)
}

// refuse lists a host for the plan; the one that has the disk comes first.
func (k *ranker) refuse(r *hostRec, why string) {
	c := Candidate{Host: r.id, Refused: why}
	switch {
	case k.disk(r) == diskHere:
		k.refused = slices.Insert(k.refused, 0, c)
	case len(k.refused) < MaxCandidates:
		k.refused = append(k.refused, c)
	}
}

// How near the disk of a session is to a host.
const (
	diskHere = iota // the newest that there is
	diskHeld        // the host had it before
	diskAway
)

func (k *ranker) disk(r *hostRec) int {
	s := k.q.sess
	switch {
	case s == nil || s.Fresh():
	case s.Dirty && s.Newest == r.id, !s.Dirty && s.Host == r.id:
		return diskHere
	case slices.Contains(s.Holders, r.id):
		return diskHeld
	}
	return diskAway
}

// A cost has, from its highest bit on: how far the disk is, no image, no warm
// one, how many beside it (10 bits), the load (5 bits), a lot (32 bits).
const (
	costImage = 1 << 48
	costWarm  = 1 << 47
	costDisk  = 49
)

// cost is that of a host with the image and a warm sandbox.
func (k *ranker) cost(r *hostRec, i uint64) uint64 {
	c := uint64(k.disk(r)) << costDisk
	c |= uint64(min(k.beside(r), 1<<10-1)) << 37
	c |= k.load(r, 31) << 32
	return c | mix(k.draw^i)>>32
}

func (k *ranker) noImage(f HostFacts) bool {
	if f.Images == nil {
		return true
	}
	if k.q.sess != nil && k.q.sess.ImageDigest != "" && f.Images(k.q.sess.ImageDigest) {
		return false
	}
	return k.q.t.Image == "" || !f.Images(k.q.t.Image)
}

// beside is how many awake sessions of the tenant and plan a host has.
func (k *ranker) beside(r *hostRec) int {
	if k.group == nil || len(k.group.on) == 0 {
		return 0
	}
	return k.group.on[r]
}

// load is how full a host's memory would be, as a part of whole.
func (k *ranker) load(r *hostRec, whole uint64) uint64 {
	used, capacity := k.q.used(r).MemoryBytes>>20+k.q.t.Limits.MemoryBytes>>20, max(r.h.Capacity.MemoryBytes>>20, 1)
	return min(used*whole/capacity, whole)
}

// keep keeps the best, in order.
func (k *ranker) keep(c ranked) {
	if k.n == MaxCandidates && c.cost >= k.best[k.n-1].cost {
		return
	}
	k.n = min(k.n+1, MaxCandidates)
	i := k.n - 1
	for ; i > 0 && k.best[i-1].cost > c.cost; i-- {
		k.best[i] = k.best[i-1]
	}
	k.best[i] = c
}

// Ranks that others look for.
const (
	rankDisk  = "disk"
	rankHeld  = "had the disk"
	rankImage = "image"
)

// ranks are what speaks for a host, in words.
func (k *ranker) ranks(c *ranked) (out []string) {
	switch k.disk(c.r) {
	case diskHere:
		out = append(out, rankDisk)
	case diskHeld:
		out = append(out, rankHeld)
	}
	if c.cost&costImage == 0 {
		out = append(out, rankImage)
	}
	if c.warm > 0 {
		out = append(out, fmt.Sprintf("%d warm", c.warm))
	}
	if k.group != nil {
		out = append(out, fmt.Sprintf("%d of this plan awake", k.beside(c.r)))
	}
	return append(out, fmt.Sprintf("memory %d%% used", k.load(c.r, 100)))
}

// fnv is FNV-1a.
func fnv(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

// mix spreads the bits of a number (splitmix64).
func mix(v uint64) uint64 {
	v += 0x9e3779b97f4a7c15
	v = (v ^ v>>30) * 0xbf58476d1ce4e5b9
	v = (v ^ v>>27) * 0x94d049bb133111eb
	return v ^ v>>31
}
