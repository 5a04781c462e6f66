package core

import (
	"github.com/berth-dev/berth/schemas/ids"
)

// HostFacts is the leader's fresh knowledge of a host: advice for Rank, never
// a reason to break a limit.
type HostFacts struct {
	Alive     bool   // it holds a lease
	Unhealthy string // why it should get no more sessions now
	// Images reports whether an image is unpacked there; nil: none is known to be.
	Images func(ref string) bool
	// Warm is how many warm sandboxes of a template it has; nil: none.
	Warm func(template string) uint32
}

// Candidate is a host that the leader proposes for a session.
type Candidate struct {
	Host ids.Host `json:"h"`
	// Ranks are what speaks for it, in the order in which it counts.
	Ranks []string `json:"r,omitempty"`
	// Refused is why the leader would not take it; it is listed in the plan only.
	Refused string `json:"n,omitempty"`
}

// Plan is one placement, or what one would come to: printable, and final.
type Plan struct {
	Host   ids.Host  `json:"h,omitempty"` // empty: no host may take it
	Reason string    `json:"why"`
	Rows   []PlanRow `json:"rows,omitempty"` // in the order in which they were looked at
	More   int       `json:"more,omitempty"` // hosts that are not listed
}

// PlanRow is one host of a plan.
type PlanRow struct {
	Host    ids.Host `json:"h"`
	Refused string   `json:"n,omitempty"` // why it may not; empty: it may
	Ranks   []string `json:"r,omitempty"`
}

// Rank returns hosts that are alive, healthy and may take the session, best
// first, at most MaxCandidates, and after them some that may not, for the plan.
// sess may be nil (not yet known).
func (s *State) Rank(sess *Session, t Terms, facts func(ids.Host) HostFacts) []Candidate {
	var out []Candidate
	for _, h := range s.Candidates(sess, t, func(h ids.Host) bool { return facts(h).Alive }) {
		out = append(out, Candidate{Host: h})
	}
	return out
}

// Explain says what a wake of the session would get now.
func (s *State) Explain(sess *Session, facts func(ids.Host) HostFacts) Plan {
	return Plan{Reason: "no host holds a lease"}
}

// named are the candidates of an entry; older formats had hosts alone.
func (x *tx) named(c []Candidate, alive []ids.Host) []Candidate {
	if x.v >= handoffSince {
		return c
	}
	c = nil
	for _, h := range alive {
		c = append(c, Candidate{Host: h})
	}
	return c
}

func hostsOf(c []Candidate) (out []ids.Host) {
	for _, v := range c {
		if v.Refused == "" {
			out = append(out, v.Host)
		}
	}
	return out
}
