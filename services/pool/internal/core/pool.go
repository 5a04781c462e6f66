package core

import (
	"maps"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

// Pool is all that the leader of one term knows of one declared pool. It is for one goroutine at a time.
type Pool struct {
	spec    Spec
	tpl     Template
	removed bool
	began   time.Time
	caps    Caps
	demand  Demand
	recent  recent
	members map[string]*member
	desk    desk
	// hits and wakes since the term began.
	hits, wakes uint64
}

// New begins a pool in a new term. caps are those that are stored: a host that has not answered in this
// term may have as many. demand is what an earlier leader kept; nil: nothing.
func New(spec Spec, tpl Template, caps Caps, demand *Demand, began time.Time) *Pool {
	p := &Pool{spec: spec, tpl: tpl, began: began, caps: maps.Clone(caps), members: map[string]*member{}, desk: newDesk()}
	if p.caps == nil {
		p.caps = Caps{}
	}
	if demand != nil {
		p.demand = demand.sane()
	}
	p.recent.began = began
	for host := range p.caps {
		p.members[host] = newMember(host)
	}
	return p
}

// Declare changes what the pool should be.
func (p *Pool) Declare(spec Spec, tpl Template) {
	if spec.Tier != p.spec.Tier {
		for _, m := range p.members {
			clear(m.uses)
		}
	}
	p.spec, p.tpl, p.removed = spec, tpl, false
	p.recount()
}

// Remove ends the pool: nothing more is prepared, everything is retired.
func (p *Pool) Remove() {
	p.removed = true
	p.recount()
}

func (p *Pool) recount() {
	for _, m := range p.members {
		m.claimable = -1
	}
}

// Gone reports whether a removed pool has left nothing behind, as far as hosts answer; what waits on one
// that does not is retired when it comes back, by a pool of the same template that is removed again.
func (p *Pool) Gone() bool {
	for _, m := range p.members {
		if m.Presence != Lost && (m.all() > 0 || !m.known && p.caps[m.ID] > 0) {
			return false
		}
	}
	return p.removed
}

// Observe takes in what is known of every host there is; one that is not among them was removed.
func (p *Pool) Observe(hosts []Host, now time.Time) {
	var claimed, missed uint64
	there := map[string]bool{}
	for _, h := range hosts {
		there[h.ID] = true
		m := p.members[h.ID]
		if m == nil {
			m = newMember(h.ID)
			p.members[h.ID] = m
		}
		c, n := m.observe(h, p.spec.Template, p.spec.Tier, now)
		claimed, missed = claimed+c, missed+n
	}
	for id, m := range p.members {
		if !there[id] {
			m.observe(Host{ID: id, Zone: m.Zone, Presence: Lost}, p.spec.Template, p.spec.Tier, now)
		}
		m.tidy(now)
		if !there[id] && p.floor(m, now) == 0 && p.caps[id] == 0 {
			delete(p.members, id)
		}
	}
	p.hits += claimed
	p.wakes += claimed + missed
	p.demand.note(claimed+missed, now)
	p.recent.note(p.goal(now).N, now)
}

// goal of a removed pool is nothing.
func (p *Pool) goal(now time.Time) Goal {
	if p.removed {
		return Goal{0, "the pool was removed"}
	}
	return Want(p.spec, p.demand, p.active(), now)
}

func (p *Pool) active() (n int) {
	for _, m := range p.members {
		n += m.active
	}
	return n
}

// floor is the least that a host's cap can be. What a lost host was told in an earlier term counts until
// no message of then can have an effect.
func (p *Pool) floor(m *member, now time.Time) int {
	return m.floor(p.caps[m.ID], now.Sub(p.began) <= PrepareLimit+ClockMargin)
}

// counted is how many count of the host: what it may have been told to have, or has.
func (p *Pool) counted(m *member, now time.Time) int {
	n := p.floor(m, now)
	if m.Presence != Lost {
		n = max(n, p.caps[m.ID])
	}
	return n
}

// Stored tells that the caps of a plan are stored.
func (p *Pool) Stored(caps Caps) { p.caps = maps.Clone(caps) }

// Begin is called before a preparation is sent. False: it must not be, any more.
func (p *Pool) Begin(s Step, id ids.SandboxID, now time.Time) bool {
	m := p.members[s.Host]
	if m == nil || p.removed || s.Kind != PrepareOne || m.all() >= min(s.Cap, p.caps[s.Host]) || p.cannot(m, now) != "" {
		return false
	}
	if m.sent[id] != nil || m.seen[id] != nil || m.underWay() >= p.spec.InFlight || p.full(now) {
		return false
	}
	m.sent[id] = &sent{began: now, until: now.Add(PrepareLimit + ClockMargin)}
	return true
}

// full reports whether one more might exceed the ceiling, which may be lower than when it was planned.
func (p *Pool) full(now time.Time) bool {
	n := 0
	for _, m := range p.members {
		n += p.floor(m, now)
	}
	return n >= p.spec.Ceiling
}

// End tells what came of it.
func (p *Pool) End(id ids.SandboxID, o Outcome, now time.Time) {
	for _, m := range p.members {
		s := m.sent[id]
		if s == nil {
			continue
		}
		p.end(m, id, s, o, now)
		return
	}
}

func (p *Pool) end(m *member, id ids.SandboxID, s *sent, o Outcome, now time.Time) {
	if o.Made != nil {
		made := *o.Made
		made.ID, made.Template = id, p.spec.Template
		made.MadeAt = m.madeAt(made, nil, now)
		delete(m.sent, id)
		m.seen[id] = &made
		m.added[id] = now
		m.claimable = -1
		m.back = backoff{}
		p.demand.prepared(now.Sub(s.began))
		return
	}
	m.back.failed(s.began, now, o.Failed)
	switch {
	case m.seen[id] != nil:
		delete(m.sent, id)
	case o.Unanswered:
		s.unanswered = true
	default:
		s.failed = now
	}
}

// Retired tells that these are gone, or never were.
func (p *Pool) Retired(host string, gone []ids.SandboxID, now time.Time) {
	if m := p.members[host]; m != nil {
		for _, id := range gone {
			m.gone(id, now)
		}
	}
}

// gone notes that a sandbox is the pool's no more, whatever an older list says.
func (m *member) gone(id ids.SandboxID, now time.Time) {
	delete(m.seen, id)
	delete(m.added, id)
	m.removed[id] = now
	m.claimable = -1
}

// Demand is what to keep for the next leader (JSON), every few minutes.
func (p *Pool) Demand() Demand { return p.demand.clone() }

// ordered are the pool's hosts by name.
func (p *Pool) ordered() []*member {
	out := make([]*member, 0, len(p.members))
	for _, id := range slices.Sorted(maps.Keys(p.members)) {
		out = append(out, p.members[id])
	}
	return out
}
