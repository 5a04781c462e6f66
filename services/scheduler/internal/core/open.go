package core

import (
	"slices"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// open decides an open in one entry: the rows of the design's step 4.
func (x *tx) open(o *Open) Outcome {
	if len(o.Keys) == 0 || slices.Contains(o.Keys, "") || o.Request == "" || o.Actor.Tenant == "" {
		return refuse(errkind.Invalid, "an open needs a tenant, a session key and a request id")
	}
	if x.v < poolSince && o.Actor.Acting != "" { // versions before do not store it
		without := *o
		without.Actor.Acting = ""
		o = &without
	}
	s := x.s.Session(o.Keys...)
	key := o.Keys[0]
	if s != nil {
		key = s.Key
		if s.Tenant != o.Actor.Tenant {
			return refuse(errkind.Denied, "the session belongs to another tenant")
		}
	}
	if out := x.knownOpen(key, o); out != nil {
		return *out
	}
	if out := x.mayOpen(s, o); out != nil {
		return *out
	}
	if s == nil {
		return x.create(o)
	}
	if out := x.tooWeak(s, o); out != nil {
		return *out
	}
	s = x.alias(x.edit(s), o.Keys)
	switch s.State {
	case Active:
		return x.renew(s, o)
	case Waking, Sleeping:
		return x.joinWake(s, o)
	case Deleting:
		return Outcome{Wait: true, Session: s}
	}
	if s.dead() {
		return refuse(errkind.DataLoss, "what the session had written was never saved, and was on a host that was removed; delete it to begin anew")
	}
	if s.State == Failed && s.Terms.Ephemeral && !s.LastActive.IsZero() {
		x.startDelete(s, tReplace, Deletion{Reason: "an ephemeral session that was lost is never restored"})
		x.put(s)
		return Outcome{Wait: true, Session: s}
	}
	return x.ask(s, o)
}

// knownOpen looks a request up under every key, since the session it ended
// with may be gone.
func (x *tx) knownOpen(key ids.SessionKey, o *Open) *Outcome {
	if out := x.known(key, VerbOpen, o.Request, o.Hash); out != nil {
		return out
	}
	for _, k := range o.Keys {
		if out := x.known(k, VerbOpen, o.Request, o.Hash); out != nil {
			return out
		}
	}
	return nil
}

// mayOpen refuses what must change nothing.
func (x *tx) mayOpen(s *Session, o *Open) *Outcome {
	var out Outcome
	t := x.s.Tombstone(o.Keys...)
	switch {
	case t != nil && o.StoredAt < t.StoredAt:
		out = refuse(errkind.Superseded, "the session was deleted after this open was stored")
	case s != nil && s.Deletion != nil && o.StoredAt < s.Deletion.StoredAt:
		out = refuse(errkind.Superseded, "the session is being deleted since after this open was stored")
	case o.Deadline != 0 && o.Deadline <= x.now:
		out = refuse(errkind.Expired, "the open's own deadline has passed")
	case len(x.s.outbox) >= MaxOutbox:
		out = refuse(errkind.Exhausted, "%d events wait for the bus; opens are refused until it takes them", len(x.s.outbox))
	case s != nil && s.Terms.Ephemeral != o.Terms.Ephemeral && s.State != Deleting:
		out = refuse(errkind.Refused, "the session exists with another persistence; close or delete it first")
	default:
		return nil
	}
	return &out
}

// alias makes every key of an open name the one existing session.
func (x *tx) alias(s *Session, keys []ids.SessionKey) *Session {
	for _, k := range keys {
		if x.s.Session(k) != nil || k == s.Key || slices.Contains(s.Aliases, k) {
			continue
		}
		s.Aliases = append(slices.Clone(s.Aliases), k)
	}
	return s
}

func (x *tx) create(o *Open) Outcome {
	s := &Session{
		Tenant: intern(x.s.in, o.Actor.Tenant), Key: o.Keys[0], Name: intern(x.s.in, o.Name), State: Unknown,
		Generation: x.generation(), Actor: x.s.in.actor(o.Actor), Terms: x.s.in.termsOf(&o.Terms), CreatedAt: x.now,
	}
	if t := x.s.Tombstone(o.Keys...); t != nil {
		s.Revision = t.Revision
	}
	x.alias(s, o.Keys)
	x.move(s, tCreate)
	r, out := x.admit(s, o)
	if out != nil {
		return *out
	}
	x.place(s, x.named(o.Candidates, o.Alive))
	x.put(s)
	return Outcome{Session: s, Record: r}
}

// ask notes a wake for a session at rest and places it.
func (x *tx) ask(s *Session, o *Open) Outcome {
	first := s.Wake == nil || s.waitsForAnOpen() || x.raises(s, o)
	x.move(s, tAsk)
	r, out := x.admitOrJoin(s, o, first)
	if out != nil {
		return *out
	}
	x.place(s, x.named(o.Candidates, o.Alive))
	x.put(s)
	return Outcome{Session: s, Record: r}
}

func (x *tx) joinWake(s *Session, o *Open) Outcome {
	t := tJoin
	if s.State == Sleeping {
		t = tRecall
	}
	x.move(s, t)
	r, out := x.admitOrJoin(s, o, s.Wake == nil || s.State == Sleeping && x.raises(s, o))
	if out != nil {
		return *out
	}
	x.put(s)
	return Outcome{Session: s, Record: r}
}

func (x *tx) admitOrJoin(s *Session, o *Open, first bool) (*Record, *Outcome) {
	if first {
		return x.admit(s, o)
	}
	r, out := x.wait(s, VerbOpen, o.Request, o.Hash)
	if out != nil {
		return nil, out
	}
	w := *s.Wake
	w.Deadline = max(w.Deadline, o.Deadline)
	s.Wake = &w
	return r, nil
}

func (x *tx) admit(s *Session, o *Open) (*Record, *Outcome) {
	r, out := x.wait(s, VerbOpen, o.Request, o.Hash)
	if out != nil {
		return nil, out
	}
	w := &Wake{Cause: o.Cause, Request: o.Request, Deadline: o.Deadline, Terms: x.raise(s, x.s.in.termsOf(&o.Terms))}
	if s.Wake != nil && w.Deadline != 0 {
		w.Deadline = max(w.Deadline, s.Wake.Deadline)
	}
	s.Wake = w
	s.Actor = x.s.in.actor(o.Actor)
	x.emit(s, Admitted, func(e *Event) {
		e.Actor, e.Terms, e.Request, e.Cause, e.Name = &o.Actor, admitted(o, w), o.Request, o.Cause, s.Name
		e.Decision = o.Decision.Raised(w.Terms.Tier, w.Terms.TierReason)
	})
	return r, nil
}

// admitted are the terms as they were asked for, but that a tier was raised.
func admitted(o *Open, w *Wake) *Terms {
	if w.Terms.Tier != o.Terms.Tier {
		return w.Terms
	}
	return &o.Terms
}

func (x *tx) renew(s *Session, o *Open) Outcome {
	x.move(s, tRenew)
	s.RenewedAt = x.now
	x.emit(s, Renewed, func(e *Event) { e.Request, e.Terms = o.Request, s.Terms })
	x.put(s)
	r := x.remember(Record{Session: s.Key, Verb: VerbOpen, ID: o.Request, Hash: o.Hash, Done: true,
		Generation: s.Generation, Epoch: s.Epoch, Host: s.Host, State: s.State,
		Origin: corev1.Origin_ORIGIN_JOINED, RestoredAsOf: s.RestoredAsOf})
	return Outcome{Session: s, Record: r}
}

// replace retries the placement of a waiting open, or gives it up.
func (x *tx) replace(p *Place) Outcome {
	old := x.s.Session(p.Session)
	if old == nil || old.Generation != p.Generation {
		return refuse(errkind.StaleEpoch, "session %s is not at generation %s", p.Session, p.Generation)
	}
	if old.Wake == nil || old.State == Waking || old.State == Active || old.State == Deleting {
		return Outcome{Session: old}
	}
	s := x.edit(old)
	if s.Wake.Deadline != 0 && s.Wake.Deadline <= x.now {
		x.giveUp(s, p.Why)
	} else if s.State != Sleeping {
		x.place(s, x.named(p.Candidates, p.Alive))
	}
	x.put(s)
	return Outcome{Session: s}
}

func (x *tx) giveUp(s *Session, why string) {
	f := Failure{Kind: errkind.Unplaceable, Reason: s.Wake.Unplaced}
	switch {
	case s.State == Sleeping && why != "":
		f = Failure{Kind: errkind.Deadline, Reason: "the session was still going to sleep at the open's deadline: " + why}
	case f.Reason == "":
		f = Failure{Kind: errkind.Deadline, Reason: "the session did not wake before the open's deadline"}
	}
	s.Wake = nil
	if s.State == New {
		x.move(s, tGiveUpNew)
		s.Failure = &f
		x.emit(s, HasFailed, func(e *Event) { e.Failure = &f })
	} else {
		x.move(s, tGiveUp)
	}
	x.settle(s, VerbOpen, failWith(f.Kind, f.Reason))
}
