package core

import (
	"slices"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// member is one host of the pool.
type member struct {
	Host
	// known: it gave its list in this term, so that nothing older can come into being there.
	known bool
	// seen is what is there of the template, in whatever tier.
	seen map[ids.SandboxID]*Sandbox
	// added and removed are what was learned otherwise than by a list, and when: a list that was asked
	// for earlier does not know it.
	added, removed map[ids.SandboxID]time.Time
	sent           map[ids.SandboxID]*sent
	back           backoff
	uses           map[string]Use // by boot
	active         int
	// claimable are those that a session would get; negative: to be counted.
	claimable int
}

// sent is a preparation that is not known to be over.
type sent struct {
	began time.Time
	// unanswered: it may be done, or may be done yet. After until no host begins it.
	unanswered bool
	until      time.Time
	// failed: the host said so; a later list says what is left of it.
	failed time.Time
}

func newMember(id string) *member {
	return &member{Host: Host{ID: id}, seen: map[ids.SandboxID]*Sandbox{}, added: map[ids.SandboxID]time.Time{},
		removed: map[ids.SandboxID]time.Time{}, sent: map[ids.SandboxID]*sent{}, uses: map[string]Use{}, claimable: -1}
}

// observe takes in what is known of the host. It returns how many claims and misses are new.
func (m *member) observe(h Host, tpl string, tier corev1.Tier, now time.Time) (claimed, missed uint64) {
	m.claimable = -1
	if h.Presence == Lost {
		m.lose()
		m.Host = h
		m.Asked = now // a list that was asked for earlier says nothing about what comes back
		return 0, 0
	}
	fresh := h.Asked.After(m.Asked)
	if !fresh {
		h.Asked, h.Heard, h.Warm, h.Uses = m.Asked, m.Heard, nil, nil
	}
	m.Host = h
	if !fresh {
		return 0, 0
	}
	m.known = true
	m.list(h, tpl)
	return m.count(h, tpl, tier)
}

// lose forgets what was there; what was sent and not answered may still come into being.
func (m *member) lose() {
	m.known = false
	clear(m.seen)
	clear(m.added)
	clear(m.removed)
	for id, s := range m.sent {
		if !s.failed.IsZero() {
			delete(m.sent, id)
		}
	}
	m.active = 0
}

func (m *member) list(h Host, tpl string) {
	old := m.seen
	m.seen = make(map[ids.SandboxID]*Sandbox, len(h.Warm))
	for _, s := range h.Warm {
		gone, ok := m.removed[s.ID]
		if s.Template == tpl && !(ok && !h.Asked.After(gone)) {
			s.MadeAt = m.madeAt(s, old[s.ID], h.Heard)
			m.seen[s.ID] = &s
			if m.sent[s.ID] != nil {
				m.sent[s.ID].failed = time.Time{}
			}
		}
	}
	for id, at := range m.added {
		if h.Asked.After(at) {
			delete(m.added, id)
		} else if s := old[id]; s != nil {
			m.seen[id] = s
		}
	}
	for id, at := range m.removed {
		if h.Asked.After(at) {
			delete(m.removed, id)
		}
	}
	m.resolve(old, h.Asked)
}

// madeAt is when a sandbox was made, by the leader's clock as far as it can tell: by that of a host that is
// behind it would be too old as soon as it is made, and be replaced for ever.
func (m *member) madeAt(s Sandbox, was *Sandbox, heard time.Time) time.Time {
	switch sent := m.sent[s.ID]; {
	case was != nil && (was.State == Ready || s.MadeAt.Before(was.MadeAt)):
		return was.MadeAt
	case sent != nil && s.MadeAt.Before(sent.began):
		return sent.began
	case s.MadeAt.After(heard):
		return heard
	}
	return s.MadeAt
}

// resolve ends what was sent and is known now: it was there and is gone, or failed before the list was
// asked for, or was too late to begin by then. What is there and unanswered counts as what is there.
func (m *member) resolve(old map[ids.SandboxID]*Sandbox, asked time.Time) {
	for id, s := range m.sent {
		switch {
		case m.seen[id] != nil && s.unanswered:
			delete(m.sent, id)
		case m.seen[id] == nil && (old[id] != nil || !s.failed.IsZero() && asked.After(s.failed) || asked.After(s.until)):
			delete(m.sent, id)
		}
	}
}

// count finds what is new in the host's counters. The first that a leader sees of a host say nothing,
// unless it saw the host's earlier boot.
func (m *member) count(h Host, tpl string, tier corev1.Tier) (claimed, missed uint64) {
	m.active = 0
	var now Use
	for _, u := range h.Uses {
		if u.Template != tpl {
			continue
		}
		m.active += u.Active
		if u.Tier == tier {
			now = u
		}
	}
	was, ok := m.uses[h.Boot]
	if ok || len(m.uses) > 0 {
		claimed, missed = less(now.Claimed, was.Claimed), less(now.Missed, was.Missed)
	}
	m.uses = map[string]Use{h.Boot: now}
	return claimed, missed
}

func less(now, was uint64) uint64 {
	if now < was {
		return 0
	}
	return now - was
}

// tidy ends what was sent to a lost host so long ago that it would not begin it any more.
func (m *member) tidy(now time.Time) {
	for id, s := range m.sent {
		if m.Presence == Lost && now.After(s.until) {
			delete(m.sent, id)
		}
	}
}

// all is the number of what is there or may come into being, whatever its state.
func (m *member) all() int {
	n := len(m.seen)
	for id := range m.sent {
		if m.seen[id] == nil {
			n++
		}
	}
	return n
}

// floor is the least that the host's cap can be now. A host that gave no list in this term may have
// what an earlier one allowed.
func (m *member) floor(stored int, lostCounts bool) int {
	if m.known || m.Presence == Lost && !lostCounts {
		return m.all()
	}
	return max(stored, m.all())
}

// answers reports whether the host's list is of now.
func (m *member) answers(now time.Time) bool {
	return m.Presence == Alive && m.known && now.Sub(m.Heard) <= HeardFor
}

// underWay is how many preparations are, or may be.
func (m *member) underWay() int {
	n := 0
	for _, s := range m.seen {
		if s.State == Preparing {
			n++
		}
	}
	for id := range m.sent {
		if m.seen[id] == nil {
			n++
		}
	}
	return n
}

// coming is how many preparations will likely end well and are not in the list.
func (m *member) coming() int {
	n := 0
	for id, s := range m.sent {
		if m.seen[id] == nil && !s.unanswered && s.failed.IsZero() {
			n++
		}
	}
	return n
}

// sandboxes of the host, oldest first.
func (m *member) sandboxes() []*Sandbox {
	out := make([]*Sandbox, 0, len(m.seen))
	for _, s := range m.seen {
		out = append(out, s)
	}
	slices.SortFunc(out, older)
	return out
}

func older(a, b *Sandbox) int {
	if c := a.MadeAt.Compare(b.MadeAt); c != 0 {
		return c
	}
	if a.ID < b.ID {
		return -1
	}
	return 1
}
