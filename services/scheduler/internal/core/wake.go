package core

import (
	"cmp"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// woke commits active: from here on the user's processes may run.
func (x *tx) woke(w *Woke) Outcome {
	old, no := x.exact(w.Ref)
	if no != nil {
		return *no
	}
	switch {
	case old.State == Active:
		return Outcome{Session: old}
	case old.State != Waking:
		return refuse(errkind.StaleEpoch, "session %s is no longer waking", w.Session)
	case x.v >= handoffSince && x.s.lost(old.Host):
		return refuse(errkind.StaleEpoch, "host %s holds no lease any more", old.Host)
	case !old.Fresh() && w.Origin == corev1.Origin_ORIGIN_CREATED:
		return refuse(errkind.DataLoss, "host %s offers a blank disk for a session that has files", old.Host)
	case old.Restore != nil:
		return refuse(errkind.Conflict, "host %s did not bring back snapshot %s", old.Host, old.Restore.Snapshot)
	}
	s := x.edit(old)
	x.move(s, tActivate)
	x.arrive(s, w)
	wake, from := *s.Wake, s.From // from this very host, if it was back in time
	s.Wake = nil
	x.emit(s, Activated, func(e *Event) {
		e.Origin, e.RestoredAsOf, e.Timing = s.Origin, s.RestoredAsOf, w.Timing
		e.Terms, e.Request = s.Terms, wake.Request
		if x.v >= handoffSince {
			e.Cause, e.From = wake.Cause, from
		}
	})
	x.settle(s, VerbOpen, func(r *Record) {
		r.Origin, r.RestoredAsOf = s.Origin, s.RestoredAsOf
	})
	x.put(s)
	return Outcome{Session: s}
}

// arrive notes from which disk the session woke.
func (x *tx) arrive(s *Session, w *Woke) {
	older := s.Behind || s.Dirty && s.Newest != s.Host // than what it once had
	s.LastActive, s.NeedsStop, s.Behind = s.Epoch, false, false
	s.unsaved(false)
	if OwnKernel(s.Terms.Tier) {
		x.wroteVM(s, s.Terms.Tier)
	}
	s.Origin, s.RestoredAsOf, s.LastWake = w.Origin, w.RestoredAsOf, nil
	if w.Timing.Total != 0 || len(w.Timing.Steps) > 0 {
		s.LastWake = &w.Timing
	}
	if older && x.v >= handoffSince {
		s.Origin, s.RestoredAsOf = corev1.Origin_ORIGIN_RESTORED, cmp.Or(w.RestoredAsOf, s.SavedAt)
	}
	if s.Rewound != 0 && w.Origin == corev1.Origin_ORIGIN_RESUMED { // an earlier try brought it back
		s.Origin, s.RestoredAsOf = corev1.Origin_ORIGIN_RESTORED, s.Rewound
	}
	s.Rewound = 0
	if s.ImageDigest == "" {
		s.ImageDigest = intern(x.s.in, w.ImageDigest)
	}
	s.RenewedAt = x.now
}

// wakeFailed places again, or fails the session.
func (x *tx) wakeFailed(w *WakeFailed) Outcome {
	old, no := x.exact(w.Ref)
	if no != nil {
		return *no
	}
	if old.State != Waking {
		return refuse(errkind.StaleEpoch, "session %s is no longer waking", w.Session)
	}
	s := x.edit(old)
	if w.VMWritten && x.v >= vmSince {
		x.wroteVM(s, s.Terms.Tier)
	}
	if w.Retry && (s.Wake.Deadline == 0 || x.now < s.Wake.Deadline) {
		if w.Failure.Kind == errkind.NoCapacity && x.v >= movesSince {
			x.avoid, x.nothing = s.Host, true
		}
		x.place(s, x.named(w.Candidates, w.Alive))
		x.put(s)
		return Outcome{Session: s}
	}
	x.move(s, tWakeFailed)
	x.fail(s, w.Failure)
	x.put(s)
	return Outcome{Session: s}
}

// fail ends a wake or an ephemeral session; its compute, if any, must go.
func (x *tx) fail(s *Session, f Failure) {
	s.Failure, s.NeedsStop, s.Wake, s.Sleep = &f, true, nil, nil
	x.emit(s, HasFailed, func(e *Event) { e.Failure = &f })
	x.settle(s, VerbOpen, failWith(f.Kind, f.Reason))
	x.settle(s, VerbClose, asIs)
}

func (x *tx) stopped(r *Ref) Outcome {
	old, no := x.exact(*r)
	if no != nil {
		return *no
	}
	if old.State != Failed || !old.NeedsStop {
		return Outcome{Session: old}
	}
	s := x.edit(old)
	x.move(s, tStopped)
	s.NeedsStop = false
	x.put(s)
	return Outcome{Session: s}
}
