package core

import (
	"fmt"
	"slices"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
)

// Plan is one placement, or what one would come to: printable, and final.
type Plan struct {
	Host   ids.Host  `json:"h,omitempty"` // empty: no host may take it
	Reason string    `json:"why"`
	Rows   []PlanRow `json:"rows,omitempty"` // in the order in which they count
	More   int       `json:"more,omitempty"` // hosts that are not listed
}

// PlanRow is one host of a plan.
type PlanRow struct {
	Host    ids.Host `json:"h"`
	Refused string   `json:"n,omitempty"` // why it may not; empty: it may
	Ranks   []string `json:"r,omitempty"`
}

// The sorts of reason for which there is no room; each is told once in a wake.
const (
	noHost  = "host"
	noRoom  = "room"
	noFiles = "disk"
	noPlan  = "plan"
)

// Explain says what a wake of the session would get now.
func (s *State) Explain(sess *Session, facts func(ids.Host) HostFacts) Plan {
	t := *sess.Terms
	if sess.Wake != nil {
		t = *sess.Wake.Terms
	}
	t = sess.Raised(t)
	q := newQuery(s, sess, &t, EntryVersion)
	p, _ := s.plan(&q, s.Rank(sess, t, facts))
	return p
}

// plan takes the first of the named hosts that may take the session, and says
// which sort of reason is in the way if there is none.
func (s *State) plan(q *query, named []Candidate) (Plan, string) {
	p, sort := Plan{Rows: make([]PlanRow, 0, len(named))}, noHost
	limited := s.limited(q, q.sess.Tenant)
	var no []string
	for _, c := range named {
		r := s.hosts[c.Host]
		if r == nil || r.h == nil {
			continue
		}
		row := PlanRow{Host: c.Host, Ranks: c.Ranks, Refused: c.Refused}
		if row.Refused == "" {
			row.Refused, sort = q.why(r, q.check(r)), noRoom
		}
		p.Rows = append(p.Rows, row)
		switch {
		case row.Refused == notNamed:
			no = append(no, c.Host.String()+row.Refused)
			p.Rows[len(p.Rows)-1].Refused = "holds no lease"
		case row.Refused != "":
			no = append(no, c.Host.String()+" "+row.Refused)
		case p.Host == "" && limited == "":
			p.Host, p.Reason = c.Host, s.reason(q, r, no)
			if q.v >= poolSince {
				p.Reason += c.warmth()
			}
		}
	}
	p.More = max(len(s.order)-len(p.Rows), 0)
	if p.Host != "" {
		return p, ""
	}
	return s.without(p, q, no, limited, sort)
}

// without completes the plan of a session for which there is no host.
func (s *State) without(p Plan, q *query, no []string, limited, sort string) (Plan, string) {
	why := s.waitsFor(q)
	switch {
	case limited != "":
		p.Reason, sort = limited, noPlan
	case why != "" && q.v >= handoffSince:
		p.Reason, sort = strings.Join(append([]string{why}, no...), "; "), noFiles
	case len(no) == 0:
		p.Reason = "no host holds a lease"
	default:
		p.Reason = strings.Join(no, "; ")
	}
	return p, sort
}

// waitsFor says which host alone has a session's files, when it cannot be had.
func (s *State) waitsFor(q *query) string {
	switch {
	case q.only == "":
		return ""
	case s.lost(q.only) && q.sess.Manifest == "":
		return fmt.Sprintf("its files were never saved and are on %s alone, which is lost", q.only)
	case s.lost(q.only):
		return fmt.Sprintf("its newest files are on %s alone, which holds no lease", q.only)
	}
	return ""
}

// reason says why a host takes the session; no is why others before it do not.
func (s *State) reason(q *query, r *hostRec, no []string) string {
	capacity, used := r.h.Capacity.MemoryBytes, q.used(r).MemoryBytes
	if q.v < handoffSince {
		used = r.u.MemoryBytes
	}
	free := fmt.Sprintf("%s of %s of memory free", size(capacity-min(used, capacity)), size(capacity))
	sess := q.sess
	switch {
	case sess.Fresh():
		return fmt.Sprintf("%s offers %s; %s", r.id, tierName(q.t), free)
	case sess.Newest == r.id, sess.Host == r.id && !sess.Dirty:
		return fmt.Sprintf("%s has the disk; %s", r.id, free)
	case sess.Dirty && q.v >= handoffSince:
		return fmt.Sprintf("%s gets the last snapshot from the store, since %s, which has newer files, is lost; %s", r.id, sess.Newest, free)
	case len(no) == 0 && sess.Host == "":
		no = []string{"no host has it"}
	case len(no) == 0:
		no = []string{fmt.Sprintf("%s, which has the disk, has no room for it", sess.Host)}
	}
	return fmt.Sprintf("%s gets the disk from the store; %s; %s", r.id, no[0], free)
}

// named are the candidates of an entry. Older formats had hosts alone.
func (x *tx) named(c []Candidate, alive []ids.Host) []Candidate {
	if x.v >= handoffSince {
		return c
	}
	c = make([]Candidate, 0, len(alive))
	for _, h := range alive {
		c = append(c, Candidate{Host: h})
	}
	return c
}

// ordered puts the host that has the disk first, and the one that just said
// that it has no room last.
func (x *tx) ordered(s *Session, named []Candidate) []Candidate {
	at := func(h ids.Host) int {
		return slices.IndexFunc(named, func(c Candidate) bool { return c.Host == h })
	}
	disk := s.Host
	if x.v >= handoffSince && s.Dirty {
		disk = s.Newest
	}
	if disk != "" && !s.Fresh() {
		if i := at(disk); i > 0 {
			named = slices.Concat(named[i:i+1], named[:i], named[i+1:])
		} else if i < 0 {
			named = slices.Concat([]Candidate{{Host: disk, Refused: notNamed}}, named)
		}
	}
	if i := at(x.avoid); i >= 0 && named[i].Refused == "" {
		named = slices.Concat(named[:i], named[i+1:], named[i:i+1])
	}
	return named
}

const notNamed = ", which has the disk, holds no lease"
