package sim

import (
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// loop is the driver of one session that is not at rest, modelled on services/scheduler/driver.go: it
// looks at the stored session, does what follows from it, records the result, and looks again.
type loop struct {
	key     ids.SessionKey
	poke    signal
	step    string
	tries   int
	why     string
	unsaved bool
}

// touch tells that a session changed; it starts a loop if there is work for one.
func (l *leader) touch(key ids.SessionKey) {
	if lp := l.loops[key]; lp != nil {
		lp.poke.fire(l.w)
		return
	}
	if s := l.session(key); l.over || s == nil || !driven(s) {
		return
	}
	lp := &loop{key: key}
	l.loops[key] = lp
	l.w.spawn(l.r.p, "drive", func(t *task) { l.drive(t, lp) })
}

// driven reports whether a session has work that is not the queue's.
func driven(s *sched.Session) bool {
	next := sched.Next(s)
	return len(next) > 0 && next[0].Kind != sched.Retry && next[0].Kind != sched.HostClear
}

// joined has the sessions of a host looked at now.
func (l *leader) joined(h ids.Host) {
	for _, k := range sortedKeys(l.loops) {
		if s := l.session(k); s != nil && s.Host == h {
			l.touch(k)
		}
	}
}

func (l *leader) drive(t *task, lp *loop) {
	for !l.over {
		s := l.session(lp.key)
		if s == nil || !driven(s) {
			if lp.poke.take() {
				continue
			}
			delete(l.loops, lp.key)
			return
		}
		if step := s.State.String() + s.Epoch.String(); step != lp.step {
			lp.step, lp.tries, lp.why, lp.unsaved = step, 0, "", false
		}
		wait := l.during(t, lp, s)
		if wait == 0 && l.session(lp.key) == s {
			wait = l.backoff(lp.tries)
		}
		lp.tries++
		if wait <= 0 || l.over {
			continue
		}
		t.wait(l.c, l.r.p.real(wait), &lp.poke)
		lp.poke.take()
	}
}

// during does the session's step and breaks it off when the session moves on; it recalls a sleep when
// an open comes in.
func (l *leader) during(t *task, lp *loop, s *sched.Session) time.Duration {
	c := l.w.under(l.c)
	defer c.cancel(l.w, errkind.Canceled)
	var wait time.Duration
	begun := s
	work := l.w.spawn(l.r.p, "step", func(st *task) { wait = l.step(st, c, lp, begun) })
	recalled, moved := false, false
	for {
		if s.State == sched.Sleeping && s.Wake != nil && !recalled && !isHandoff(s) {
			recalled = true
			at := s
			l.w.spawn(l.r.p, "recall", func(rt *task) { l.recall(rt, c, at) })
		}
		t.wait(nil, -1, &work.done, &lp.poke)
		if work.done.set {
			if moved {
				return 0
			}
			return wait
		}
		lp.poke.take()
		now := l.session(lp.key)
		if now == nil || now.State != s.State || now.Epoch != s.Epoch || now.Generation != s.Generation {
			moved = true
			c.cancel(l.w, errkind.Canceled)
			t.wait(nil, -1, &work.done)
			return 0
		}
		s = now
		if lp.unsaved && s.State == sched.Sleeping && s.Wake != nil {
			moved = true
			c.cancel(l.w, errkind.Canceled)
		}
	}
}

// step does what follows from the stored session; it returns how long to wait before the next look.
func (l *leader) step(t *task, c *ctx, lp *loop, s *sched.Session) time.Duration {
	var err error
	switch sched.Next(s)[0].Kind {
	case sched.HostWake:
		err = l.stepWake(t, c, s)
	case sched.HostSleep:
		err = l.stepSleep(t, c, lp, s)
	case sched.Revoke:
		err = l.stepDelete(t, c, s)
	case sched.HostStop:
		err = l.stepStop(t, c, s)
	}
	if err == nil {
		return 0
	}
	if !c.over() {
		l.w.say("again %s %s try %d: %v", s.Key[:6], s.State, lp.tries+1, err)
		lp.why, lp.unsaved = err.Error(), is(err, errkind.Unsaved)
	}
	return l.backoff(lp.tries)
}

func refOf(s *sched.Session) sched.Ref {
	return sched.Ref{Session: s.Key, Generation: s.Generation, Epoch: s.Epoch}
}

func failureOf(err error) *sched.Failure {
	if err == nil {
		return nil
	}
	return &sched.Failure{Kind: kindOf(err), Reason: err.Error()}
}

// gone reports whether the host has no compute of that epoch.
func gone(err error) bool { return is(err, errkind.NotFound) || is(err, errkind.StaleEpoch) }

// follow commits what follows from an answer, and from its refusal. ok is false if nothing does.
func (l *leader) follow(t *task, c *ctx, a sched.Answer, cand []sched.Candidate) (out sched.Outcome, ok bool, err error) {
	e, ok := sched.After(l.session(a.Session.Key), a, wakeTries, cand)
	if !ok {
		return out, false, nil
	}
	if e.Slept != nil && e.Slept.Until == 0 {
		e.Slept.Until = sched.At(l.r.p.wall().Add(handoffWait))
	}
	out, err = l.apply(t, c, e)
	if err == nil && out.Refused != nil {
		l.w.cov.hit("scheduler refuses a stale answer")
		if e, more := sched.Refused(e, *out.Refused); more {
			_, err = l.apply(t, c, e)
		}
	}
	return out, true, err
}

func (l *leader) wakeCtx(c *ctx, s *sched.Session) *ctx {
	d := l.r.p.real(wakeTimeout)
	if s.Wake != nil && s.Wake.Deadline != 0 {
		d = min(d, s.Wake.Deadline.Std().Sub(l.r.p.wall()))
	}
	return l.w.within(c, d)
}

func wakeRequest(c *ctx, s *sched.Session) wakeReq {
	r := wakeReq{tenant: s.Tenant, ref: refOf(s), terms: s.Terms, head: s.Manifest, lastActive: s.LastActive,
		fresh: s.Fresh(), unsaved: s.TellRestored(), image: s.ImageDigest, name: s.Name, until: c.until}
	if s.Wake != nil {
		r.reservation, r.cold = s.Wake.Reservation, s.Wake.Cold
	}
	return r
}

func (l *leader) stepWake(t *task, c *ctx, s *sched.Session) error {
	a := sched.Answer{Kind: sched.HostWake, Session: s}
	if !l.alive(s.Host) {
		a.Err = &sched.Failure{Kind: errkind.Unavailable, Reason: "host " + s.Host.String() + " holds no lease"}
		l.w.cov.hit("wake on a host without a lease")
	} else {
		hc := l.wakeCtx(c, s)
		resp, err := l.host(t, hc, s.Host, "wake", wakeRequest(hc, s))
		if c.over() {
			return c.err()
		}
		if err == nil {
			r := resp.(wakeReply)
			a.Woke = &sched.Woke{Origin: r.origin, RestoredAsOf: sched.At(r.asOf), ImageDigest: "sha256:image"}
		} else {
			l.w.say("wake of %s on %s failed: %v", s.Key[:6], s.Host, err)
			if is(err, errkind.Deadline) {
				l.w.cov.hit("wake timed out")
			}
		}
		a.Err = failureOf(err)
	}
	if a.Err != nil && s.Wake != nil && s.Wake.Attempt > 0 {
		if err := t.sleep(c, l.backoff(s.Wake.Attempt-1)); err != nil {
			return err
		}
	}
	_, _, err := l.follow(t, c, a, l.candidates([]ids.SessionKey{s.Key}, s.Terms))
	return err
}

func (l *leader) stepSleep(t *task, c *ctx, lp *loop, s *sched.Session) error {
	cand := func(s *sched.Session) []sched.Candidate {
		terms := s.Terms
		if s.Wake != nil {
			terms = s.Wake.Terms
		}
		return l.candidates([]ids.SessionKey{s.Key}, terms)
	}
	if e, ok := sched.Before(s, sched.At(l.r.p.wall()), lp.why, lp.unsaved, cand(s)); ok {
		_, err := l.apply(t, c, e)
		return err
	}
	if !l.alive(s.Host) {
		return fail(errkind.Unavailable, "host "+s.Host.String()+" holds no lease")
	}
	a := sched.Answer{Kind: sched.HostSleep, Session: s}
	sl := sched.Sleep{}
	if s.Sleep != nil {
		sl = *s.Sleep
	}
	req := sleepReq{tenant: s.Tenant, ref: refOf(s), parent: s.Manifest, lastActive: s.LastActive, reason: sl.Reason, force: sl.IdleSince == 0 || sl.Force}
	if sl.IdleSince != 0 && !req.force {
		req.idleSince = sl.IdleSince.Std()
	}
	resp, err := l.host(t, l.w.within(c, sleepTimeout), s.Host, "sleep", req)
	if c.over() {
		return c.err()
	}
	a.Err, a.NotFound = failureOf(err), gone(err)
	if is(err, errkind.Unsaved) {
		l.w.cov.hit("sleep could not be saved")
		lp.why, lp.unsaved = "the disk cannot be saved: "+err.Error(), true
		a.Err.Reason = lp.why
	}
	if err == nil {
		r := resp.(sleepReply)
		if r.busy {
			a.Busy, a.BusySince = true, sched.At(r.since)
		} else {
			a.Slept = &sched.Slept{Manifest: r.manifest, Gone: r.missing}
		}
	}
	out, ok, aerr := l.follow(t, c, a, cand(s))
	switch {
	case aerr != nil:
		return aerr
	case ok && out.Refused != nil && out.Refused.Kind == errkind.Conflict:
		return fail(errkind.Conflict, out.Refused.Reason)
	case is(err, errkind.Unsaved) && ok && out.Session != nil && out.Session.State == sched.Sleeping, !ok:
		return err
	}
	return nil
}

// recall asks the host to keep a session that is going to sleep awake.
func (l *leader) recall(t *task, c *ctx, s *sched.Session) {
	hc := l.wakeCtx(c, s)
	if _, err := l.host(t, hc, s.Host, "wake", wakeRequest(hc, s)); err == nil {
		l.w.cov.hit("sleep recalled")
	}
}

func (l *leader) stepDelete(t *task, c *ctx, s *sched.Session) error {
	dc := l.w.within(c, l.r.p.real(deleteTimeout))
	a := sched.Answer{Kind: sched.HostDelete, Session: s}
	if _, err := ask[struct{}](t, dc, "credentials", "revoke", revokeReq{tenant: s.Tenant, ref: refOf(s)}); err != nil {
		return err
	}
	var at []ids.Host // that may run it
	if s.Host != "" {
		at = append(at, s.Host)
	}
	for _, left := range s.Left {
		if !slices.Contains(at, left.Host) {
			at = append(at, left.Host)
		}
	}
	if len(at) == 0 && len(s.Holders) == 0 && !s.Epoch.IsZero() {
		at = l.anyHost() // no host has its disk, but the store may have something of it
		l.w.cov.hit("delete of a session without a host")
	}
	for _, h := range at {
		if !l.alive(h) {
			continue
		}
		erased, err := l.hostDelete(t, dc, h, s.Tenant, refOf(s))
		if err != nil {
			return err
		}
		a.Hosts = append(a.Hosts, h)
		a.Stored = a.Stored || !erased
	}
	out, _, err := l.follow(t, c, a, nil)
	l.erase.fire(l.w)
	if err == nil && out.Refused != nil && out.Refused.Kind == errkind.Conflict {
		return fail(errkind.Unavailable, out.Refused.Reason) // until that host is back or lost
	}
	return err
}

func (l *leader) anyHost() []ids.Host {
	for _, h := range l.st().Hosts() {
		if l.alive(h.ID) {
			return []ids.Host{h.ID}
		}
	}
	return nil
}

func (l *leader) hostDelete(t *task, c *ctx, h ids.Host, tenant ids.Tenant, ref sched.Ref) (erased bool, err error) {
	r, err := l.host(t, c, h, "delete", deleteReq{tenant: tenant, ref: ref})
	if is(err, errkind.NotFound) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return r.(deleteReply).erased, nil
}

func (l *leader) stepStop(t *task, c *ctx, s *sched.Session) error {
	if !l.alive(s.Host) {
		return fail(errkind.Unavailable, "host "+s.Host.String()+" holds no lease")
	}
	hc := l.w.within(c, sleepTimeout)
	a := sched.Answer{Kind: sched.HostStop, Session: s}
	var err error
	if s.Terms.Ephemeral {
		_, err = l.hostDelete(t, hc, s.Host, s.Tenant, refOf(s))
	} else {
		_, err = l.host(t, hc, s.Host, "sleep", sleepReq{tenant: s.Tenant, ref: refOf(s), parent: s.Manifest, force: true})
	}
	a.Err, a.NotFound = failureOf(err), gone(err)
	_, ok, aerr := l.follow(t, c, a, nil)
	if aerr != nil || ok {
		return aerr
	}
	return err
}

// host calls a method of a host, again when the host joins with another boot meanwhile and while
// nobody serves it, as long as its lease runs; see services/scheduler/hostcall.go.
func (l *leader) host(t *task, c *ctx, h ids.Host, method string, req any) (any, error) {
	for pause := retryMin; ; pause = min(2*pause, time.Second) {
		cur := l.leases[h]
		if cur == nil || l.r.p.mono() >= cur.until {
			return nil, fail(errkind.Unavailable, "host "+h.String()+" holds no lease")
		}
		cc := l.w.under(c)
		var resp any
		var err error
		work := l.w.spawn(l.r.p, "call", func(ct *task) { resp, err = ct.call(cc, "host."+string(h), method, req) })
		t.wait(nil, -1, &work.done, cur.ended)
		if !work.done.set {
			cc.cancel(l.w, errkind.Canceled)
			t.wait(nil, -1, &work.done)
		}
		f, _ := err.(*fault)
		if err == nil || c.over() || !cur.ended.set && !(f != nil && f.lone) {
			if err == nil && resp == nil {
				return nil, fail(errkind.Internal, "no answer")
			}
			return resp, err
		}
		t.wait(c, l.r.p.real(pause))
		if c.over() {
			return nil, c.err()
		}
	}
}
