package core

import (
	"fmt"
	"slices"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// moveOff takes a session at rest off its host, which has nothing of it that is
// not saved: its next wake gets the disk from the store, or is on the host that
// has what is unsaved. The host keeps an image until it is told otherwise.
func (x *tx) moveOff(m *Move) Outcome {
	old := x.s.Session(m.Session)
	switch {
	case old == nil || old.Generation != m.Generation:
		return refuse(errkind.StaleEpoch, "session %s is not at generation %s", m.Session, m.Generation)
	case old.Host != m.Host || old.Host == "":
		return Outcome{Session: old}
	case !slices.Contains(tMove.From, old.State) || old.NeedsStop:
		return refuse(errkind.Conflict, "session %s is not at rest on host %s", m.Session, m.Host)
	case !old.Terms.Ephemeral && (old.Newest == m.Host || !old.Dirty && !old.Fresh() && old.Manifest == ""):
		return refuse(errkind.Conflict, "not all of session %s is saved", m.Session)
	}
	s := x.edit(old)
	x.move(s, tMove)
	s.Holders = s.holders()
	s.Host, s.Boot = "", ""
	x.put(s)
	return Outcome{Session: s}
}

// save has the host that has what is unsaved of a session at rest save it.
func (x *tx) save(c *Save) Outcome {
	old, no := x.exact(c.Ref)
	if no != nil {
		return *no
	}
	switch {
	case old.State == Sleeping || !old.Dirty:
		return Outcome{Session: old}
	case !slices.Contains(tSave.From, old.State) || old.NeedsStop:
		return refuse(errkind.Conflict, "session %s is not at rest", c.Session)
	case old.Newest != c.Host:
		return refuse(errkind.Conflict, "what is unsaved of session %s is on host %s", c.Session, old.Newest)
	case x.s.lost(c.Host):
		return refuse(errkind.Unavailable, "host %s holds no lease", c.Host)
	}
	s := x.edit(old)
	sl := &Sleep{Reason: ReasonDrain, Force: true, Save: true, Pause: s.State == Paused}
	x.quietly(s, tSave)
	s.Sleep, s.Failure = sl, nil
	if s.Host != c.Host { // it was to wake elsewhere, and that came to nothing
		s.Host, s.Boot, s.Epoch = c.Host, x.s.Host(c.Host).Boot, x.epoch()
	}
	x.put(s)
	return Outcome{Session: s}
}

// removeHost takes a host out for good. What was on it alone is lost, which
// needs to be said.
func (x *tx) removeHost(c *RemoveHost) Outcome {
	r := x.s.hosts[c.Host]
	switch {
	case x.s.gone[c.Host] != nil:
		return Outcome{}
	case r == nil || r.h == nil:
		return refuse(errkind.NotFound, "host %s never joined", c.Host)
	case !r.h.Lost && !r.empty():
		return refuse(errkind.Conflict, "host %s holds a lease and has %s; drain it first", c.Host, Count(max(r.u.Sessions, r.u.Unsaved, r.u.Held), "session"))
	case r.u.Unsaved > 0 && !c.LoseUnsaved:
		return refuse(errkind.Conflict, "the newest files of %s are on host %s alone: bring it back, or say that they may be lost", Count(r.u.Unsaved, "session"), c.Host)
	}
	var out Outcome
	for _, s := range x.s.where(func(s *Session) bool { return s.names(c.Host) }) {
		x.without(x.edit(s), c.Host, &out)
	}
	x.forgetErasures(c.Host)
	boot := r.h.Boot
	x.s.dropHost(c.Host)
	x.s.gone[c.Host] = &GoneHost{ID: c.Host, At: x.now}
	x.push(&Event{Kind: HostRemoved, Host: c.Host, Boot: boot})
	return out
}

// names reports whether a session has to do with a host at all. From does not count: it says where a
// session was, also when that host was removed meanwhile.
func (s *Session) names(h ids.Host) bool {
	return s.Host == h || s.Newest == h || slices.Contains(s.Holders, h) || s.leftOn(h)
}

// without takes a removed host out of a session.
func (x *tx) without(s *Session, h ids.Host, out *Outcome) {
	ref := Ref{s.Key, s.Generation, s.Epoch}
	s.dropLeft(h)
	if slices.Contains(s.Holders, h) {
		x.dropHolder(s, h)
	}
	lost := s.Newest == h
	owned := s.Host == h
	if owned {
		s.Host, s.Boot, s.NeedsStop = "", "", false
	}
	if lost {
		s.unsaved(false)
		s.Behind = s.Manifest != ""
	}
	switch {
	case lost && s.Manifest == "" && s.State != Deleting:
		out.Lost = append(out.Lost, ref)
		s.Host, s.Boot = "", ""
		x.move(s, tNothingLeft)
		x.fail(s, Failure{Kind: errkind.DataLoss, Reason: "its files were never saved, and host " + h.String() + ", which had them, was removed"})
		s.NeedsStop = false
	case owned && s.State == Waking && s.Fresh():
		x.move(s, tHostGoneNew)
	case owned && s.State == Waking:
		x.move(s, tHostGone)
	default:
		x.move(s, tForget)
	}
	if s.Behind && lost {
		out.Rewound = append(out.Rewound, ref)
	}
	x.put(s)
}

// forgetErasures counts a removed host as having erased what it had. If no other
// host cleans the store of the generation, passErasure names one.
func (x *tx) forgetErasures(h ids.Host) {
	var hit []*Tombstone
	for k, t := range x.s.tombs {
		if k == t.Key && slices.ContainsFunc(t.Erase, func(e Erasure) bool { return e.Host == h && !e.Done }) {
			hit = append(hit, t)
		}
	}
	slices.SortFunc(hit, func(a, b *Tombstone) int { return compare(a.Key, b.Key) })
	for _, t := range hit {
		gens := map[Ref]bool{}
		for _, e := range t.Erase {
			if e.Host == h && !e.Done && !gens[e.Ref(t)] {
				gens[e.Ref(t)] = true
				x.passErasure(t.Key, e)
				x.erased(x.s.tombs[t.Key], &Removed{Ref: e.Ref(t), Erased: true, Hosts: []ids.Host{h}})
			}
		}
	}
}

// Removed reports whether a host was taken out of the cell for good.
func (s *State) Removed(h ids.Host) bool { return s.gone[h] != nil }

// Count is a number of things in words.
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
