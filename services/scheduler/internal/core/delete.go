package core

import (
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// clockSkew is how far the clock that stamps requests may differ from the leader's.
const clockSkew = 30 * time.Second

// tickBound is how far leader time may lag behind the leader's clock.
const tickBound = time.Minute

// delete is legal from every state and never refused for want of room.
func (x *tx) delete(c *Delete) Outcome {
	old := x.s.Session(c.Keys...)
	key := firstKey(c.Keys)
	if old != nil {
		key = old.Key
	}
	if key == "" {
		return refuse(errkind.Invalid, "a delete needs a session key")
	}
	if out := x.knownDelete(key, c); out != nil {
		return *out
	}
	if old != nil && old.Tenant != c.Tenant {
		return refuse(errkind.Denied, "the session belongs to another tenant")
	}
	if c.Expire != nil {
		return x.expire(old, c)
	}
	if old == nil {
		return x.deleteNone(c)
	}
	if t := x.s.Tombstone(c.Keys...); t != nil && c.StoredAt != 0 && c.StoredAt < t.StoredAt {
		return refuse(errkind.Superseded, "a later delete of this session was committed before")
	}
	if c.StoredAt != 0 && c.StoredAt.Add(clockSkew) < old.CreatedAt {
		return refuse(errkind.Superseded, "the session was created after this delete was stored")
	}
	return x.startedDelete(x.edit(old), c, "asked by the user")
}

// storedAt is when the delete was stored, and never later than now: a clock
// that runs ahead must not refuse the opens to come.
func (x *tx) storedAt(c *Delete) Time {
	if c.StoredAt == 0 {
		return x.now
	}
	return min(c.StoredAt, x.now)
}

func (x *tx) knownDelete(key ids.SessionKey, c *Delete) *Outcome {
	for _, k := range append([]ids.SessionKey{key}, c.Keys...) {
		if out := x.known(k, VerbDelete, c.Request, c.Hash); out != nil {
			out.Deleted = out.Session == nil || out.Session.Generation != out.Record.Generation
			return out
		}
	}
	return nil
}

func (x *tx) startedDelete(s *Session, c *Delete, reason string) Outcome {
	r, _ := x.wait(s, VerbDelete, c.Request, c.Hash) // a delete is never refused
	stored := x.storedAt(c)
	if s.State == Deleting {
		x.move(s, tDeleteJoin)
		d := *s.Deletion
		d.StoredAt = max(d.StoredAt, stored)
		s.Deletion = &d
	} else {
		x.startDelete(s, tDelete, Deletion{Request: c.Request, Reason: reason, StoredAt: stored})
	}
	x.put(s)
	return Outcome{Session: s, Record: r}
}

// startDelete notes the delete and tells the opens that wait. What the session
// holds of its host it holds until the host confirms.
func (x *tx) startDelete(s *Session, t *Transition, d Deletion) {
	held := s.holds()
	x.move(s, t)
	s.Deletion, s.Wake, s.Sleep, s.NeedsStop = &d, nil, nil, held
	x.settle(s, VerbOpen, failWith(errkind.Superseded, "the session was deleted meanwhile"))
}

// deleteNone remembers the delete of nothing, so that an open stored before it
// is refused whichever arrives first.
func (x *tx) deleteNone(c *Delete) Outcome {
	x.t = tDeleteNone
	stored := x.storedAt(c)
	gen := x.generation()
	var rev uint64
	if t := x.s.Tombstone(c.Keys...); t != nil {
		gen, rev = t.Generation, t.Revision
		stored = max(stored, t.StoredAt)
	}
	x.bury(&Tombstone{Tenant: c.Tenant, Key: c.Keys[0], Aliases: c.Keys[1:], Generation: gen, Revision: rev,
		Index: x.index, StoredAt: stored, At: x.now, LeaderTime: x.s.LeaderTime, Actor: Actor{Tenant: c.Tenant}})
	return x.deletedNone(c, gen)
}

func (x *tx) deletedNone(c *Delete, gen ids.Generation) Outcome {
	r := x.remember(Record{Session: c.Keys[0], Verb: VerbDelete, ID: c.Request, Hash: c.Hash, Done: true,
		Generation: gen, State: Deleted})
	return Outcome{Deleted: true, Record: r}
}

// bury remembers a deleted session under all its keys. It takes over what
// older memories under those keys still have to do.
func (x *tx) bury(t *Tombstone) {
	keys := []ids.SessionKey{t.Key}
	for i := 0; i < len(keys); i++ {
		more := t.Aliases
		if old := x.s.tombs[keys[i]]; old != nil && old != t {
			more = slices.Concat([]ids.SessionKey{old.Key}, old.Aliases, more)
			for _, e := range old.Erase {
				if !slices.Contains(t.Erase, e) {
					t.Erase = append(t.Erase, e)
				}
			}
		}
		for _, k := range more {
			if !slices.Contains(keys, k) {
				keys = append(keys, k)
			}
		}
		x.s.tombs[keys[i]] = t
	}
	t.Aliases = keys[1:]
}

// removed ends a session; a host that is away is remembered until it erased.
func (x *tx) removed(c *Removed) Outcome {
	if t := x.s.Tombstone(c.Session); t != nil && x.erased(t, c) {
		return Outcome{Deleted: true}
	}
	old, no := x.exact(c.Ref)
	if no != nil {
		return *no
	}
	if old.State != Deleting {
		return refuse(errkind.Conflict, "session %s is not being deleted", c.Session)
	}
	if h := x.running(old, c.Hosts); h != "" {
		return refuse(errkind.Conflict, "host %s may still run an earlier epoch of session %s", h, c.Session)
	}
	s := x.edit(old)
	x.move(s, tGone)
	d := *s.Deletion
	x.emit(s, WasDeleted, func(e *Event) { e.Request, e.Reason = d.Request, d.Reason })
	x.settle(s, "", asIs)
	x.account(old, -1)
	x.touched = append(x.touched, s.Key)
	delete(x.s.sessions, s.Key)
	for _, k := range s.Aliases {
		delete(x.s.aliases, k)
	}
	t := &Tombstone{Tenant: s.Tenant, Key: s.Key, Aliases: s.Aliases, Name: s.Name, Actor: s.Actor,
		Generation: s.Generation, Epoch: s.Epoch, Revision: s.Revision, Index: x.index,
		StoredAt: d.StoredAt, At: x.now, LeaderTime: x.s.LeaderTime}
	x.owe(t, s, c)
	x.bury(t)
	return Outcome{Session: s, Deleted: true}
}

// running is a host that may run an earlier epoch of s and did not confirm that
// it does not.
func (x *tx) running(s *Session, confirmed []ids.Host) ids.Host {
	for _, l := range s.Left {
		if !slices.Contains(confirmed, l.Host) && !x.s.lost(l.Host) {
			return l.Host
		}
	}
	return ""
}

// expire deletes at the end of retention, and only then.
func (x *tx) expire(old *Session, c *Delete) Outcome {
	e := c.Expire
	switch {
	case old == nil:
		return Outcome{Deleted: true}
	case old.Generation != e.Generation || old.Revision != e.Revision:
		return refuse(errkind.StaleEpoch, "the session has changed since: it is at generation %s revision %d", old.Generation, old.Revision)
	case old.State != Asleep || old.Wake != nil:
		return refuse(errkind.Conflict, "only a session that is asleep expires")
	case old.Terms.Retention <= 0:
		return refuse(errkind.Refused, "the session is kept without limit")
	case x.now < old.ChangedAt.Add(old.Terms.Retention-e.Notice):
		return refuse(errkind.Conflict, "the session's own record is not near its retention of %s", old.Terms.Retention)
	}
	s := x.edit(old)
	if s.Warned == 0 {
		s.Warned = x.s.LeaderTime + 1
		x.put(s)
	}
	if e.WarnOnly {
		return Outcome{Session: s}
	}
	warned := x.s.LeaderTime - (s.Warned - 1)
	switch {
	case x.now < s.ChangedAt.Add(s.Terms.Retention):
		return refuse(errkind.Conflict, "the session's own record is not past its retention of %s", s.Terms.Retention)
	case warned < e.Notice+tickBound:
		return refuse(errkind.Conflict, "only %s of leader time since the warning, %s are needed", warned, e.Notice)
	case !x.mayExpire(e.MaxPerHour):
		return refuse(errkind.Exhausted, "more than %d sessions expire within an hour: stopped until somebody looks", e.MaxPerHour)
	}
	return x.startedDelete(s, c, "retention ended")
}

func (x *tx) mayExpire(limit int) bool {
	if x.s.LeaderTime-x.s.expireHour >= time.Hour {
		x.s.expireHour, x.s.expireCount = x.s.LeaderTime, 0
	}
	if x.s.expireCount >= limit {
		return false
	}
	x.s.expireCount++
	return true
}
