package core

import (
	"fmt"
	"slices"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
)

// verdict is whether a host may take a session, and which limit is in the way.
type verdict uint8

const (
	fits verdict = iota
	noLease
	isDraining
	noTier
	noZone
	noDisk
	noHolder
	noMemory
	noCPU
	noPIDs
	noSpace
)

// query is one question for a host, with all that does not depend on the host.
type query struct {
	sess *Session // nil: not yet known
	t    *Terms
	v    int      // format of the entry that asks
	only ids.Host // alone may wake it; empty: any may
	full bool     // no host but the holders may be added
	own  bool     // it may hold something of a host
}

func newQuery(s *State, sess *Session, t *Terms, v int) query {
	q := query{sess: sess, t: t, v: v}
	if sess == nil {
		return q
	}
	q.full, q.own = len(sess.Holders) >= MaxHolders, len(sess.Left) > 0 || sess.holds()
	switch {
	case v >= handoffSince && sess.Dirty:
		if sess.Manifest == "" || !s.lost(sess.Newest) {
			q.only = sess.Newest
		}
	case sess.bound(), v < movesSince && !sess.Fresh():
		q.only = sess.Host
	}
	return q
}

// used is what others hold of the host: the session's own share is free to it.
func (q *query) used(r *hostRec) *Usage {
	if !q.own || q.sess.Host != r.id && !q.sess.leftOn(r.id) {
		return &r.u
	}
	u := r.u
	if q.sess.Host == r.id && q.sess.holds() {
		u.add(q.sess.Terms.Limits, -1)
	}
	for _, l := range q.sess.Left {
		if l.Host == r.id {
			u.add(l.Limits, -1)
		}
	}
	return &u
}

// check says whether a host may take the session.
func (q *query) check(r *hostRec) verdict {
	h := r.h
	switch {
	case h == nil || h.Lost:
		return noLease
	case h.Draining && (q.v < handoffSince || q.only != r.id): // unsaved files are had there or nowhere
		return isDraining
	case !slices.Contains(h.Tiers, q.t.Tier):
		return noTier
	case len(q.t.Zones) > 0 && !slices.Contains(q.t.Zones, h.Zone):
		return noZone
	case q.only != "" && q.only != r.id:
		return noDisk
	case q.full && !slices.Contains(q.sess.Holders, r.id):
		return noHolder
	}
	u, l := q.used(r), &q.t.Limits
	switch {
	case u.MemoryBytes+l.MemoryBytes > h.Capacity.MemoryBytes:
		return noMemory
	case over(u.CPUMillis, uint64(l.CPUMillis), uint64(h.Capacity.CPUMillis), max(h.CPUPercent, 100)):
		return noCPU
	case q.v >= handoffSince && over(u.PIDs, uint64(l.PIDs), uint64(h.Capacity.PIDs), h.PIDsPercent):
		return noPIDs
	case q.v >= handoffSince && over(u.DiskBytes, l.DiskBytes, h.Capacity.DiskBytes, h.DiskPercent):
		return noSpace
	}
	return fits
}

// over reports whether more would be promised than a percentage of what there
// is; nothing is, of what is not counted.
func over(used, more, capacity uint64, percent uint32) bool {
	limit := promise(capacity, percent)
	return limit > 0 && used+more > limit
}

// promise is capacity times percent, without running over.
func promise(capacity uint64, percent uint32) uint64 {
	return capacity/100*uint64(percent) + capacity%100*uint64(percent)/100
}

// why says in words what a verdict means for a host.
func (q *query) why(r *hostRec, v verdict) string {
	u := q.used(r)
	switch v {
	case noLease:
		return "holds no lease"
	case isDraining:
		return "is draining"
	case noTier:
		return fmt.Sprintf("does not offer tier %s", tierName(q.t))
	case noZone:
		return fmt.Sprintf("is in zone %q, not in %s", r.h.Zone, strings.Join(q.t.Zones, " or "))
	case noDisk:
		if q.only == "" {
			return "does not have the disk, which is lost"
		}
		return fmt.Sprintf("does not have the disk, which is on %s", q.only)
	case noHolder:
		return fmt.Sprintf("would be one more than the %d hosts that may have had the disk", MaxHolders)
	case noMemory:
		return fmt.Sprintf("has %s of memory free, %s are needed", size(r.h.Capacity.MemoryBytes-min(u.MemoryBytes, r.h.Capacity.MemoryBytes)), size(q.t.Limits.MemoryBytes))
	case noCPU:
		return fmt.Sprintf("has promised %d of %d thousandths of a core, %d are needed", u.CPUMillis, promise(uint64(r.h.Capacity.CPUMillis), max(r.h.CPUPercent, 100)), q.t.Limits.CPUMillis)
	case noPIDs:
		return fmt.Sprintf("has promised %d of %d processes, %d are needed", u.PIDs, promise(uint64(r.h.Capacity.PIDs), r.h.PIDsPercent), q.t.Limits.PIDs)
	case noSpace:
		return fmt.Sprintf("has promised %s of %s of disk, %s are needed", size(u.DiskBytes), size(promise(r.h.Capacity.DiskBytes, r.h.DiskPercent)), size(q.t.Limits.DiskBytes))
	}
	return ""
}

// limited says why the plan allows no more awake sessions; empty when it does.
func (s *State) limited(q *query, tenant ids.Tenant) string {
	if q.t.MaxAwake == 0 || q.v < handoffSince {
		return ""
	}
	if g := s.groups[group{tenant, q.t.Plan}]; g == nil || g.awake < int(q.t.MaxAwake) {
		return ""
	}
	n := s.Awake(tenant, q.t.Plan)
	if q.sess != nil && q.sess.holds() && q.sess.Terms.Plan == q.t.Plan && !s.lost(q.sess.Host) {
		n--
	}
	if n < int(q.t.MaxAwake) {
		return ""
	}
	return fmt.Sprintf("tenant %s has %d sessions awake on plan %q, which allows %d at once", tenant, n, q.t.Plan, q.t.MaxAwake)
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
