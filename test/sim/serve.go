package sim

import (
	"slices"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// serve opens the leader's methods, modelled on services/scheduler/{sessions,hosts,serve}.go.
func (l *leader) serve() {
	s := l.r.p.serve
	s["wake"] = l.rpcWake
	s["sleep"] = l.rpcSleep
	s["delete"] = l.rpcDelete
	s["join"] = l.rpcJoin
	s["lease"] = l.rpcLease
	s["commit_manifest"] = l.rpcCommit
	s["report"] = l.rpcReport
	s["show"] = l.rpcShow
	s["list"] = l.rpcList
	s["drain"] = l.rpcDrain
	s["remove_host"] = l.rpcRemove
}

func refused(f *sched.Failure) error { return &fault{kind: f.Kind, why: f.Reason} }

// settledAs is the stored outcome of a request.
func settledAs(f *sched.Failure) error { return &fault{kind: f.Kind, why: f.Reason, final: true} }

// both ends with the caller's context and with the term.
func (l *leader) both(c *ctx) *ctx {
	n := l.w.under(l.c)
	if c.until != 0 {
		n = l.w.within(l.c, c.until-l.w.now)
	}
	return n
}

func (l *leader) rpcWake(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	c = l.both(c)
	a := req.(*corev1.Admission)
	o := openOf(a)
	c = l.w.within(c, o.Deadline.Std().Sub(l.r.p.wall()))
	for {
		changed := l.changed.of(l.canonical(o.Keys))
		l.queue.turn(t, c, o.Terms.Priority)
		o.Candidates = l.candidates(o.Keys, &o.Terms)
		out, err := l.apply(t, c, sched.Entry{Open: o})
		if err != nil {
			return nil, err
		}
		if !out.Wait {
			return l.woken(t, c, o, out)
		}
		t.wait(c, -1, changed)
		if c.over() {
			return nil, fail(errkind.Deadline, "the session was still being deleted when time ran out")
		}
	}
}

func openOf(a *corev1.Admission) *sched.Open {
	t := a.GetTerms()
	terms := sched.Terms{Plan: t.GetPlan(), Template: t.GetTemplate(), Tier: t.GetTier(), Image: t.GetImage(),
		Limits:    sched.Limits{CPUMillis: t.GetLimits().GetCpuMillis(), MemoryBytes: t.GetLimits().GetMemoryBytes(), PIDs: t.GetLimits().GetPids(), DiskBytes: t.GetLimits().GetDiskBytes()},
		Ephemeral: t.GetPersistence() == corev1.Persistence_PERSISTENCE_EPHEMERAL, Idle: t.GetIdle().AsDuration(), Retention: t.GetRetention().AsDuration()}
	o := &sched.Open{Actor: actorOf(a.GetActor()), Terms: terms, Request: ids.RequestID(a.GetRequestId()), Hash: a.GetBodyHash(),
		StoredAt: sched.At(a.GetStoredAt().AsTime()), Deadline: sched.At(a.GetDeadline().AsTime()), Cause: a.GetCause(), Name: a.GetSessionName()}
	if machineAsked(a.GetRequestId()) {
		o.Terms.Tier = corev1.Tier_TIER_MICROVM
	}
	for _, k := range a.GetKeys() {
		o.Keys = append(o.Keys, ids.SessionKey(k))
	}
	return o
}

// machineAsked has a few opens ask for a virtual machine, without a draw of its own.
func machineAsked(request string) bool {
	sum := byte(0)
	for i := range len(request) {
		sum = sum*31 + request[i]
	}
	return sum%5 == 0
}

func actorOf(a *corev1.Actor) sched.Actor {
	return sched.Actor{Tenant: ids.Tenant(a.GetTenant()), Issuer: a.GetIssuer(), Subject: a.GetSubject(), Frontend: a.GetFrontend()}
}

func (l *leader) canonical(keys []ids.SessionKey) ids.SessionKey {
	if s := l.session(keys...); s != nil {
		return s.Key
	}
	return keys[0]
}

func (l *leader) woken(t *task, c *ctx, o *sched.Open, out sched.Outcome) (any, error) {
	if out.Refused != nil {
		return nil, refused(out.Refused)
	}
	rec, err := l.settled(t, c, out.Record, sched.VerbOpen)
	if err != nil {
		return nil, err
	}
	if rec.Failure != nil {
		return nil, settledAs(rec.Failure)
	}
	r := openReply{ref: sched.Ref{Session: rec.Session, Generation: rec.Generation, Epoch: rec.Epoch}, origin: rec.Origin,
		asOf: rec.RestoredAsOf, host: rec.Host, state: sched.Deleted}
	if s := l.session(rec.Session); s != nil && s.Generation == rec.Generation {
		if s.Epoch != rec.Epoch {
			return nil, fail(errkind.Superseded, "this request opened the session before, and it was placed anew since")
		}
		r.state = s.State
	}
	return r, nil
}

// settled waits until a request has its outcome.
func (l *leader) settled(t *task, c *ctx, r *sched.Record, v sched.Verb) (*sched.Record, error) {
	for {
		changed := l.changed.of(r.Session)
		now := l.st().Record(r.Session, v, r.ID)
		if now == nil {
			now = r
		}
		if now.Done {
			return now, nil
		}
		t.wait(c, -1, changed)
		if c.over() {
			return now, fail(c.kind, "not settled when time ran out")
		}
	}
}

func (l *leader) rpcSleep(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	c = l.both(c)
	cmd := req.(*sched.SleepCmd)
	for {
		changed := l.changed.of(l.canonical(cmd.Keys))
		out, err := l.apply(t, c, sched.Entry{Sleep: cmd})
		if err != nil {
			return nil, err
		}
		if !out.Wait {
			return l.slept(t, c, cmd, out)
		}
		if out.Session.State == sched.Deleting {
			return closeReply{ref: refOf(out.Session), state: out.Session.State}, nil
		}
		t.wait(c, -1, changed)
		if c.over() {
			return nil, fail(errkind.Busy, "the session is still waking")
		}
	}
}

func (l *leader) slept(t *task, c *ctx, cmd *sched.SleepCmd, out sched.Outcome) (any, error) {
	if out.Refused != nil {
		return nil, refused(out.Refused)
	}
	rec := out.Record
	if rec != nil {
		var err error
		if rec, err = l.settled(t, c, rec, sched.VerbClose); err != nil {
			return nil, err
		}
		if rec.Failure != nil {
			return nil, settledAs(rec.Failure)
		}
		return closeReply{ref: sched.Ref{Session: rec.Session, Generation: rec.Generation, Epoch: rec.Epoch}, state: rec.State, busy: rec.BusySince}, nil
	}
	was := out.Session
	for was.State == sched.Sleeping {
		changed := l.changed.of(was.Key)
		s := l.session(was.Key)
		if s == nil || s.Generation != was.Generation {
			return closeReply{ref: refOf(was), state: sched.Deleted}, nil
		}
		if s.Epoch != was.Epoch || s.State != sched.Sleeping {
			r := closeReply{ref: refOf(s), state: s.State}
			if s.State == sched.Active {
				r.busy = s.BusySince
			}
			return r, nil
		}
		t.wait(c, -1, changed)
		if c.over() {
			return nil, fail(c.kind, "the session was still going to sleep when time ran out")
		}
	}
	return closeReply{ref: refOf(was), state: was.State, busy: out.BusySince}, nil
}

func (l *leader) rpcDelete(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	c = l.both(c)
	cmd := req.(*sched.Delete)
	out, err := l.apply(t, c, sched.Entry{Delete: cmd})
	switch {
	case err != nil:
		return nil, err
	case out.Refused != nil:
		return nil, refused(out.Refused)
	case out.Deleted || cmd.Expire != nil && cmd.Expire.WarnOnly:
		return closeReply{state: sched.Deleted}, nil
	}
	was := out.Session
	for {
		changed := l.changed.of(was.Key)
		if s := l.session(was.Key); s == nil || s.Generation != was.Generation {
			return closeReply{ref: refOf(was), state: sched.Deleted}, nil
		}
		t.wait(c, -1, changed)
		if c.over() {
			return nil, fail(c.kind, "the delete is committed and goes on")
		}
	}
}

func (l *leader) rpcJoin(t *task, c *ctx, from ids.Host, req any) (any, error) {
	c = l.both(c)
	r := req.(joinReq)
	if r.host != from {
		return nil, fail(errkind.Denied, "a host may not speak for another")
	}
	if err := l.joins(t, c, r); err != nil {
		return nil, err
	}
	l.erase.fire(l.w)
	reply := joinReply{}
	for _, s := range sorted(l.st()) {
		if s.Host == r.host || s.Newest == r.host {
			reply.owned = append(reply.owned, s)
		}
	}
	for _, tomb := range l.st().Tombstones() {
		for _, e := range tomb.Erase {
			if e.Host == r.host && !e.Done {
				reply.erased = append(reply.erased, deleteReq{tenant: tomb.Tenant, ref: e.Ref(tomb)})
			}
		}
	}
	sortErased(reply.erased)
	for _, s := range l.st().Stale(r.host) {
		if isStale(s, r.host) {
			reply.stale = append(reply.stale, refOf(s))
		}
	}
	return reply, nil
}

// joins grants a lease and records the join.
func (l *leader) joins(t *task, c *ctx, r joinReq) error {
	defer l.turn(t, r.host)()
	fresh := l.grant(r.host, r.boot)
	out, err := l.apply(t, c, sched.Entry{Join: &sched.Host{ID: r.host, Boot: r.boot, Key: "k" + r.boot,
		Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_MICROVM}, Capacity: r.cap, CPUPercent: 400}})
	switch {
	case err != nil:
		return err
	case out.Refused != nil:
		l.forget(r.host)
		return refused(out.Refused)
	}
	if fresh {
		l.joined(r.host)
	}
	l.queue.room()
	return nil
}

// isStale reports whether a disk of s on h is older than what is saved: s was active elsewhere since,
// under the epoch that it still has.
func isStale(s *sched.Session, h ids.Host) bool {
	left := slices.ContainsFunc(s.Left, func(l sched.Left) bool { return l.Host == h })
	return s.Host != "" && s.Host != h && s.Newest != h && s.LastActive == s.Epoch && !left
}

func (l *leader) rpcLease(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	c = l.both(c)
	r := req.(leaseReq)
	if err := l.verify(t, c); err != nil {
		return nil, err
	}
	rec := l.st().Host(r.host)
	if rec == nil || rec.Lost || rec.Boot != r.boot || !l.renew(r.host, r.boot) {
		return nil, fail(errkind.StaleEpoch, "this boot holds no lease; join again")
	}
	return struct{}{}, nil
}

func (l *leader) rpcCommit(t *task, c *ctx, from ids.Host, req any) (any, error) {
	c = l.both(c)
	r := req.(commitReq)
	if l.w.opt.Mutation == CommitAnyEpoch {
		if s := l.session(r.ref.Session); s != nil {
			r.ref, from, r.manifest.Parent = refOf(s), s.Host, s.Manifest
		}
	}
	out, err := l.apply(t, c, sched.Entry{Manifest: &sched.ManifestCmd{Ref: r.ref, Host: from, Manifest: r.manifest, Sealed: r.sealed}})
	if err != nil {
		return nil, err
	}
	if out.Refused != nil {
		l.w.cov.hit("manifest refused")
		return nil, refused(out.Refused)
	}
	return struct{}{}, nil
}

func (l *leader) rpcReport(t *task, c *ctx, from ids.Host, req any) (any, error) {
	c = l.both(c)
	r := req.(reportReq)
	e := sched.Entry{Exited: &sched.Exited{Ref: r.ref, Host: from, Reason: r.why}}
	if s := l.session(r.ref.Session); s != nil {
		e.Exited.Candidates = l.candidates([]ids.SessionKey{s.Key}, s.Terms)
	}
	if r.what == "dropped" {
		e = sched.Entry{Dropped: &sched.Dropped{Session: r.ref.Session, Generation: r.ref.Generation, Epoch: r.ref.Epoch, Host: from}}
	}
	out, err := l.apply(t, c, e)
	if err != nil {
		return nil, err
	}
	if out.Refused != nil {
		return nil, refused(out.Refused)
	}
	return struct{}{}, nil
}

func (l *leader) rpcShow(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	c = l.both(c)
	r := req.(showReq)
	if err := l.verify(t, c); err != nil {
		return nil, err
	}
	if s := l.session(r.key); s != nil && s.Tenant == r.tenant {
		return showReply{s: s}, nil
	}
	if tomb := l.st().Tombstone(r.key); tomb != nil && tomb.Tenant == r.tenant {
		return showReply{t: tomb}, nil
	}
	return nil, fail(errkind.NotFound, "there is no such session")
}

func (l *leader) rpcList(t *task, c *ctx, _ ids.Host, _ any) (any, error) {
	c = l.both(c)
	if err := l.verify(t, c); err != nil {
		return nil, err
	}
	return sorted(l.st()), nil
}

func (l *leader) rpcDrain(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	c = l.both(c)
	r := req.(drainReq)
	d := &sched.Drain{Host: r.host, On: r.on}
	if r.on {
		d.Deadline = sched.At(l.r.p.wall().Add(r.grace))
	}
	out, err := l.apply(t, c, sched.Entry{Drain: d})
	if err != nil {
		return nil, err
	}
	if out.Refused != nil {
		return nil, refused(out.Refused)
	}
	if r.on {
		l.drain(r.host)
	} else {
		l.queue.room()
	}
	return struct{}{}, nil
}

func (l *leader) rpcRemove(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	c = l.both(c)
	r := req.(removeReq)
	if l.alive(r.host) && len(l.st().OnHost(r.host)) > 0 {
		return nil, fail(errkind.Conflict, "the host holds a lease and has sessions; drain it first")
	}
	out, err := l.apply(t, c, sched.Entry{RemoveHost: &sched.RemoveHost{Host: r.host, LoseUnsaved: r.lose}})
	if err != nil {
		return nil, err
	}
	if out.Refused != nil {
		return nil, refused(out.Refused)
	}
	l.forget(r.host)
	return struct{}{}, nil
}
