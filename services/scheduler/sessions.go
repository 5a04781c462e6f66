package scheduler

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

const maxHash = 64

// wake commits an open and answers when the session is active, or has failed,
// or time ran out; then the wake goes on, and asking again with the same
// request id joins it.
func (l *leader) wake(ctx context.Context, _ bus.Request, req *schedulerv1.WakeRequest) (*schedulerv1.WakeReply, error) {
	const op = "scheduler.wake"
	o, err := l.openOf(req.GetAdmission())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	ctx, cancel := context.WithDeadline(ctx, o.Deadline.Std())
	defer cancel()
	key := l.canonical(o.Keys)
	at, forget := l.driver.begin(ctx, key)
	defer forget()
	for {
		changed, release := l.rep.Changed(l.canonical(o.Keys))
		s := l.session(o.Keys...)
		if s == nil { // as it would be
			s = &core.Session{Tenant: o.Actor.Tenant, Key: o.Keys[0], State: core.New, Terms: &o.Terms}
		}
		if !holds(s) {
			l.queue.turn(ctx, o.Terms.Priority)
		}
		var placed func(core.Outcome, error)
		o.Candidates, placed = l.openCandidates(ctx, s, o)
		out, err := l.apply(ctx, core.Entry{Open: o})
		placed(out, err)
		if err == nil && !out.Wait {
			release()
			return l.woken(ctx, o, out, at)
		}
		if err != nil {
			release()
			return nil, errs.Wrap(op, key.String(), err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			release()
			why := "the session was still being deleted when time ran out"
			if out.Session.State == core.Sleeping {
				why = "the session was still going to sleep in a weaker tier when time ran out"
			}
			return nil, errs.E(op, errkind.Deadline, key.String(), why)
		}
		release()
	}
}

// openCandidates are the hosts that may take what o opens. The pool is asked
// only for an open that is likely to be placed by its own entry.
func (l *leader) openCandidates(ctx context.Context, s *core.Session, o *core.Open) ([]core.Candidate, func(core.Outcome, error)) {
	c := l.candidates(s, o.Terms)
	known := false
	l.rep.View(func(st *core.State) { known = st.Record(s.Key, core.VerbOpen, o.Request) != nil })
	if known || holds(s) || s.State == core.Deleting {
		return c, func(core.Outcome, error) {}
	}
	return l.pools.reserve(ctx, wanted{session: s, terms: o.Terms, request: o.Request, deadline: o.Deadline}, c)
}

// woken waits for the outcome of an open that was committed.
func (l *leader) woken(ctx context.Context, o *core.Open, out core.Outcome, at time.Time) (*schedulerv1.WakeReply, error) {
	const op = "scheduler.wake"
	if out.Refused != nil {
		return nil, refused(op, o.Keys[0].String(), out.Refused)
	}
	replayed := out.Record.Done && len(out.Touched) == 0
	rec, err := l.settled(ctx, out.Record, core.VerbOpen)
	if err != nil {
		late := "the session was still waking when time ran out; the same request may be sent again"
		if why := l.driver.asleepBut(rec.Session); why != "" {
			late = "the session was still going to sleep when time ran out: " + why
		}
		return nil, errs.E(op, errkind.Deadline, rec.Session.String(), late)
	}
	if rec.Failure != nil {
		return nil, refused(op, rec.Session.String(), final(rec.Failure))
	}
	reply := &schedulerv1.WakeReply{
		Session: protoRef(o.Actor.Tenant, core.Ref{Session: rec.Session, Generation: rec.Generation, Epoch: rec.Epoch}),
		Origin:  rec.Origin, RestoredAsOf: protoTime(rec.RestoredAsOf), Host: rec.Host.String(),
		Replayed: replayed, State: core.Deleted,
	}
	moved := false
	l.rep.View(func(st *core.State) {
		if h := st.Host(rec.Host); h != nil {
			reply.HostKey = h.Key
		}
		s := st.Session(rec.Session)
		if s == nil || s.Generation != rec.Generation {
			return
		}
		if moved = s.Epoch != rec.Epoch; moved {
			return
		}
		reply.State, reply.Terms, reply.ImageDigest = s.State, protoTerms(*s.Terms), s.ImageDigest
		switch {
		case rec.Origin == corev1.Origin_ORIGIN_JOINED:
			reply.Timing = protoTiming(core.Timing{Total: time.Since(at), Steps: []core.Step{{Name: "scheduler.apply_renewed", Took: time.Since(at)}}})
		case replayed:
			reply.Timing = protoTiming(lastWake(s))
		default:
			reply.Timing = protoTiming(answered(lastWake(s), time.Since(at)))
		}
	})
	if moved {
		return nil, errs.E(op, errkind.Superseded, rec.Session.String(),
			"this request opened the session before, and it was placed anew since; open it again with a new request id")
	}
	return reply, nil
}

// final is a stored outcome as its caller gets it. Kinds that ask to send the
// same request again would bring the same outcome for ever: a new request may
// go well, this one is over.
func final(f *core.Failure) *core.Failure {
	switch f.Kind {
	case errkind.Unavailable, errkind.Internal, errkind.NoCapacity, errkind.Exhausted, errkind.Busy, errkind.NotLeader, errkind.Canceled:
		return &core.Failure{Kind: errkind.Unplaceable, Reason: f.Reason}
	}
	return f
}

// settled waits until a request has its outcome.
func (l *leader) settled(ctx context.Context, r *core.Record, v core.Verb) (*core.Record, error) {
	for {
		changed, release := l.rep.Changed(r.Session)
		var now *core.Record
		l.rep.View(func(st *core.State) { now = st.Record(r.Session, v, r.ID) })
		if now == nil {
			now = r
		}
		if now.Done {
			release()
			return now, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			release()
			return now, ctx.Err()
		}
		release()
	}
}

// canonical is the key under which a session is, or would be, stored.
func (l *leader) canonical(keys []ids.SessionKey) ids.SessionKey {
	if s := l.session(keys...); s != nil {
		return s.Key
	}
	return keys[0]
}

func (l *leader) openOf(a *corev1.Admission) (*core.Open, error) {
	actor, err := actorOf(a.GetActor())
	if err != nil {
		return nil, err
	}
	keys, err := parseKeys("", a.GetKeys())
	if err != nil {
		return nil, err
	}
	id, err := ids.ParseRequestID(a.GetRequestId())
	if err != nil {
		return nil, err
	}
	if len(a.GetBodyHash()) > maxHash || len(a.GetSessionName()) > ids.MaxToken {
		return nil, errs.E("read admission", errkind.TooLarge, "", "body hash or session name is too long")
	}
	if a.GetTerms().GetTier() == corev1.Tier_TIER_UNSPECIFIED {
		return nil, errs.E("read admission", errkind.Invalid, "", "the terms name no tier")
	}
	now := core.At(time.Now())
	o := &core.Open{Actor: actor, Terms: termsOf(a.GetTerms()), Request: id, Hash: a.GetBodyHash(),
		StoredAt: timeOf(a.GetStoredAt()), Deadline: timeOf(a.GetDeadline()), Cause: a.GetCause(), Name: a.GetSessionName(), Keys: keys,
		Decision: decisionOf(a.GetTierDecision())}
	if o.StoredAt == 0 {
		o.StoredAt = now
	}
	if o.Deadline == 0 {
		o.Deadline = now.Add(l.cfg.OpenDeadline)
	}
	return o, nil
}

// sleep commits a sleep and answers when the session sleeps or stays awake.
func (l *leader) sleep(ctx context.Context, _ bus.Request, req *schedulerv1.SleepRequest) (*schedulerv1.SleepReply, error) {
	const op = "scheduler.sleep"
	c, err := sleepOf(req)
	if err != nil {
		return nil, errs.Wrap(op, req.GetSession(), err)
	}
	for {
		changed, release := l.rep.Changed(l.canonical(c.Keys))
		out, err := l.apply(ctx, core.Entry{Sleep: c})
		if err != nil {
			release()
			return nil, errs.Wrap(op, c.Keys[0].String(), err)
		}
		if !out.Wait && (out.Record == nil || !out.Record.Done) && out.Session != nil && out.Session.State == core.Sleeping {
			release()
			return l.slept(ctx, c, out)
		}
		if !out.Wait {
			release()
			return l.sleepReply(ctx, c, out)
		}
		if out.Session.State == core.Deleting {
			release()
			return &schedulerv1.SleepReply{Session: sessionRef(out.Session), State: out.Session.State}, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			release()
			return nil, errs.E(op, errkind.Busy, c.Keys[0].String(), "the session is still waking")
		}
		release()
	}
}

func sleepOf(req *schedulerv1.SleepRequest) (*core.SleepCmd, error) {
	t, err := ids.ParseTenant(req.GetTenant())
	if err != nil {
		return nil, err
	}
	keys, err := parseKeys(req.GetSession(), req.GetKeys())
	if err != nil {
		return nil, err
	}
	if len(req.GetReason()) > 256 || len(req.GetBodyHash()) > maxHash {
		return nil, errs.E("read request", errkind.TooLarge, "", "reason or body hash is too long")
	}
	c := &core.SleepCmd{Tenant: t, Keys: keys, Generation: generationOf(req.GetGeneration()), Epoch: epochOf(req.GetEpoch()),
		IdleSince: timeOf(req.GetIdleSince()), Reason: req.GetReason(), Hash: req.GetBodyHash()}
	if c.Reason == core.ReasonDrain {
		return nil, errs.E("read request", errkind.Invalid, "", "a session is not drained by itself; drain its host")
	}
	if req.GetRequestId() != "" {
		c.Request, err = ids.ParseRequestID(req.GetRequestId())
	}
	return c, err
}

// sleepReply answers what needs no waiting, and an ephemeral end.
func (l *leader) sleepReply(ctx context.Context, c *core.SleepCmd, out core.Outcome) (*schedulerv1.SleepReply, error) {
	const op = "scheduler.sleep"
	if out.Refused != nil {
		return nil, refused(op, c.Keys[0].String(), out.Refused)
	}
	rec := out.Record
	if rec != nil && !rec.Done {
		var err error
		if rec, err = l.settled(ctx, rec, core.VerbClose); err != nil {
			return nil, errs.E(op, errkind.Deadline, rec.Session.String(), "the session was still ending when time ran out")
		}
	}
	if rec != nil && rec.Failure != nil {
		return nil, refused(op, rec.Session.String(), rec.Failure)
	}
	if rec != nil {
		return &schedulerv1.SleepReply{State: rec.State, BusySince: protoTime(rec.BusySince),
			Session: protoRef(c.Tenant, core.Ref{Session: rec.Session, Generation: rec.Generation, Epoch: rec.Epoch})}, nil
	}
	return &schedulerv1.SleepReply{Session: sessionRef(out.Session), State: out.Session.State, BusySince: protoTime(out.BusySince)}, nil
}

// slept waits until a sleep under way is over.
func (l *leader) slept(ctx context.Context, c *core.SleepCmd, out core.Outcome) (*schedulerv1.SleepReply, error) {
	const op = "scheduler.sleep"
	if out.Record != nil {
		return l.sleepReply(ctx, c, out)
	}
	was := out.Session
	for {
		changed, release := l.rep.Changed(was.Key)
		s := l.session(was.Key)
		if s == nil || s.Generation != was.Generation || s.Epoch != was.Epoch || s.State != core.Sleeping {
			release()
			return sleepNow(was, s), nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			release()
			return nil, errs.E(op, errkind.Deadline, was.Key.String(), "the session was still going to sleep when time ran out")
		}
		release()
	}
}

func sleepNow(was, s *core.Session) *schedulerv1.SleepReply {
	if s == nil || s.Generation != was.Generation {
		return &schedulerv1.SleepReply{Session: sessionRef(was), State: core.Deleted}
	}
	r := &schedulerv1.SleepReply{Session: sessionRef(s), State: s.State}
	if s.State == core.Active {
		r.BusySince = protoTime(s.BusySince)
	}
	return r
}

// delete commits a delete and answers when it is done.
func (l *leader) delete(ctx context.Context, _ bus.Request, req *schedulerv1.DeleteRequest) (*schedulerv1.DeleteReply, error) {
	const op = "scheduler.delete"
	c, err := l.deleteOf(req)
	if err != nil {
		return nil, errs.Wrap(op, req.GetSession(), err)
	}
	out, err := l.apply(ctx, core.Entry{Delete: c})
	if err != nil {
		return nil, errs.Wrap(op, c.Keys[0].String(), err)
	}
	if out.Refused != nil {
		l.m.deleteRefused(ctx, c, out.Refused)
		if c.Expire != nil && out.Refused.Kind == errkind.Exhausted {
			l.log.Error("ALARM: mass expiry stopped", "session", c.Keys[0], "reason", out.Refused.Reason)
		}
		return nil, refused(op, c.Keys[0].String(), out.Refused)
	}
	if out.Deleted || c.Expire != nil && c.Expire.WarnOnly {
		return deleteReply(c, out), nil
	}
	return l.deleted(ctx, c, out.Session)
}

func (l *leader) deleted(ctx context.Context, c *core.Delete, was *core.Session) (*schedulerv1.DeleteReply, error) {
	for {
		changed, release := l.rep.Changed(was.Key)
		s := l.session(was.Key)
		if s == nil || s.Generation != was.Generation {
			release()
			return &schedulerv1.DeleteReply{Session: sessionRef(was), State: core.Deleted}, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			release()
			return nil, errs.E("scheduler.delete", errkind.Deadline, c.Keys[0].String(), "the delete is committed and goes on, but was not done when time ran out")
		}
		release()
	}
}

func deleteReply(c *core.Delete, out core.Outcome) *schedulerv1.DeleteReply {
	r := &schedulerv1.DeleteReply{State: core.Deleted, Session: protoRef(c.Tenant, core.Ref{Session: c.Keys[0]})}
	switch {
	case out.Deleted && out.Record != nil:
		r.Session = protoRef(c.Tenant, core.Ref{Session: out.Record.Session, Generation: out.Record.Generation, Epoch: out.Record.Epoch})
	case !out.Deleted && out.Session != nil:
		r.Session, r.State = sessionRef(out.Session), out.Session.State
	}
	return r
}

func (l *leader) deleteOf(req *schedulerv1.DeleteRequest) (*core.Delete, error) {
	t, err := ids.ParseTenant(req.GetTenant())
	if err != nil {
		return nil, err
	}
	keys, err := parseKeys(req.GetSession(), req.GetKeys())
	if err != nil {
		return nil, err
	}
	if len(req.GetBodyHash()) > maxHash {
		return nil, errs.E("read request", errkind.TooLarge, "", "the body hash is too long")
	}
	c := &core.Delete{Tenant: t, Keys: keys, Hash: req.GetBodyHash(), StoredAt: timeOf(req.GetStoredAt())}
	if req.GetRequestId() != "" {
		if c.Request, err = ids.ParseRequestID(req.GetRequestId()); err != nil {
			return nil, err
		}
	}
	if req.GetExpire() {
		c.Expire = &core.Expire{Generation: generationOf(req.GetGeneration()), Revision: req.GetRevision(), WarnOnly: req.GetWarn(),
			Notice: l.cfg.ExpireNotice, MaxPerHour: l.cfg.ExpirePerHour}
	}
	return c, nil
}
