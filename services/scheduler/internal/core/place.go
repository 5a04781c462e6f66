package core

import (
	"cmp"
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
		own := sess != nil && sess.Host == h.ID
		if own || len(s.hosts) <= MaxCandidates || s.unfit(sess, &t, h, EntryVersion) == "" {
			out = append(out, h.ID)
		}
	}
	slices.SortStableFunc(out, func(a, b ids.Host) int { return cmp.Compare(s.free(b), s.free(a)) })
	if sess != nil && !sess.Fresh() {
		out = first(out, sess.Host)
	}
	return out[:min(len(out), MaxCandidates)]
}

// first puts h, if it is among the hosts, before the others.
func first(hosts []ids.Host, h ids.Host) []ids.Host {
	i := slices.Index(hosts, h)
	if i <= 0 {
		return hosts
	}
	return slices.Concat([]ids.Host{h}, hosts[:i], hosts[i+1:])
}

func (s *State) free(h ids.Host) uint64 {
	host, used := s.hosts[h], s.usage[h].MemoryBytes
	if host == nil || used > host.Capacity.MemoryBytes {
		return 0
	}
	return host.Capacity.MemoryBytes - used
}

// unfit says in words why a host may not take a session; empty when it may. v
// is the format of the entry that asks.
func (s *State) unfit(sess *Session, t *Terms, h *Host, v int) string {
	u := s.usage[h.ID]
	cpu := uint64(h.Capacity.CPUMillis) * uint64(max(h.CPUPercent, 100)) / 100
	switch {
	case h.Lost:
		return "holds no lease"
	case h.Draining:
		return "is draining"
	case !slices.Contains(h.Tiers, t.Tier):
		return fmt.Sprintf("does not offer tier %s", tierName(t))
	case sess != nil && sess.Host != "" && sess.Host != h.ID && (sess.bound() || v < movesSince && !sess.Fresh()):
		return fmt.Sprintf("does not have the disk, which is on %s", sess.Host)
	case sess != nil && len(sess.Holders) >= MaxHolders && !slices.Contains(sess.Holders, h.ID):
		return fmt.Sprintf("would be one more than the %d hosts that may have had the disk", MaxHolders)
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
func (x *tx) place(s *Session, named []Candidate) {
	t := tPlace
	if s.State == Waking {
		t = tReplaceHost
	}
	host, why := x.choose(s, hostsOf(named))
	if host == nil {
		x.unplaceable(s, why)
		return
	}
	x.move(s, t)
	if x.v >= movesSince {
		s.hold(host.ID)
	}
	s.Host, s.Boot, s.Epoch, s.Terms = host.ID, host.Boot, x.epoch(), s.Wake.Terms
	s.Failure, s.Warned, s.NeedsStop = nil, 0, false
	w := *s.Wake
	w.Attempt++
	w.Unplaced = ""
	s.Wake = &w
	x.emit(s, Placed, func(e *Event) { e.Reason, e.Request = why, w.Request })
}

// choose takes the first host that may. The one that has the disk comes first,
// one that just said that it has no room comes last.
func (x *tx) choose(s *Session, alive []ids.Host) (*Host, string) {
	var no []string
	if !s.Fresh() {
		alive = first(alive, s.Host)
		if !slices.Contains(alive, s.Host) {
			no = append(no, fmt.Sprintf("%s, which has the disk, holds no lease", s.Host))
		}
	}
	if i := slices.Index(alive, x.avoid); i >= 0 {
		alive = slices.Concat(alive[:i], alive[i+1:], alive[i:i+1])
	}
	for _, id := range alive {
		h := x.s.hosts[id]
		if h == nil {
			continue
		}
		why := x.s.unfit(s, s.Wake.Terms, h, x.v)
		if why == "" {
			return h, x.reason(s, h, no)
		}
		no = append(no, fmt.Sprintf("%s %s", id, why))
	}
	if len(no) == 0 {
		return nil, "no host holds a lease"
	}
	return nil, strings.Join(no, "; ")
}

// reason says why h takes the session; no is why others before it do not.
func (x *tx) reason(s *Session, h *Host, no []string) string {
	free := fmt.Sprintf("%s of %s of memory free", size(x.s.free(h.ID)), size(h.Capacity.MemoryBytes))
	switch {
	case s.Fresh():
		return fmt.Sprintf("%s offers %s; %s", h.ID, tierName(s.Wake.Terms), free)
	case s.Host == h.ID:
		return fmt.Sprintf("%s has the disk; %s", h.ID, free)
	case len(no) == 0:
		no = []string{fmt.Sprintf("%s, which has the disk, has no room for it", s.Host)}
	}
	return fmt.Sprintf("%s gets the disk from the store; %s; %s", h.ID, no[0], free)
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

func tierName(t *Terms) string {
	return strings.ToLower(strings.TrimPrefix(t.Tier.String(), "TIER_"))
}

func size(b uint64) string {
	if b >= 1<<30 {
		return fmt.Sprintf("%.1f GiB", float64(b)/(1<<30))
	}
	return fmt.Sprintf("%d MiB", b>>20)
}
