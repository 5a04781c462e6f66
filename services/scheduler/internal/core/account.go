package core

import (
	"slices"

	"github.com/berth-dev/berth/schemas/ids"
)

// hostRec is a host with what sessions hold of it, which is derived.
type hostRec struct {
	id    ids.Host
	h     *Host // nil: it never joined
	u     Usage
	alone []ids.Host // itself; shared by the sessions that no other host holds
}

// group is whose sessions are counted together.
type group struct {
	tenant ids.Tenant
	plan   string
}

// groupUse is how many sessions of a group hold compute, and where.
type groupUse struct {
	awake int
	on    map[*hostRec]int
}

// rec returns the record of a host, a new one if it is not known.
func (s *State) rec(id ids.Host) *hostRec {
	r := s.hosts[id]
	if r == nil {
		r = &hostRec{id: id, alone: []ids.Host{id}}
		s.hosts[id] = r
	}
	return r
}

// setHost stores a host; order stays sorted.
func (s *State) setHost(h *Host) *hostRec {
	r := s.rec(h.ID)
	if r.h == nil {
		i, _ := slices.BinarySearchFunc(s.order, h.ID, func(r *hostRec, id ids.Host) int { return compare(r.id, id) })
		s.order = slices.Insert(s.order, i, r)
	}
	r.h = h
	return r
}

// dropHost forgets a host of which nothing is left.
func (s *State) dropHost(id ids.Host) {
	s.order = slices.DeleteFunc(s.order, func(r *hostRec) bool { return r.id == id })
	delete(s.hosts, id)
}

// lost reports whether a host holds no lease for certain.
func (s *State) lost(id ids.Host) bool {
	r := s.hosts[id]
	return r == nil || r.h == nil || r.h.Lost
}

// account adds a session to what is derived, or takes it away.
func (x *tx) account(s *Session, sign int) {
	if s == nil {
		return
	}
	if s.Host != "" {
		r := x.s.rec(s.Host)
		r.u.Sessions += sign
		if s.holds() {
			r.u.Held += sign
			r.u.add(s.Terms.Limits, sign)
			x.s.countGroup(s, r, sign)
		}
		x.mark(r)
	}
	if s.Newest != "" {
		r := x.s.rec(s.Newest)
		r.u.Unsaved += sign
		x.mark(r)
	}
	for _, l := range s.Left {
		r := x.s.rec(l.Host)
		r.u.Held += sign
		r.u.add(l.Limits, sign)
		x.mark(r)
	}
}

func (u *Usage) add(l Limits, sign int) {
	if sign > 0 {
		u.MemoryBytes += l.MemoryBytes
		u.CPUMillis += uint64(l.CPUMillis)
		u.PIDs += uint64(l.PIDs)
		u.DiskBytes += l.DiskBytes
		return
	}
	u.MemoryBytes -= l.MemoryBytes
	u.CPUMillis -= uint64(l.CPUMillis)
	u.PIDs -= uint64(l.PIDs)
	u.DiskBytes -= l.DiskBytes
}

func (s *State) countGroup(sess *Session, r *hostRec, sign int) {
	k := group{sess.Tenant, sess.Terms.Plan}
	g := s.groups[k]
	if g == nil {
		g = &groupUse{on: map[*hostRec]int{}}
		s.groups[k] = g
	}
	g.awake += sign
	if g.on[r] += sign; g.on[r] == 0 {
		delete(g.on, r)
	}
	if g.awake == 0 {
		delete(s.groups, k)
	}
}

// mark has told whether a draining host is empty once the entry is applied.
func (x *tx) mark(r *hostRec) {
	if r.h != nil && r.h.Draining && !r.h.Drained && !slices.Contains(x.draining, r) {
		x.draining = append(x.draining, r)
	}
}

// tellDrained tells, once in each drain, that nothing is left on a host.
func (x *tx) tellDrained() {
	if x.v < handoffSince {
		return
	}
	slices.SortFunc(x.draining, func(a, b *hostRec) int { return compare(a.id, b.id) })
	for _, r := range x.draining {
		if x.s.hosts[r.id] != r || r.h == nil || !r.h.Draining || r.h.Drained || !r.empty() {
			continue // or removed by this very entry
		}
		n := *r.h
		n.Drained = true
		r.h = &n
		x.push(&Event{Kind: HostDrained, Host: n.ID, Boot: n.Boot})
	}
}

// empty reports whether no session has its epoch, its newest files or left
// compute there.
func (r *hostRec) empty() bool { return r.u.Sessions == 0 && r.u.Unsaved == 0 && r.u.Held == 0 }
