package scheduler

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

const (
	// drainWithin is how long a drain waits for awake sessions to fall idle.
	drainWithin = 10 * time.Minute
	drainMax    = 7 * 24 * time.Hour
	// drainSlow is the longest pause before a save that saved nothing is repeated.
	drainSlow = 30 * time.Second
	// moves of sleeping sessions that share a sync of the log.
	moveParallel = 16
)

// ask is when a drain asks for a session next, and how often it asked for a save.
type ask struct {
	at    time.Time
	saves int
}

// drain hands over what is on hosts that are drained until ctx ends: saved
// sleepers at once, unsaved ones when they are saved, awake ones when they are
// idle or at the deadline. What it began is in the state, so that the next
// leader goes on.
func (l *leader) drain(ctx context.Context) error {
	asked := map[ids.SessionKey]ask{}
	for {
		wait := tidyEvery
		for _, h := range l.draining() {
			l.drainHost(ctx, h, asked)
			wait = l.cfg.times.drainLook
		}
		for k, a := range asked {
			if time.Since(a.at) > time.Minute {
				delete(asked, k)
			}
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-l.drains:
		case <-t.C:
		}
		t.Stop()
	}
}

// draining are the hosts that have something left to hand over.
func (l *leader) draining() (out []*core.Host) {
	l.rep.View(func(st *core.State) {
		for _, h := range st.Hosts() {
			if h.Draining && !h.Drained {
				out = append(out, h)
			}
		}
	})
	return out
}

// drainHost takes one more step with everything that is on a host.
func (l *leader) drainHost(ctx context.Context, h *core.Host, asked map[ids.SessionKey]ask) {
	var all []*core.Session
	l.rep.View(func(st *core.State) { all = st.OnHost(h.ID) })
	slices.SortStableFunc(all, func(a, b *core.Session) int {
		return cmp.Or(cmp.Compare(b.Terms.Priority, a.Terms.Priority), cmp.Compare(a.ChangedAt, b.ChangedAt))
	})
	busy := 0 // under way there
	var moves, asks []core.Entry
	late := h.DrainDeadline != 0 && core.At(time.Now()) >= h.DrainDeadline
	for _, s := range all {
		e, ok := drainStep(s, h.ID, late, l.cfg.times.drainIdle)
		if ok && e.Save != nil && e.Save.Host != h.ID && !l.leases.alive(e.Save.Host) {
			// What is unsaved is on a host that is away; this one has nothing of it.
			e = core.Entry{Move: &core.Move{Session: s.Key, Generation: s.Generation, Host: h.ID}}
		}
		switch {
		case s.State == core.Sleeping:
			busy++
		case !ok:
		case e.Move != nil:
			moves = append(moves, e)
		case (e.Save != nil || e.Sleep != nil && !late) && time.Now().Before(asked[s.Key].at):
		default:
			asks = append(asks, e)
		}
	}
	l.applyAll(ctx, moves)
	if !l.leases.alive(h.ID) {
		return // nobody can be asked; once it is lost its sessions are handed over
	}
	asks = asks[:min(len(asks), max(l.cfg.HandoffParallel-busy, 0))]
	for _, e := range asks {
		l.cfg.times.noteAsk(asked, e)
	}
	l.applyAll(ctx, asks)
}

// noteAsk notes that a session is asked for. A save that comes to nothing is asked for ever more slowly, so
// that the sessions behind it have their turn.
func (t times) noteAsk(asked map[ids.SessionKey]ask, e core.Entry) {
	switch {
	case e.Sleep != nil:
		asked[e.Sleep.Keys[0]] = ask{at: time.Now().Add(t.drainIdle)}
	case e.Save != nil:
		n := asked[e.Save.Session].saves
		asked[e.Save.Session] = ask{at: time.Now().Add(min(t.drainLook<<min(n, 8), drainSlow)), saves: n + 1}
	}
}

// drainStep is the entry that brings a session on h nearer to its being
// elsewhere, false while there is none.
func drainStep(s *core.Session, h ids.Host, late bool, idle time.Duration) (core.Entry, bool) {
	switch s.State {
	case core.Active:
		if s.Host != h || s.Terms.Ephemeral && !late {
			return core.Entry{}, false // an ephemeral session has no elsewhere
		}
		c := &core.SleepCmd{Tenant: s.Tenant, Keys: []ids.SessionKey{s.Key}, Generation: s.Generation, Epoch: s.Epoch,
			Reason: core.ReasonDrain, Force: late}
		if !late {
			c.IdleSince = core.At(time.Now().Add(-idle))
		}
		return core.Entry{Sleep: c}, true
	case core.Asleep, core.Paused, core.Failed:
		switch {
		case s.NeedsStop || s.Wake != nil:
		case s.Dirty: // also where h has nothing of it but the epoch of a wake that failed
			return core.Entry{Save: &core.Save{Ref: refOf(s), Host: s.Newest}}, true
		case !s.Dirty && s.Host == h:
			return core.Entry{Move: &core.Move{Session: s.Key, Generation: s.Generation, Host: h}}, true
		}
	}
	return core.Entry{}, false
}

// applyAll commits entries, some at once; what is refused is seen at the next look.
func (l *leader) applyAll(ctx context.Context, entries []core.Entry) {
	var work sync.WaitGroup
	slots := make(chan struct{}, moveParallel)
	for _, e := range entries {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			out, err := l.apply(ctx, e)
			switch {
			case err != nil && ctx.Err() == nil:
				l.log.Warn("cannot hand over yet", "entry", e.Name(), "error", err)
			case err == nil && out.Refused != nil:
				l.log.Debug("not handed over yet", "entry", e.Name(), "reason", out.Refused.Reason)
			}
		})
	}
	work.Wait()
}

// drainCall begins or ends a drain.
func (l *leader) drainCall(ctx context.Context, _ bus.Request, req *schedulerv1.DrainRequest) (*schedulerv1.DrainReply, error) {
	const op = "scheduler.drain"
	h, err := ids.ParseHost(req.GetHost())
	if err != nil {
		return nil, errs.Wrap(op, req.GetHost(), err)
	}
	within := drainWithin
	if req.GetWithin() != nil {
		within = req.GetWithin().AsDuration()
	}
	if within < 0 || within > drainMax {
		return nil, errs.Errorf(op, errkind.Invalid, "within is %s; 0 to %s are allowed", within, drainMax)
	}
	d := &core.Drain{Host: h, On: req.GetOn()}
	if d.On {
		d.Deadline = core.At(time.Now().Add(within))
	}
	out, err := l.apply(ctx, core.Entry{Drain: d})
	if err != nil {
		return nil, errs.Wrap(op, h.String(), err)
	}
	if out.Refused != nil {
		return nil, refused(op, h.String(), out.Refused)
	}
	l.drains.now()
	if !d.On {
		l.queue.room()
	}
	rec := l.hostRecord(h)
	if rec == nil {
		return nil, errs.E(op, errkind.NotFound, h.String(), "the host was removed meanwhile")
	}
	return &schedulerv1.DrainReply{Host: rec}, nil
}

// removeHost takes a host out for good, with what nobody else has.
func (l *leader) removeHost(ctx context.Context, _ bus.Request, req *schedulerv1.RemoveHostRequest) (*schedulerv1.RemoveHostReply, error) {
	const op = "scheduler.remove_host"
	h, err := ids.ParseHost(req.GetHost())
	if err != nil {
		return nil, errs.Wrap(op, req.GetHost(), err)
	}
	undo, err := l.mayRemove(ctx, h)
	if err != nil {
		return nil, errs.Wrap(op, h.String(), err)
	}
	out, err := l.apply(ctx, core.Entry{RemoveHost: &core.RemoveHost{Host: h, LoseUnsaved: req.GetLoseUnsaved()}})
	if err != nil {
		return nil, errs.Wrap(op, h.String(), err)
	}
	if out.Refused != nil {
		undo()
		return nil, refused(op, h.String(), out.Refused)
	}
	l.leases.forget(h)
	l.queue.room()
	l.tidy.now()
	return &schedulerv1.RemoveHostReply{Rewound: l.protoRefs(out.Rewound), Lost: l.protoRefs(out.Lost)}, nil
}

// protoRefs are references with the tenants that they belong to.
func (l *leader) protoRefs(refs []core.Ref) (out []*corev1.SessionRef) {
	for _, r := range refs {
		if s := l.session(r.Session); s != nil {
			out = append(out, protoRef(s.Tenant, r))
		}
	}
	return out
}

// mayRemove refuses to remove a host that holds a lease, which only the leader
// knows, and has sessions. One that has none is drained, so that it gets none
// meanwhile; undo ends that.
func (l *leader) mayRemove(ctx context.Context, h ids.Host) (undo func(), err error) {
	lost, draining, on, alive := false, false, 0, l.leases.alive(h)
	look := func() {
		l.rep.View(func(st *core.State) {
			if rec := st.Host(h); rec != nil {
				lost, draining = rec.Lost, rec.Draining
			}
			on = len(st.OnHost(h))
		})
	}
	look()
	undo = func() {}
	if alive && !lost && !draining && on == 0 {
		drain := func(on bool) error {
			_, err := l.apply(ctx, core.Entry{Drain: &core.Drain{Host: h, On: on}})
			return err
		}
		if err := drain(true); err != nil {
			return undo, err
		}
		undo = func() { _ = drain(false) } // else it is seen to be draining
		look()
	}
	switch {
	case lost || on == 0:
		return undo, nil
	case alive:
		undo()
		return undo, errs.Errorf("remove host", errkind.Conflict, "it holds a lease and has %s; drain it first", core.Count(on, "session"))
	}
	return undo, errs.E("remove host", errkind.Busy, "", "its lease has just run out; ask again in a moment")
}
