package core

import (
	"fmt"
	"slices"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
)

// MaxCandidates is how many hosts one entry names at most.
const MaxCandidates = 8

// Candidates returns the hosts out of alive that may take the session, best
// first, for an entry that places it. s may be nil (not yet known).
func (s *State) Candidates(sess *Session, t Terms, alive func(ids.Host) bool) []ids.Host {
	var out []ids.Host
	for _, h := range s.Hosts() {
		if !alive(h.ID) {
			continue
		}
		if why := s.unfit(sess, t, h); why == "" || len(s.hosts) <= MaxCandidates {
			out = append(out, h.ID)
		}
	}
	slices.SortStableFunc(out, func(a, b ids.Host) int {
		switch fa, fb := s.free(a), s.free(b); {
		case fa > fb:
			return -1
		case fa < fb:
			return 1
		}
		return 0
	})
	return out[:min(len(out), MaxCandidates)]
}

func (s *State) free(h ids.Host) uint64 {
	host, used := s.hosts[h], s.usage[h].MemoryBytes
	if host == nil || used > host.Capacity.MemoryBytes {
		return 0
	}
	return host.Capacity.MemoryBytes - used
}

// unfit says in words why a host may not take a session; empty when it may.
func (s *State) unfit(sess *Session, t Terms, h *Host) string {
	u := s.usage[h.ID]
	cpu := uint64(h.Capacity.CPUMillis) * uint64(max(h.CPUPercent, 100)) / 100
	switch {
	case h.Lost:
		return "holds no lease"
	case h.Draining:
		return "is draining"
	case !slices.Contains(h.Tiers, t.Tier):
		return fmt.Sprintf("does not offer tier %s", tierName(t))
	case sess != nil && sess.Host != "" && !sess.Fresh() && sess.Host != h.ID:
		return fmt.Sprintf("does not have the disk, which is on %s", sess.Host)
	}
	if sess != nil && sess.holds() && sess.Host == h.ID { // its own share is free to itself
		u.add(sess, -1)
	}
	switch {
	case u.MemoryBytes+t.Limits.MemoryBytes > h.Capacity.MemoryBytes:
		return fmt.Sprintf("has %s of memory free, %s are needed", size(h.Capacity.MemoryBytes-min(u.MemoryBytes, h.Capacity.MemoryBytes)), size(t.Limits.MemoryBytes))
	case cpu > 0 && u.CPUMillis+uint64(t.Limits.CPUMillis) > cpu:
		return fmt.Sprintf("has promised %d of %d thousandths of a core, %d are needed", u.CPUMillis, cpu, t.Limits.CPUMillis)
	}
	return ""
}

// place gives a waiting session a host and an epoch, or notes why it cannot.
func (x *tx) place(s *Session, alive []ids.Host) {
	t := tPlace
	if s.State == Waking {
		t = tReplaceHost
	}
	host, why := x.choose(s, alive)
	if host == nil {
		x.unplaceable(s, why)
		return
	}
	x.move(s, t)
	s.Host, s.Boot, s.Epoch, s.Terms = host.ID, host.Boot, x.epoch(), s.Wake.Terms
	s.Failure, s.Warned, s.NeedsStop = nil, 0, false
	w := *s.Wake
	w.Attempt++
	w.Unplaced = ""
	s.Wake = &w
	x.emit(s, Placed, func(e *Event) { e.Reason, e.Request = why, w.Request })
}

func (x *tx) choose(s *Session, alive []ids.Host) (*Host, string) {
	var no []string
	for _, id := range alive {
		h := x.s.hosts[id]
		if h == nil {
			continue
		}
		why := x.s.unfit(s, s.Wake.Terms, h)
		if why == "" {
			return h, x.reason(s, h)
		}
		no = append(no, fmt.Sprintf("%s %s", id, why))
	}
	if s.Host != "" && !s.Fresh() && !slices.Contains(alive, s.Host) {
		no = append(no, fmt.Sprintf("%s, which has the disk, holds no lease", s.Host))
	}
	if len(no) == 0 {
		return nil, "no host holds a lease"
	}
	return nil, strings.Join(no, "; ")
}

func (x *tx) reason(s *Session, h *Host) string {
	free := fmt.Sprintf("%s of %s of memory free", size(x.s.free(h.ID)), size(h.Capacity.MemoryBytes))
	if s.Host == h.ID && !s.Fresh() {
		return fmt.Sprintf("%s has the disk; %s", h.ID, free)
	}
	return fmt.Sprintf("%s offers %s; %s", h.ID, tierName(s.Wake.Terms), free)
}

// unplaceable notes why there is no room; told once for each reason.
func (x *tx) unplaceable(s *Session, why string) {
	told := s.Wake.Unplaced == why
	w := *s.Wake
	w.Unplaced = why
	s.Wake = &w
	switch {
	case s.State != Waking:
		x.move(s, tUnplaceable)
	case s.Fresh():
		x.move(s, tBackToNew)
	default:
		x.move(s, tBackToAsleep)
	}
	if !told {
		x.emit(s, Unplaceable, func(e *Event) { e.Reason, e.RetryUntil, e.Request = why, w.Deadline, w.Request })
	}
}

func tierName(t Terms) string {
	return strings.ToLower(strings.TrimPrefix(t.Tier.String(), "TIER_"))
}

func size(b uint64) string {
	if b >= 1<<30 {
		return fmt.Sprintf("%.1f GiB", float64(b)/(1<<30))
	}
	return fmt.Sprintf("%d MiB", b>>20)
}
