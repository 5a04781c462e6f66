package scheduler

import (
	"context"
	"slices"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
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
		err = l.stepWake(ctx, s, tries)
	case core.HostSleep:
		err = l.stepSleep(ctx, lp, s)
	case core.Revoke:
		err = l.stepDelete(ctx, s)
	case core.HostStop:
		err = l.stepStop(ctx, s)
	case core.Retry:
		return l.stepPlace(ctx, s, tries)
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

// stepWake has the host wake the session and commits active.
func (l *leader) stepWake(ctx context.Context, s *core.Session, tries int) error {
	b, ok := l.driver.beginning(s.Key)
	if !ok {
		b.at = time.Now()
	}
	placed := time.Since(b.at)
	ref := refOf(s)
	if !l.leases.alive(s.Host) {
		return l.wakeFailed(ctx, s, ref, core.Failure{Kind: errkind.Unavailable, Reason: "host " + s.Host.String() + " holds no lease"})
	}
	hctx, cancel := l.wakeContext(ctx, s)
	defer cancel()
	hctx, span := obs.Start(hctx, "scheduler wake on host")
	resp, err := callHost[*hostv1.WakeReply](hctx, l, s.Host, "wake", wakeRequest(hctx, s))
	obs.End(span, err)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return l.wakeFailed(ctx, s, ref, failureOf(err))
	}
	took := time.Since(b.at)
	out, err := l.apply(ctx, core.Entry{Woke: &core.Woke{Ref: ref, Origin: resp.GetOrigin(),
		RestoredAsOf: timeOf(resp.GetRestoredAsOf()), ImageDigest: resp.GetImageDigest(),
		Timing: wakeTiming(placed, took, resp.GetTiming())}})
	switch {
	case err != nil:
		return err
	case out.Refused != nil && out.Refused.Kind == errkind.DataLoss:
		l.log.Error("host offered a blank disk for a session with files", "session", s.Key, "host", s.Host)
		_, err = l.apply(ctx, core.Entry{WakeFailed: &core.WakeFailed{Ref: ref, Failure: *out.Refused}})
		return err
	case out.Refused != nil && out.Refused.Kind == errkind.Conflict:
		l.log.Error("host did not bring back the snapshot that was asked for", "session", s.Key, "host", s.Host)
		_, err = l.apply(ctx, core.Entry{WakeFailed: &core.WakeFailed{Ref: ref, Failure: *out.Refused}})
		return err
	case out.Refused != nil:
		l.m.fenced(ctx, "woke")
		return nil
	}
	l.m.woke(ctx, took, resp.GetOrigin().String())
	return nil
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

// wakeFailed places again while that makes sense.
func (l *leader) wakeFailed(ctx context.Context, s *core.Session, ref core.Ref, f core.Failure) error {
	retry := s.Wake != nil && s.Wake.Attempt < l.cfg.WakeTries && (f.Kind.Retry() || f.Kind == errkind.StaleEpoch)
	if retry && s.Wake.Attempt > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(l.backoff(s.Wake.Attempt - 1)):
		}
	}
	l.log.Warn("wake failed", "session", s.Key, "host", s.Host, "epoch", s.Epoch, "retry", retry, "reason", f.Reason)
	_, err := l.apply(ctx, core.Entry{WakeFailed: &core.WakeFailed{Ref: ref, Failure: f, Retry: retry,
		Candidates: l.candidates([]ids.SessionKey{s.Key}, *s.Terms)}})
	return err
}

// stepSleep has the host put the session to sleep, unless it is busy.
func (l *leader) stepSleep(ctx context.Context, lp *loop, s *core.Session) error {
	why, unsaved := l.driver.trouble(lp)
	if s.Wake != nil && s.Wake.Deadline != 0 && s.Wake.Deadline.Std().Before(time.Now()) {
		_, err := l.apply(ctx, core.Entry{Place: &core.Place{Session: s.Key, Generation: s.Generation, Why: why}})
		return err
	}
	if unsaved && s.Wake != nil {
		return l.wakeUnsaved(ctx, s, why)
	}
	if !l.leases.alive(s.Host) {
		return errs.Errorf("sleep", errkind.Unavailable, "host %s holds no lease", s.Host)
	}
	hctx, cancel := context.WithTimeout(ctx, l.cfg.SleepTimeout)
	defer cancel()
	ref := refOf(s)
	resp, err := callHost[*hostv1.SleepReply](hctx, l, s.Host, "sleep", sleepRequest(s))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if gone(err) {
		_, err = l.apply(ctx, core.Entry{Exited: &core.Exited{Ref: ref, Host: s.Host, Reason: "the host has no sandbox of it",
			Candidates: l.candidates([]ids.SessionKey{s.Key}, *s.Terms)}})
		return err
	}
	if errs.Is(err, errkind.Unsaved) {
		l.driver.note(lp, err)
		now := l.session(s.Key)
		why, _ = l.driver.trouble(lp)
		switch {
		case now == nil || now.Epoch != s.Epoch:
		case now.Wake != nil:
			return l.wakeUnsaved(ctx, now, why)
		case slices.ContainsFunc(now.Pending, func(p core.Pending) bool { return p.Verb == core.VerbClose }):
			if _, derr := l.apply(ctx, core.Entry{Delayed: &core.Delayed{Ref: ref, Reason: why}}); derr != nil {
				return derr
			}
		}
	}
	if err != nil {
		return err
	}
	if resp.GetBusy() {
		_, err = l.apply(ctx, core.Entry{SleepRefused: &core.SleepRefused{Ref: ref, BusySince: timeOf(resp.GetLastActivity())}})
		return err
	}
	out, err := l.apply(ctx, core.Entry{Slept: &core.Slept{Ref: ref, Manifest: manifestOf(resp.GetManifest()),
		Timing: timingOf(resp.GetTiming()), Candidates: l.candidates([]ids.SessionKey{s.Key}, *s.Terms)}})
	if err == nil && out.Refused != nil {
		l.m.fenced(ctx, "slept")
		if out.Refused.Kind == errkind.Conflict {
			return errs.E("commit sleep", errkind.Conflict, s.Key.String(), out.Refused.Reason)
		}
	}
	return err
}

// wakeUnsaved ends a sleep whose host has no compute left and cannot save the
// disk, since an open waits: the session wakes from that disk, and nothing is lost.
func (l *leader) wakeUnsaved(ctx context.Context, s *core.Session, why string) error {
	out, err := l.apply(ctx, core.Entry{Exited: &core.Exited{Ref: refOf(s), Host: s.Host, Reason: why,
		Candidates: l.candidates([]ids.SessionKey{s.Key}, *s.Wake.Terms)}})
	if err == nil && out.Refused != nil {
		l.m.fenced(ctx, "exited")
	}
	return err
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
	var done []ids.Host
	if s.Host != "" && l.leases.alive(s.Host) {
		if err := l.hostDelete(dctx, s.Host, s.Tenant, ref); err != nil {
			return err
		}
		done = append(done, s.Host)
	}
	_, err = l.apply(ctx, core.Entry{Removed: &core.Removed{Ref: ref, Erased: len(done) > 0, Hosts: done}})
	l.eraseNow() // on the hosts that had it before
	return err
}

func (l *leader) hostDelete(ctx context.Context, h ids.Host, t ids.Tenant, ref core.Ref) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.DeleteTimeout)
	defer cancel()
	_, err := callHost[*hostv1.DeleteReply](ctx, l, h, "delete", &hostv1.DeleteRequest{Session: protoRef(t, ref)})
	if errs.Is(err, errkind.NotFound) {
		return nil
	}
	return err
}

// stepStop removes what a failed wake may have left on its host.
func (l *leader) stepStop(ctx context.Context, s *core.Session) error {
	if !l.leases.alive(s.Host) {
		return errs.Errorf("stop", errkind.Unavailable, "host %s holds no lease", s.Host)
	}
	ref := refOf(s)
	hctx, cancel := context.WithTimeout(ctx, l.cfg.SleepTimeout)
	defer cancel()
	var err error
	if s.Terms.Ephemeral {
		err = l.hostDelete(hctx, s.Host, s.Tenant, ref)
	} else {
		req := &hostv1.SleepRequest{Session: sessionRef(s), Parent: s.Manifest, Reason: "failed", Force: true}
		_, err = callHost[*hostv1.SleepReply](hctx, l, s.Host, "sleep", req)
	}
	if err != nil && !gone(err) && !errs.Is(err, errkind.Unsaved) {
		return err
	}
	_, err = l.apply(ctx, core.Entry{Stopped: &ref})
	return err
}

// stepPlace waits a little and tries to place again.
func (l *leader) stepPlace(ctx context.Context, s *core.Session, tries int) time.Duration {
	wait := min(l.backoff(tries), 2*time.Second)
	if s.Wake.Deadline != 0 {
		wait = max(min(wait, time.Until(s.Wake.Deadline.Std())), 0)
	}
	select {
	case <-ctx.Done():
		return 0
	case <-time.After(wait):
	}
	_, err := l.apply(ctx, core.Entry{Place: &core.Place{Session: s.Key, Generation: s.Generation,
		Candidates: l.candidates([]ids.SessionKey{s.Key}, *s.Wake.Terms)}})
	if err != nil {
		return l.backoff(tries)
	}
	return time.Millisecond
}

// gone reports whether the host has no compute of that epoch.
func gone(err error) bool {
	return errs.Is(err, errkind.NotFound) || errs.Is(err, errkind.StaleEpoch)
}
