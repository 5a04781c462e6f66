package scheduler

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// step does what follows from the stored session and records what it came to.
// It returns how long to wait before looking again; 0 means at once.
func (l *leader) step(ctx context.Context, lp *loop, s *core.Session) time.Duration {
	var err error
	tries := lp.tries
	switch core.Next(s)[0].Kind {
	case core.HostWake:
		err = l.stepWake(ctx, s)
	case core.HostSleep:
		err = l.stepSleep(ctx, lp, s)
	case core.Revoke:
		err = l.stepDelete(ctx, s)
	case core.HostStop:
		err = l.stepStop(ctx, s)
	}
	if err == nil {
		return 0
	}
	if ctx.Err() == nil {
		l.driver.note(lp, err)
		l.log.Warn("will try again", "session", s.Key, "state", s.State.String(), "tries", tries+1, "error", err)
	}
	return l.backoff(tries)
}

func (l *leader) backoff(tries int) time.Duration {
	return min(l.cfg.RetryMin<<min(tries, 16), l.cfg.RetryMax)
}

// settle commits what follows from a host's answer, as core says, and what
// follows when that is refused. The entry says nothing when nothing follows.
func (l *leader) settle(ctx context.Context, a core.Answer) (core.Entry, core.Outcome, error) {
	now := l.session(a.Session.Key)
	terms := a.Session.Terms
	if now != nil && now.Wake != nil {
		terms = now.Wake.Terms
	}
	e, ok := core.After(now, bound(a), l.tries(a.Session), l.candidates(a.Session, *terms))
	if !ok {
		return e, core.Outcome{}, nil
	}
	placed := l.reserveAgain(ctx, now, a, &e)
	out, err := l.apply(ctx, e)
	placed(out, err)
	if err != nil || out.Refused == nil {
		return e, out, err
	}
	if next, ok := core.Refused(e, *out.Refused); ok {
		l.log.Error("what a host did is refused", "session", a.Session.Key, "host", a.Session.Host, "reason", out.Refused.Reason)
		_, err = l.apply(ctx, next)
		return next, out, err
	}
	return e, out, nil
}

// reserveAgain asks for a warm sandbox when e places the session that an answer
// is about: after a wake that failed, or at the end of a sleep that an open
// waits for.
func (l *leader) reserveAgain(ctx context.Context, now *core.Session, a core.Answer, e *core.Entry) (placed func(core.Outcome, error)) {
	placed = func(core.Outcome, error) {}
	if now == nil || now.Wake == nil {
		return placed
	}
	w := wanted{session: now, terms: *now.Wake.Terms, request: now.Wake.Request, deadline: now.Wake.Deadline}
	switch {
	case e.WakeFailed != nil && e.WakeFailed.Retry:
		if e.WakeFailed.Failure.Kind == errkind.NoCapacity {
			w.not = now.Host
		}
		e.WakeFailed.Candidates, placed = l.pools.reserve(ctx, w, e.WakeFailed.Candidates)
	case e.Slept != nil:
		e.Slept.Candidates, placed = l.pools.reserve(ctx, w, e.Slept.Candidates)
	}
	return placed
}

// stepWake has the host wake the session and commits active.
func (l *leader) stepWake(ctx context.Context, s *core.Session) error {
	b, ok := l.driver.beginning(s.Key)
	if !ok {
		b.at = time.Now()
	}
	placed := time.Since(b.at)
	a := core.Answer{Kind: core.HostWake, Session: s}
	var resp *hostv1.WakeReply
	var err error = errs.E("wake", errkind.Unavailable, "", "host "+s.Host.String()+" holds no lease")
	if l.leases.alive(s.Host) {
		hctx, cancel := l.wakeContext(ctx, s)
		defer cancel()
		hctx, span := obs.Start(hctx, "scheduler wake on host")
		resp, err = callHost[*hostv1.WakeReply](hctx, l, s.Host, "wake", wakeRequest(hctx, s))
		obs.End(span, err)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	took := time.Since(b.at)
	l.pools.settle(s, resp, err)
	if err != nil {
		f := failureOf(err)
		a.Err = &f
		l.wakeWentWrong(s, f)
		if err := l.pause(ctx, s); err != nil {
			return err
		}
	} else {
		l.leases.woke(s.Host)
		a.Woke = &core.Woke{Origin: resp.GetOrigin(), RestoredAsOf: timeOf(resp.GetRestoredAsOf()),
			ImageDigest: resp.GetImageDigest(), Timing: wakeTiming(b, placed, took, resp)}
	}
	e, out, err := l.settle(ctx, a)
	if err == nil && e.Woke != nil && out.Refused == nil {
		l.m.woke(ctx, took, resp.GetOrigin().String())
	}
	return err
}

// wakeWentWrong notes a failed wake against its host, unless the session is to blame.
func (l *leader) wakeWentWrong(s *core.Session, f core.Failure) {
	l.log.Warn("wake failed", "session", s.Key, "host", s.Host, "epoch", s.Epoch, "reason", f.Reason)
	switch f.Kind {
	case errkind.Unavailable, errkind.Deadline, errkind.Internal:
		l.leases.wokeNot(s.Host, s.Key)
	}
}

// handoffTries is how many more placements a handoff may use up: nobody waits
// for it, and what hosts share, such as the store, may be away for a while.
const handoffTries = 7

func (l *leader) tries(s *core.Session) int {
	if isHandoff(s) && !asked(s) {
		return l.cfg.WakeTries + handoffTries
	}
	return l.cfg.WakeTries
}

// pause waits before a wake that failed is placed again.
func (l *leader) pause(ctx context.Context, s *core.Session) error {
	if s.Wake == nil || s.Wake.Attempt < 1 || s.Wake.Attempt >= l.tries(s) {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(l.backoff(s.Wake.Attempt - 1)):
		return nil
	}
}

// wakeContext ends with the try's own time-out or the open's deadline.
func (l *leader) wakeContext(ctx context.Context, s *core.Session) (context.Context, context.CancelFunc) {
	end := time.Now().Add(l.cfg.WakeTimeout)
	if s.Wake != nil && s.Wake.Deadline != 0 {
		if d := s.Wake.Deadline.Std(); d.Before(end) {
			end = d
		}
	}
	return context.WithDeadline(ctx, end)
}

// stepSleep has the host put the session to sleep, unless it is busy.
func (l *leader) stepSleep(ctx context.Context, lp *loop, s *core.Session) error {
	why, unsaved := l.driver.trouble(lp)
	terms := s.Terms
	if s.Wake != nil {
		terms = s.Wake.Terms
	}
	if e, ok := core.Before(s, core.At(time.Now()), why, unsaved, l.candidates(s, *terms)); ok {
		_, err := l.apply(ctx, e)
		return err
	}
	if !l.leases.alive(s.Host) {
		return errs.Errorf("sleep", errkind.Unavailable, "host %s holds no lease", s.Host)
	}
	hctx, cancel := context.WithTimeout(ctx, l.cfg.SleepTimeout)
	defer cancel()
	resp, err := callHost[*hostv1.SleepReply](hctx, l, s.Host, "sleep", sleepRequest(s))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	a := core.Answer{Kind: core.HostSleep, Session: s, NotFound: gone(err)}
	switch {
	case err != nil:
		l.driver.note(lp, err)
		f := failureOf(err)
		if f.Kind == errkind.Unsaved {
			f.Reason, _ = l.driver.trouble(lp)
		}
		a.Err = &f
	case resp.GetBusy():
		a.Busy, a.BusySince = true, timeOf(resp.GetLastActivity())
	default:
		a.Slept = &core.Slept{Manifest: manifestOf(resp.GetManifest()), Timing: timingOf(resp.GetTiming()), Gone: resp.GetMissing()}
	}
	e, out, aerr := l.settle(ctx, a)
	switch {
	case aerr != nil:
		return aerr
	case out.Refused != nil && out.Refused.Kind == errkind.Conflict:
		return errs.E("commit sleep", errkind.Conflict, s.Key.String(), out.Refused.Reason)
	case e.Delayed != nil || e.Name() == "none":
		return err // nothing came of it: try again
	}
	return nil
}

// recall asks the host to keep a session that is going to sleep awake, which
// it does until it signals the first process; otherwise the sleep goes on. What
// came of it is the word of the sleep itself, which then answers busy: two
// requests may reach the host in either order.
func (l *leader) recall(ctx context.Context, s *core.Session) {
	hctx, cancel := l.wakeContext(ctx, s)
	defer cancel()
	if _, err := callHost[*hostv1.WakeReply](hctx, l, s.Host, "wake", wakeRequest(hctx, s)); err != nil {
		l.log.Debug("a sleep goes on in spite of an open", "session", s.Key, "reason", err)
	}
}

// stepDelete kills grants and the data key, then compute and disk.
func (l *leader) stepDelete(ctx context.Context, s *core.Session) error {
	dctx, cancel := context.WithTimeout(ctx, l.cfg.DeleteTimeout)
	defer cancel()
	ref := refOf(s)
	_, err := bus.Invoke[*credentialsv1.RevokeReply](dctx, l.conn, "credentials", "revoke",
		&credentialsv1.RevokeRequest{Session: sessionRef(s), Reason: s.Deletion.Reason})
	if err != nil {
		return err
	}
	a := core.Answer{Kind: core.HostDelete, Session: s}
	at := running(s)
	if len(at) == 0 && len(s.Holders) == 0 && !s.Epoch.IsZero() {
		at = l.anyHost() // no host has its disk, but the store may have something of it
	}
	for _, h := range at {
		if !l.leases.alive(h) {
			continue
		}
		erased, err := l.hostDelete(dctx, h, s.Tenant, ref)
		if err != nil {
			return err
		}
		a.Hosts = append(a.Hosts, h)
		a.Stored = a.Stored || !erased
	}
	_, out, err := l.settle(ctx, a)
	l.tidy.now() // on the hosts that had it before
	if err == nil && out.Refused != nil && out.Refused.Kind == errkind.Conflict {
		return errs.E("delete", errkind.Unavailable, "", out.Refused.Reason) // until that host is back or lost
	}
	return err
}

// running are the hosts that may have compute of a session.
func running(s *core.Session) (out []ids.Host) {
	if s.Host != "" {
		out = append(out, s.Host)
	}
	for _, left := range s.Left {
		if !slices.Contains(out, left.Host) {
			out = append(out, left.Host)
		}
	}
	return out
}

// anyHost is one host that holds a lease, if there is one: another one each
// time, since the first may be of no use.
func (l *leader) anyHost() []ids.Host {
	var all []ids.Host
	l.rep.View(func(st *core.State) {
		for _, rec := range st.Hosts() {
			if l.leases.alive(rec.ID) {
				all = append(all, rec.ID)
			}
		}
	})
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:min(len(all), 1)]
}

// hostDelete has a host remove a generation. It reports whether the store is clean of it, too.
func (l *leader) hostDelete(ctx context.Context, h ids.Host, t ids.Tenant, ref core.Ref) (erased bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.DeleteTimeout)
	defer cancel()
	r, err := callHost[*hostv1.DeleteReply](ctx, l, h, "delete", &hostv1.DeleteRequest{Session: protoRef(t, ref)})
	if errs.Is(err, errkind.NotFound) {
		return true, nil
	}
	return r.GetRemoved(), err
}

// stepStop removes what a failed wake may have left on its host.
func (l *leader) stepStop(ctx context.Context, s *core.Session) error {
	if !l.leases.alive(s.Host) {
		return errs.Errorf("stop", errkind.Unavailable, "host %s holds no lease", s.Host)
	}
	hctx, cancel := context.WithTimeout(ctx, l.cfg.SleepTimeout)
	defer cancel()
	var err error
	if s.Terms.Ephemeral {
		_, err = l.hostDelete(hctx, s.Host, s.Tenant, refOf(s)) // no snapshot of it is in the store
	} else {
		err = l.forceSleep(hctx, s.Host, sessionRef(s), s.Manifest, "failed")
	}
	a := core.Answer{Kind: core.HostStop, Session: s, NotFound: gone(err)}
	if err != nil {
		f := failureOf(err)
		a.Err = &f
	}
	e, _, aerr := l.settle(ctx, a)
	if e.Stopped == nil {
		return err
	}
	return aerr
}

// forceSleep has a host remove the compute of an epoch, whoever uses it.
func (l *leader) forceSleep(ctx context.Context, h ids.Host, ref *corev1.SessionRef, parent, reason string) error {
	_, err := callHost[*hostv1.SleepReply](ctx, l, h, "sleep",
		&hostv1.SleepRequest{Session: ref, Parent: parent, Reason: reason, Force: true})
	return err
}

// gone reports whether the host has no compute of that epoch.
func gone(err error) bool {
	return errs.Is(err, errkind.NotFound) || errs.Is(err, errkind.StaleEpoch)
}
