package core

import (
	"slices"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Answer is what came of a command that followed from a session.
type Answer struct {
	Kind    CommandKind
	Session *Session // as it was when the command was given
	// Of HostClear: what was to be cleared.
	Left Left
	// Exactly one of these: the host's word, or why there is none.
	Woke      *Woke  // its Ref is filled in
	Slept     *Slept // its Ref and Candidates are filled in
	Busy      bool
	BusySince Time
	Err       *Failure
	NotFound  bool // the host has nothing of this epoch
	// Of HostDelete: hosts that have nothing left of it; none is fine, they erase later.
	Hosts []ids.Host
	// Stored, of HostDelete: the store still has something of it, as one of Hosts said.
	Stored bool
}

// After is the entry that follows from an answer, false when there is none and
// the command is to be given again. s is the session as it is now, nil if it is
// gone. Tries bounds how often a wake is placed before it fails; c are the
// hosts that may take the session now.
func After(s *Session, a Answer, maxTries int, c []Candidate) (Entry, bool) {
	ref := Ref{a.Session.Key, a.Session.Generation, a.Session.Epoch}
	switch a.Kind {
	case HostWake:
		return afterWake(a, ref, maxTries, c), true
	case HostSleep:
		return afterSleep(s, a, ref, c)
	case HostStop:
		if a.Err == nil || a.NotFound || a.Err.Kind == errkind.Unsaved {
			return Entry{Stopped: &ref}, true
		}
	case HostDelete:
		if a.Err == nil || a.NotFound {
			return Entry{Removed: &Removed{Ref: ref, Erased: len(a.Hosts) > 0 && !a.Stored, Hosts: a.Hosts}}, true
		}
	case HostClear:
		if a.Err == nil || a.NotFound {
			ref.Epoch = a.Left.Epoch
			return Entry{Cleared: &Cleared{Ref: ref, Host: a.Left.Host}}, true
		}
	}
	return Entry{}, false
}

func afterWake(a Answer, ref Ref, maxTries int, c []Candidate) Entry {
	if a.Err == nil && a.Woke != nil {
		w := *a.Woke
		w.Ref = ref
		return Entry{Woke: &w}
	}
	f := Failure{Kind: errkind.Unavailable, Reason: "the host gave no answer"}
	if a.Err != nil {
		f = *a.Err
	}
	vm := refusedVM(f) && !OwnKernel(a.Session.Terms.Tier) // the next try is in another tier
	again := a.Session.Wake != nil && a.Session.Wake.Attempt < maxTries && (f.Kind.Retry() || f.Kind == errkind.StaleEpoch || vm)
	return Entry{WakeFailed: &WakeFailed{Ref: ref, Failure: f, Retry: again, VMWritten: vm, Candidates: c}}
}

func afterSleep(s *Session, a Answer, ref Ref, c []Candidate) (Entry, bool) {
	switch {
	case a.NotFound:
		return Entry{Exited: &Exited{Ref: ref, Host: a.Session.Host, Reason: "the host has no sandbox of it", Candidates: c}}, true
	case a.Err != nil && a.Err.Kind == errkind.Unsaved:
		return afterUnsaved(s, a, ref, c)
	case a.Err != nil:
		return Entry{}, false
	case a.Busy:
		return Entry{SleepRefused: &SleepRefused{Ref: ref, BusySince: a.BusySince}}, true
	case a.Slept == nil:
		return Entry{}, false
	}
	sl := *a.Slept
	sl.Ref, sl.Candidates = ref, c
	return Entry{Slept: &sl}, true
}

// afterUnsaved: no compute is left and the disk cannot be saved. An open that
// waits wakes it from that disk; a close that waits is told.
func afterUnsaved(s *Session, a Answer, ref Ref, c []Candidate) (Entry, bool) {
	switch {
	case s == nil || s.Epoch != a.Session.Epoch:
	case s.Wake != nil:
		return Entry{Exited: &Exited{Ref: ref, Host: s.Host, Reason: a.Err.Reason, Candidates: c}}, true
	case slices.ContainsFunc(s.Pending, func(p Pending) bool { return p.Verb == VerbClose }):
		return Entry{Delayed: &Delayed{Ref: ref, Reason: a.Err.Reason}}, true
	}
	return Entry{}, false
}

// Refused is the entry that follows when the state refused the entry that
// After gave, false when none does: a wake that brought the wrong disk fails.
func Refused(e Entry, f Failure) (Entry, bool) {
	if e.Woke != nil && (f.Kind == errkind.DataLoss || f.Kind == errkind.Conflict) {
		return Entry{WakeFailed: &WakeFailed{Ref: e.Woke.Ref, Failure: f}}, true
	}
	return Entry{}, false
}

// Before is the entry that follows from a session that is going to sleep
// without asking its host: its open's deadline has passed, or the last try
// left no compute but could not save the disk (unsaved) and an open waits. Why
// is what the last try said.
func Before(s *Session, now Time, why string, unsaved bool, c []Candidate) (Entry, bool) {
	switch {
	case s.State != Sleeping || s.Wake == nil:
	case s.Wake.Deadline != 0 && s.Wake.Deadline <= now:
		return Entry{Place: &Place{Session: s.Key, Generation: s.Generation, Why: why}}, true
	case unsaved:
		ref := Ref{s.Key, s.Generation, s.Epoch}
		return Entry{Exited: &Exited{Ref: ref, Host: s.Host, Reason: why, Candidates: c}}, true
	}
	return Entry{}, false
}
