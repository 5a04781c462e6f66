package core

import (
	"slices"

	"github.com/berth-dev/berth/schemas/ids"
)

// Unsaved is how many sessions have their newest files on a host alone.
func (s *State) Unsaved(h ids.Host) int { return s.Usage(h).Unsaved }

// Awake is how many sessions of a tenant and plan hold compute. What a failed
// wake left on a host that is lost was stopped with it.
func (s *State) Awake(t ids.Tenant, plan string) int {
	g := s.groups[group{t, plan}]
	if g == nil {
		return 0
	}
	n := g.awake
	for r, c := range g.on {
		if s.lost(r.id) {
			n -= c
		}
	}
	return n
}

// OnHost returns the sessions of which something is on a host: that it owns,
// whose newest files it has, or of which compute may be left; in order of key.
func (s *State) OnHost(h ids.Host) []*Session {
	if r := s.hosts[h]; r == nil || r.empty() {
		return nil
	}
	return s.where(func(sess *Session) bool {
		return sess.Host == h || sess.Newest == h || sess.leftOn(h)
	})
}

// Stale returns the sessions of which a host may have a disk that is older
// than what is saved, in order of key.
func (s *State) Stale(h ids.Host) []*Session {
	return s.where(func(sess *Session) bool {
		return sess.Host != h && sess.Newest != h && slices.Contains(sess.Holders, h)
	})
}

func (s *State) where(ok func(*Session) bool) (out []*Session) {
	for _, sess := range s.sessions {
		if ok(sess) {
			out = append(out, sess)
		}
	}
	slices.SortFunc(out, func(a, b *Session) int { return compare(a.Key, b.Key) })
	return out
}

// Lefts returns what earlier epochs may have left, in order of key.
func (s *State) Lefts() (out []Pair) {
	for _, sess := range s.where(func(sess *Session) bool { return len(sess.Left) > 0 }) {
		for _, l := range sess.Left {
			out = append(out, Pair{sess, l})
		}
	}
	return out
}

func (s *Session) leftOn(h ids.Host) bool {
	return slices.ContainsFunc(s.Left, func(l Left) bool { return l.Host == h })
}

// TellRestored reports whether a wake from Manifest must say as of when: what
// was written after it is lost, or on a disk that cannot be had.
func (s *Session) TellRestored() bool { return s.Dirty || s.Behind }
