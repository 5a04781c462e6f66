package core

import "github.com/berth-dev/berth/schemas/ids"

// place gives a waiting session a host and an epoch, or notes why it cannot.
func (x *tx) place(s *Session, named []Candidate) {
	x.raiseWake(s)
	q := newQuery(x.s, s, s.Wake.Terms, x.v)
	named = x.ordered(s, named)
	plan, sort := x.s.plan(&q, named)
	if plan.Host == "" {
		x.unplaceable(s, plan, sort)
		return
	}
	t := tPlace
	if s.State == Waking {
		t = tReplaceHost
	}
	x.assign(s, x.s.hosts[plan.Host].h, t, plan, named)
}

// assign makes a host the owner under a new epoch; named is what the plan was
// made of.
func (x *tx) assign(s *Session, h *Host, t *Transition, plan Plan, named []Candidate) {
	if h.ID != s.Host {
		x.leave(s)
	}
	x.move(s, t)
	if x.v >= movesSince {
		x.hold(s, h.ID)
	}
	s.Host, s.Boot, s.Epoch, s.Terms = h.ID, h.Boot, x.epoch(), s.Wake.Terms
	s.Failure, s.Warned, s.NeedsStop = nil, 0, false
	s.dropLeft(h.ID) // a host removes the compute of earlier epochs itself
	w := *s.Wake
	w.Attempt++
	w.Unplaced, w.Told = "", ""
	w.reserve(named, h.ID, x.v)
	s.Wake = &w
	x.emit(s, Placed, func(e *Event) {
		e.Reason, e.Request = plan.Reason, w.Request
		if x.v >= handoffSince {
			e.Cause, e.Plan = w.Cause, &plan
		}
	})
}

// hold notes that h may have an image of the session from now on.
func (x *tx) hold(s *Session, h ids.Host) {
	s.Holders = s.holders()
	s.Host = h
	if s.Holders = s.holders(); len(s.Holders) == 1 {
		s.Holders = x.s.rec(h).alone
	}
}

// leave notes that compute of the current epoch may be left on its host.
func (x *tx) leave(s *Session) {
	running := s.State == Waking || s.NeedsStop
	if x.v < handoffSince || x.nothing || !running || s.Host == "" || x.s.lost(s.Host) {
		return
	}
	s.dropLeft(s.Host)
	s.Left = append(s.Left[:len(s.Left):len(s.Left)], Left{Host: s.Host, Epoch: s.Epoch, Limits: s.Terms.Limits})
}

// dropLeft forgets what was left on a host.
func (s *Session) dropLeft(h ids.Host) {
	if !s.leftOn(h) {
		return
	}
	var rest []Left
	for _, l := range s.Left {
		if l.Host != h {
			rest = append(rest, l)
		}
	}
	s.Left = rest
}

// unplaceable notes why there is no room; each sort of reason is told once.
func (x *tx) unplaceable(s *Session, plan Plan, sort string) {
	told := s.Wake.Unplaced == plan.Reason
	w := *s.Wake
	w.Unplaced, w.Reservation, w.Cold = plan.Reason, "", false
	if x.v >= handoffSince {
		told = w.Told == sort
		w.Told = sort
	}
	s.Wake = &w
	if s.State == Waking {
		x.leave(s)
	}
	switch {
	case s.State != Waking:
		x.move(s, tUnplaceable)
	case s.Fresh():
		x.move(s, tBackToNew)
	default:
		x.move(s, tBackToAsleep)
	}
	if !told {
		x.emit(s, Unplaceable, func(e *Event) {
			e.Reason, e.RetryUntil, e.Request = plan.Reason, w.Deadline, w.Request
			if x.v >= handoffSince {
				e.Plan = &plan
			}
		})
	}
}
