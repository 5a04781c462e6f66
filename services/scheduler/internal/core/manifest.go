package core

import (
	"cmp"

	"github.com/berth-dev/berth/schemas/errkind"
)

// manifest moves the head by compare-and-swap on generation, epoch and parent.
func (x *tx) manifest(c *ManifestCmd) Outcome {
	old, no := x.exact(c.Ref)
	if no != nil {
		return *no
	}
	switch {
	case old.Host != c.Host:
		return refuse(errkind.Denied, "session %s belongs to host %s", c.Session, old.Host)
	case x.v >= handoffSince && x.s.lost(c.Host):
		return refuse(errkind.StaleEpoch, "host %s holds no lease; it must join first", c.Host)
	case c.Manifest.ID == "":
		return refuse(errkind.Invalid, "a manifest needs an id")
	case old.State == Deleting:
		return refuse(errkind.Superseded, "session %s is being deleted", c.Session)
	case old.Manifest == c.Manifest.ID:
		return Outcome{Session: old}
	}
	if out := mayCommit(old, c.Manifest); out != nil {
		return *out
	}
	s := x.edit(old)
	if out := x.moveHead(s, c.Manifest); out != nil {
		return *out
	}
	x.move(s, tCommit)
	switch s.State {
	case Asleep, Paused:
		if c.Sealed || x.v < handoffSince { // a snapshot may have begun before the last write
			s.unsaved(false)
		}
	case Waking:
		s.Restore, s.Rewound = nil, s.Restore.AsOf
		s.LastActive = s.Epoch // makes a local image of the time before stale, also one that was never marked as saved
	}
	x.put(s)
	return Outcome{Session: s}
}

// mayCommit refuses a manifest that the state of the session does not account
// for: a head moves while the user's processes may write, or for a disk that
// was left unsaved, or to bring back what was asked for.
func mayCommit(s *Session, m ManifestInfo) *Outcome {
	var out Outcome
	switch s.State {
	case Active, Sleeping:
		return nil
	case Waking:
		if s.Restore != nil && m.RestoredFrom == s.Restore.Snapshot {
			return nil
		}
		out = refuse(errkind.Conflict, "session %s is waking: its head moves only to bring back the snapshot that was asked for", s.Key)
	case Asleep, Paused:
		if s.Dirty && s.Epoch == s.LastActive && s.Newest == s.Host {
			return nil
		}
		out = refuse(errkind.Conflict, "session %s sleeps and nothing of epoch %s is unsaved", s.Key, s.Epoch)
	case Failed:
		if s.NeedsStop {
			return nil
		}
		out = refuse(errkind.Conflict, "session %s has no compute left that could have written", s.Key)
	default:
		out = refuse(errkind.Conflict, "session %s was never active", s.Key)
	}
	return &out
}

func (x *tx) moveHead(s *Session, m ManifestInfo) *Outcome {
	if s.Manifest == m.ID {
		return nil
	}
	if s.Manifest != m.Parent {
		out := refuse(errkind.Conflict, "the head of session %s is %q, not the expected parent %q", s.Key, s.Manifest, m.Parent)
		return &out
	}
	s.Manifest, s.Behind = m.ID, false
	if m.VMWritten {
		x.wroteVM(s, s.Terms.Tier)
	}
	if x.v >= handoffSince {
		s.SavedAt = cmp.Or(m.TakenAt, x.now)
	}
	if m.ImageDigest != "" {
		s.ImageDigest = intern(x.s.in, m.ImageDigest)
	}
	return nil
}

// restore notes the snapshot that the next wake brings back. What the session
// holds until then is the head, and so a snapshot itself.
func (x *tx) restore(r *Restore) Outcome {
	old := x.s.Session(r.Session)
	if out := mayRestore(old, r); out != nil {
		return *out
	}
	var want *Rewind
	if r.Snapshot != old.Manifest {
		want = &Rewind{Snapshot: r.Snapshot, AsOf: r.AsOf}
	}
	if want == nil && old.Restore == nil || want != nil && old.Restore != nil && *want == *old.Restore {
		return Outcome{Session: old}
	}
	s := x.edit(old)
	x.move(s, tRestore)
	s.Restore = want
	x.emit(s, WasRewound, func(e *Event) {
		e.Manifest = s.Manifest
		if want != nil {
			e.Snapshot, e.RestoredAsOf = want.Snapshot, want.AsOf
		}
	})
	x.put(s)
	return Outcome{Session: s}
}

func mayRestore(s *Session, r *Restore) *Outcome {
	var out Outcome
	switch {
	case s == nil:
		out = refuse(errkind.NotFound, "there is no such session")
	case s.Tenant != r.Tenant:
		out = refuse(errkind.Denied, "the session belongs to another tenant")
	case r.Snapshot == "":
		out = refuse(errkind.Invalid, "a restore needs a snapshot")
	case s.Generation != r.Generation:
		out = refuse(errkind.StaleEpoch, "the session is at generation %s, not %s", s.Generation, r.Generation)
	case s.State == Deleting:
		out = refuse(errkind.Superseded, "the session is being deleted")
	case s.Terms.Ephemeral:
		out = refuse(errkind.Refused, "the session is ephemeral: it has no snapshots")
	case s.Wake != nil || s.State == Waking:
		out = refuse(errkind.Conflict, "the session is being opened; put it to sleep first")
	case s.State == Active:
		out = refuse(errkind.Conflict, "the session is awake; put it to sleep first")
	case s.State == Sleeping:
		out = refuse(errkind.Conflict, "the session is still going to sleep; try again when it sleeps")
	case s.Dirty:
		out = refuse(errkind.Conflict, "what was written since the last snapshot is only on the host's disk: open the session and close it first, so that it is saved")
	case s.Manifest == "":
		out = refuse(errkind.Refused, "the session was never saved: it has no snapshots")
	case s.NeedsStop:
		out = refuse(errkind.Conflict, "what its last wake left is still being removed; try again in a moment")
	case s.Manifest != r.Head:
		out = refuse(errkind.Conflict, "the head of the session has moved: it is %s", s.Manifest)
	default:
		return nil
	}
	return &out
}
