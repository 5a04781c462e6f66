package core

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// sleep starts, joins or answers a sleep.
func (x *tx) sleep(c *SleepCmd) Outcome {
	old := x.s.Session(c.Keys...)
	key := firstKey(c.Keys)
	if old != nil {
		key = old.Key
	}
	keys := []ids.SessionKey{key}
	if x.v >= poolSince { // the session that it ended with may be gone
		keys = append(keys, c.Keys...)
	}
	for _, k := range keys {
		if out := x.known(k, VerbClose, c.Request, c.Hash); out != nil {
			return *out
		}
	}
	switch {
	case old == nil:
		return refuse(errkind.NotFound, "there is no such session")
	case old.Tenant != c.Tenant:
		return refuse(errkind.Denied, "the session belongs to another tenant")
	case !c.Generation.IsZero() && c.Generation != old.Generation, !c.Epoch.IsZero() && c.Epoch != old.Epoch:
		out := refuse(errkind.StaleEpoch, "the session is at generation %s epoch %s", old.Generation, old.Epoch)
		out.Session = old
		return out
	}
	if out := x.maySleep(old, c); out != nil {
		return *out
	}
	s := x.edit(old)
	switch s.State {
	case Active:
		if c.Reason != ReasonDrain && c.IdleSince != 0 && x.now < s.RenewedAt.Add(s.Terms.Idle-slack(s.Terms.Idle)) {
			return Outcome{Session: old, BusySince: s.RenewedAt}
		}
		if s.Terms.Ephemeral {
			return x.endEphemeral(s, c)
		}
		x.move(s, tSleep)
		s.Sleep = &Sleep{Reason: c.Reason, IdleSince: c.IdleSince, Pause: c.Reason == ReasonPause}
		if x.v >= handoffSince && c.Reason == ReasonDrain {
			s.Sleep.Handoff, s.Sleep.Force = true, c.Force
		}
		return x.joinSleep(s, c)
	case Sleeping:
		x.move(s, tSleepJoin)
		x.changeSleep(s, c)
		return x.joinSleep(s, c)
	case Waking, Deleting:
		return Outcome{Session: old, Wait: true}
	case New, Failed, Asleep, Paused:
		return x.sleepAtRest(s, c)
	}
	return Outcome{Session: old}
}

// maySleep refuses, or puts off, the sleep of a drain.
func (x *tx) maySleep(s *Session, c *SleepCmd) *Outcome {
	if x.v < handoffSince || c.Reason != ReasonDrain {
		return nil
	}
	h := x.s.Host(s.Host)
	switch {
	case s.State != Active && s.State != Sleeping:
		return &Outcome{Session: s, Wait: s.State == Waking || s.State == Deleting}
	case h == nil || !h.Draining:
		out := refuse(errkind.Conflict, "host %s is not draining", s.Host)
		return &out
	case s.State == Active && !c.Force && s.Terms.Ephemeral: // its sleep would be its end
		return &Outcome{Session: s, BusySince: x.now}
	case s.State == Active && !c.Force && s.RenewedAt > c.IdleSince:
		return &Outcome{Session: s, BusySince: s.RenewedAt}
	}
	return nil
}

// changeSleep has a sleep under way end as the newer request wants it: after a
// close nothing is handed over, and a drain may stop to ask.
func (x *tx) changeSleep(s *Session, c *SleepCmd) {
	if x.v < handoffSince || s.Sleep == nil {
		return
	}
	sl := *s.Sleep
	switch {
	case c.Reason == ReasonDrain:
		sl.Force = sl.Force || c.Force
	case sl.Handoff && c.IdleSince == 0:
		sl.Handoff, sl.Reason, sl.Pause = false, c.Reason, c.Reason == ReasonPause
	}
	if sl != *s.Sleep {
		s.Sleep = &sl
	}
}

// ReasonPause makes a sleep end as paused.
const ReasonPause = "pause"

// ReasonDrain is that of a sleep that hands a session over.
const ReasonDrain = "drain"

// slack keeps a timer that fires a little early from missing its session.
func slack(idle time.Duration) time.Duration { return min(idle/10, 2*time.Second) }

func (x *tx) joinSleep(s *Session, c *SleepCmd) Outcome {
	r, out := x.wait(s, VerbClose, c.Request, c.Hash)
	if out != nil {
		return *out
	}
	x.put(s)
	return Outcome{Session: s, Record: r}
}

// endEphemeral deletes an ephemeral session: close and idle mean its end.
func (x *tx) endEphemeral(s *Session, c *SleepCmd) Outcome {
	r, out := x.wait(s, VerbClose, c.Request, c.Hash)
	if out != nil {
		return *out
	}
	x.startDelete(s, tEndEphemeral, Deletion{Reason: "ephemeral: " + c.Reason})
	x.put(s)
	return Outcome{Session: s, Record: r}
}

func (x *tx) sleepAtRest(s *Session, c *SleepCmd) Outcome {
	if w := s.Wake; x.v >= handoffSince && w != nil && w.Request == "" && w.Cause == handoffCause && !s.waits(VerbOpen) {
		x.move(s, tNoHandoff) // it was closed, so it need not wake
		s.Wake = nil
		x.put(s)
		s = x.edit(s)
	}
	if s.Terms.Ephemeral && s.Wake == nil && s.State != Paused {
		return x.endEphemeral(s, c)
	}
	if c.Reason == ReasonPause && s.Wake == nil && (s.State == Asleep || s.State == Failed) && !s.dead() {
		x.move(s, tPause)
		x.emit(s, WasPaused, func(e *Event) { e.Reason = c.Reason })
		x.put(s)
	}
	done := Record{Session: s.Key, Verb: VerbClose, ID: c.Request, Hash: c.Hash, Done: true,
		Generation: s.Generation, Epoch: s.Epoch, Host: s.Host, State: s.State}
	if s.Dirty && x.v >= movesSince {
		done.Failure = &Failure{Kind: errkind.Unsaved, Reason: "it sleeps, but not all that was written is saved: open it and close it again"}
	}
	return Outcome{Session: s, Record: x.remember(done)}
}

// slept commits asleep. It also takes the word of the host that has no compute
// left though the sleep was thought to be cancelled.
func (x *tx) slept(c *Slept) Outcome {
	old, no := x.exact(c.Ref)
	if no != nil {
		return *no
	}
	if old.State == Asleep || old.State == Paused {
		return Outcome{Session: old}
	}
	if old.State != Sleeping && old.State != Active {
		return refuse(errkind.StaleEpoch, "session %s is no longer going to sleep", c.Session)
	}
	s := x.edit(old)
	if s.Terms.Ephemeral { // never put to sleep, so its host has lost it
		return x.displace(s, displacement{reason: "the host has no sandbox of it", named: x.named(c.Candidates, c.Alive)})
	}
	if c.Manifest.ID != "" {
		if out := x.moveHead(s, c.Manifest); out != nil {
			return *out
		}
	}
	sl := Sleep{}
	if s.Sleep != nil {
		sl = *s.Sleep
	}
	if sl.Save {
		return x.saved(s, sl, c)
	}
	t := tAsleep
	if sl.Pause {
		t = tAsleepPaused
	}
	x.move(s, t)
	s.Sleep = nil
	s.unsaved(c.Manifest.ID == "")
	x.rest(s)
	if sl.Handoff && !s.Dirty && !sl.Pause && s.Wake == nil {
		x.handOver(s, c.Until)
	}
	x.emit(s, FellAsleep, func(e *Event) {
		e.Manifest, e.Reason, e.Timing, e.Terms = s.Manifest, sl.Reason, c.Timing, s.Terms
	})
	if sl.Pause {
		x.emit(s, WasPaused, func(e *Event) { e.Reason = sl.Reason })
	}
	x.settle(s, VerbClose, asIs)
	if s.Wake != nil {
		x.place(s, x.named(c.Candidates, c.Alive))
	}
	x.put(s)
	return Outcome{Session: s}
}

// saved ends the save of a session at rest. A host that has nothing of it any
// more had nothing that was not saved, or lost it: what there is, is the head,
// and the next wake says as of when that is.
func (x *tx) saved(s *Session, sl Sleep, c *Slept) Outcome {
	t := tSaved
	if sl.Pause {
		t = tSavedPaused
	}
	x.quietly(s, t)
	s.Sleep = nil
	given := c.Gone && s.Manifest != ""
	s.unsaved(c.Manifest.ID == "" && !given)
	s.Behind = s.Behind || given
	if given {
		x.settle(s, VerbClose, failWith(errkind.Unsaved, "it sleeps, but its host has nothing of what was written since the last snapshot"))
	}
	x.settle(s, VerbClose, asIs)
	if s.Wake != nil {
		x.place(s, x.named(c.Candidates, c.Alive))
	}
	x.put(s)
	return Outcome{Session: s}
}

// delayed tells those who wait for the close that it is not saved yet, and goes on trying.
func (x *tx) delayed(c *Delayed) Outcome {
	old, no := x.exact(c.Ref)
	if no != nil {
		return *no
	}
	if old.State != Sleeping {
		return Outcome{Session: old}
	}
	s := x.edit(old)
	x.move(s, tDelayed)
	x.settle(s, VerbClose, failWith(errkind.Unsaved, "it sleeps, but not all that was written is saved yet: "+c.Reason))
	x.put(s)
	return Outcome{Session: s}
}

// sleepRefused keeps the session awake: it is in use, or an open took the
// sleep back while processes still ran.
func (x *tx) sleepRefused(c *SleepRefused) Outcome {
	old, no := x.exact(c.Ref)
	if no != nil {
		return *no
	}
	if old.State == Active {
		return Outcome{Session: old, BusySince: c.BusySince}
	}
	if old.State != Sleeping {
		return refuse(errkind.StaleEpoch, "session %s is no longer going to sleep", c.Session)
	}
	if old.Sleep != nil && old.Sleep.Save {
		return refuse(errkind.Conflict, "session %s has no compute that could be busy", c.Session)
	}
	s := x.edit(old)
	x.move(s, tBusy)
	s.Sleep, s.BusySince = nil, c.BusySince
	if w := s.Wake; w != nil {
		s.Wake, s.RenewedAt = nil, x.now
		x.emit(s, Renewed, func(e *Event) { e.Request, e.Terms = w.Request, s.Terms })
		x.settle(s, VerbOpen, func(r *Record) { r.Origin = corev1.Origin_ORIGIN_JOINED })
	}
	x.settle(s, VerbClose, func(r *Record) { r.BusySince = c.BusySince })
	x.put(s)
	return Outcome{Session: s, BusySince: c.BusySince}
}

func firstKey(keys []ids.SessionKey) ids.SessionKey {
	if len(keys) == 0 {
		return ""
	}
	return keys[0]
}
