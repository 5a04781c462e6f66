package core

import (
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// join records a host and its boot. What it owns stays as it is: the host says
// itself which compute is missing. Sessions whose newest files it has, and
// which are only waking elsewhere, return to it.
func (x *tx) join(h *Host) Outcome {
	switch {
	case h.ID == "" || h.Boot == "":
		return refuse(errkind.Invalid, "a host needs an id and a boot")
	case x.v >= handoffSince && x.s.gone[h.ID] != nil:
		return refuse(errkind.Denied, "host %s %s; it may join under another id", h.ID, errkind.HostRemoved)
	}
	old := x.s.Host(h.ID)
	n := *h
	n.Lost = false
	if old != nil {
		n.Draining, n.DrainDeadline, n.Drained = old.Draining, old.DrainDeadline, old.Drained
		if old.Boot == n.Boot && !old.Lost {
			n.Lease = max(n.Lease, old.Lease)
		}
	}
	if len(x.s.order) == 0 {
		x.assignErasures(n.ID)
	}
	r := x.s.setHost(&n)
	if old == nil || old.Boot != h.Boot || old.Lost {
		x.push(&Event{Kind: HostJoined, Host: n.ID, Boot: n.Boot, Tiers: n.Tiers, Capacity: n.Capacity})
	}
	if x.v >= handoffSince && r.u.Unsaved > 0 {
		x.returns(r)
	}
	return Outcome{}
}

// returns gives back what is waking elsewhere from an older disk.
func (x *tx) returns(r *hostRec) {
	for _, old := range x.s.where(func(s *Session) bool { return s.Newest == r.id && s.State == Waking && s.Host != r.id }) {
		q := newQuery(x.s, old, x.raise(old, old.Wake.Terms), x.v)
		if q.check(r) != fits {
			continue
		}
		s := x.edit(old)
		x.raiseWake(s)
		w := *s.Wake
		w.Attempt = 0
		s.Wake = &w
		why := r.id.String() + " is back with newer files than the store has"
		x.assign(s, r.h, tReturn, Plan{Host: r.id, Reason: why, Rows: []PlanRow{{Host: r.id, Ranks: []string{"disk"}}}, More: len(x.s.order) - 1}, nil)
		x.put(s)
	}
}

func (x *tx) drain(d *Drain) Outcome {
	old := x.s.Host(d.Host)
	if x.s.gone[d.Host] != nil {
		return refuse(errkind.NotFound, "host %s was removed from the cell", d.Host)
	}
	if old == nil {
		return refuse(errkind.NotFound, "host %s never joined", d.Host)
	}
	if old.Draining == d.On && (x.v < handoffSince || old.DrainDeadline == d.Deadline || !d.On) {
		return Outcome{}
	}
	n := *old
	n.Draining, n.DrainDeadline = d.On, d.Deadline
	if !d.On {
		n.DrainDeadline, n.Drained = 0, false
	}
	x.mark(x.s.setHost(&n))
	if d.On && !old.Draining {
		x.push(&Event{Kind: HostDraining, Host: n.ID, Boot: n.Boot})
	}
	return Outcome{}
}

// handoffTime is how long a handoff is tried that names no time itself.
const handoffTime = 10 * time.Minute

const handoffCause = corev1.Cause_CAUSE_HANDOFF

// hostLost displaces what had compute on the host. What was active wakes
// elsewhere without being asked; what was going to sleep waits for an open.
func (x *tx) hostLost(l *HostLost) Outcome {
	old := x.s.Host(l.Host)
	if old == nil || old.Boot != l.Boot || old.Lost {
		return Outcome{}
	}
	n := *old
	n.Lost = true
	r := x.s.setHost(&n)
	x.push(&Event{Kind: HostIsLost, Host: n.ID, Boot: n.Boot, Reason: l.Reason})
	if r.u.Held == 0 && r.u.Sessions == 0 {
		return Outcome{}
	}
	for _, s := range x.s.where(func(s *Session) bool { return s.leftOn(l.Host) }) { // its watchdog stopped it
		s = x.edit(s)
		s.dropLeft(l.Host)
		x.put(s)
	}
	hit := x.s.where(func(s *Session) bool { return s.Host == l.Host && (s.State == Active || s.State == Sleeping) })
	for _, s := range hit {
		x.displace(x.edit(s), displacement{reason: "host " + l.Host.String() + " is lost: " + l.Reason, lost: true, until: l.Until})
	}
	return Outcome{}
}

// exited records that compute is gone without being asked.
func (x *tx) exited(c *Exited) Outcome {
	old, no := x.exact(c.Ref)
	if no != nil {
		return *no
	}
	if old.Host != c.Host {
		return refuse(errkind.Denied, "session %s belongs to host %s", c.Session, old.Host)
	}
	if old.State != Active && old.State != Sleeping {
		return Outcome{Session: old}
	}
	return x.displace(x.edit(old), displacement{reason: c.Reason, named: x.named(c.Candidates, c.Alive)})
}

// displacement is why a session lost its compute.
type displacement struct {
	reason string
	lost   bool // with its host
	until  Time // of the handoff
	named  []Candidate
}

// displace leaves a durable session asleep with its newest files on the disk
// of its host, and fails an ephemeral one.
func (x *tx) displace(s *Session, d displacement) Outcome {
	sl := Sleep{}
	if s.Sleep != nil {
		sl = *s.Sleep
	}
	switch {
	case s.Terms.Ephemeral:
		x.move(s, tLost)
		x.emit(s, Displaced, func(e *Event) { e.Reason = d.reason })
		x.fail(s, Failure{Kind: errkind.DataLoss, Reason: "the session was ephemeral and lost its sandbox: " + d.reason})
		x.put(s)
		return Outcome{Session: s}
	case sl.Save:
		return x.notSaved(s, sl, d)
	}
	handoff := x.v >= handoffSince && d.lost && s.Wake == nil && !sl.Pause && (s.State == Active || sl.Handoff)
	x.move(s, tDisplaced)
	s.Sleep = nil
	s.unsaved(true)
	if handoff {
		x.handOver(s, d.until)
	}
	x.rest(s)
	x.emit(s, Displaced, func(e *Event) { e.Reason, e.Handoff = d.reason, handoff })
	x.emit(s, FellAsleep, func(e *Event) { e.Manifest, e.Reason, e.Terms = s.Manifest, d.reason, s.Terms })
	if x.v >= movesSince {
		x.settle(s, VerbClose, failWith(errkind.Unsaved, "it sleeps, but not all that was written is saved: "+d.reason))
	} else {
		x.settle(s, VerbClose, asIs)
	}
	if s.Wake != nil && (x.v < handoffSince || !d.lost) {
		x.place(s, d.named)
	}
	x.put(s)
	return Outcome{Session: s}
}

// notSaved ends the save of a session at rest: its files stay where they are.
func (x *tx) notSaved(s *Session, sl Sleep, d displacement) Outcome {
	t := tNotSaved
	if sl.Pause {
		t = tNotSavedPaused
	}
	x.quietly(s, t)
	s.Sleep = nil
	s.unsaved(true)
	x.settle(s, VerbClose, failWith(errkind.Unsaved, "it sleeps, but not all that was written is saved: "+d.reason))
	if s.Wake != nil && !d.lost {
		x.place(s, d.named)
	}
	x.put(s)
	return Outcome{Session: s}
}

// handOver has a session wake elsewhere without being asked.
func (x *tx) handOver(s *Session, until Time) {
	if until == 0 {
		until = x.now.Add(handoffTime)
	}
	s.Wake = &Wake{Cause: handoffCause, Deadline: until, Terms: s.Terms}
	s.From = s.Host
}

// rest forgets what only an awake session needs.
func (x *tx) rest(s *Session) {
	if x.v >= handoffSince && s.LastWake != nil && len(s.LastWake.Steps) > 0 {
		s.LastWake = &Timing{Total: s.LastWake.Total}
	}
}

// quietly takes a transition between two states at rest, or to one from an
// errand: for the session's retention nothing has changed.
func (x *tx) quietly(s *Session, t *Transition) {
	since := s.ChangedAt
	x.move(s, t)
	s.ChangedAt = since
}

// cleared notes that a host runs nothing of an earlier epoch.
func (x *tx) cleared(c *Cleared) Outcome {
	old := x.s.Session(c.Session)
	if old == nil || old.Generation != c.Generation {
		return refuse(errkind.StaleEpoch, "session %s is not at generation %s", c.Session, c.Generation)
	}
	if !slices.ContainsFunc(old.Left, func(l Left) bool { return l.Host == c.Host && l.Epoch == c.Epoch }) {
		return Outcome{Session: old}
	}
	s := x.edit(old)
	x.move(s, tCleared)
	s.dropLeft(c.Host)
	x.put(s)
	return Outcome{Session: s}
}

// dropped forgets a host that removed its disk, unless the session needs it.
func (x *tx) dropped(c *Dropped) Outcome {
	old := x.s.Session(c.Session)
	switch {
	case old == nil || old.Generation != c.Generation:
		return refuse(errkind.StaleEpoch, "session %s is not at generation %s", c.Session, c.Generation)
	case !c.Epoch.IsZero() && c.Epoch != old.Epoch: // it may have been placed there again since
		return refuse(errkind.StaleEpoch, "session %s is at epoch %s, not %s", c.Session, old.Epoch, c.Epoch)
	case old.Host == c.Host || old.Newest == c.Host:
		return refuse(errkind.Conflict, "host %s has what is newest of session %s", c.Host, c.Session)
	case !slices.Contains(old.Holders, c.Host):
		return Outcome{Session: old}
	}
	s := x.edit(old)
	x.move(s, tDropped)
	x.dropHolder(s, c.Host)
	x.put(s)
	return Outcome{Session: s}
}

func (x *tx) dropHolder(s *Session, h ids.Host) {
	s.Holders = slices.DeleteFunc(slices.Clone(s.Holders), func(v ids.Host) bool { return v == h })
	switch len(s.Holders) {
	case 0:
		s.Holders = nil
	case 1:
		s.Holders = x.s.rec(s.Holders[0]).alone
	}
}
