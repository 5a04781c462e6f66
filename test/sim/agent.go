package sim

import (
	"fmt"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	host "github.com/berth-dev/berth/services/hostagent/simcore"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// agent is one process of hostagent, modelled on services/hostagent/{host,hostagent,control,rpc}.go
// around the real core.Decide.
type agent struct {
	w        *World
	m        *machine
	boot     string
	sessions map[ids.SessionKey]*sess
	warm     map[string]bool // sandboxes of nobody that this process made
	until    time.Duration   // of the lease, on the machine's clock
	sure     bool            // the host knows what it owns; else nothing thaws or begins
	losses   int             // how often it did not any more
	again    signal          // it knows
	ready    signal
	rejoin   signal
	erasing  signal
	empties  int
}

// sess is what a host knows and runs of one session.
type sess struct {
	key     ids.SessionKey
	st      host.State
	inv     inventory
	op      *operation
	box     *box
	touched time.Duration
}

// operation is a wake, sleep, drop or delete under way.
type operation struct {
	op    host.Op
	req   any
	inv   inventory
	box   *box
	c     *ctx
	done  signal
	reply any
	err   error
}

func newAgent(m *machine) *agent {
	m.boots++
	a := &agent{w: m.w, m: m, boot: fmt.Sprintf("%s-%d", m.id, m.boots), sessions: map[ids.SessionKey]*sess{}, warm: map[string]bool{}}
	for _, k := range sortedKeys(m.inv) {
		rec := m.inv[k]
		st := host.State{Phase: rec.st.Phase, Generation: rec.st.Generation, Epoch: rec.st.Epoch, Spent: rec.st.Spent, Slept: rec.st.Slept, LastActivity: rec.st.LastActivity}
		a.sessions[k] = &sess{key: k, st: st, inv: rec}
	}
	s := m.agent.serve
	s["wake"], s["sleep"], s["delete"], s["activity"], s["box"] = a.rpcWake, a.rpcSleep, a.rpcDelete, a.rpcActivity, a.rpcBox
	a.w.spawn(m.agent, "run", a.run)
	return a
}

func (a *agent) session(k ids.SessionKey) *sess {
	s := a.sessions[k]
	if s == nil {
		s = &sess{key: k}
		a.sessions[k] = s
	}
	return s
}

// run joins, removes what runs and is not owned, and only then lets run, and takes over, what is; from
// then on it keeps the lease and cleans the rest.
func (a *agent) run(t *task) {
	var own ownership
	kept := false
	_ = a.persist(t, nil, func(c *ctx) (err error) {
		if own, err = a.join(t, c); err != nil {
			return err
		}
		if !kept {
			kept = true
			a.w.spawn(t.p, "lease", a.keepLease)
		}
		return a.settle(t, own)
	})
	if !a.sure {
		return // this host was removed
	}
	a.recover(t, own)
	a.ready.fire(a.w)
	a.w.spawn(t.p, "erase", a.erasures)
	a.sweep(t, own)
	for wait, pause := 15*time.Second, 500*time.Millisecond; ; {
		t.wait(nil, t.p.real(wait), &a.rejoin)
		a.rejoin.take()
		own, err := a.join(t, a.w.within(nil, callTime))
		if err == nil {
			err = a.settle(t, own)
		}
		if err == nil {
			a.sweep(t, own)
		}
		if a.noticed(); a.sure {
			wait, pause = 15*time.Second, 500*time.Millisecond
		} else {
			wait, pause = pause, min(2*pause, 5*time.Second)
		}
	}
}

// callTime bounds one call to another service.
const callTime = 10 * time.Second

// persist repeats an idempotent call while it may yet go well.
func (a *agent) persist(t *task, c *ctx, f func(*ctx) error) error {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := f(a.w.within(c, callTime))
		switch kindOf(err) {
		case errkind.Unavailable, errkind.Deadline, errkind.NotLeader, errkind.Exhausted:
		default:
			return err
		}
		if c.over() {
			return c.err()
		}
		t.wait(c, t.p.real(pause))
		if c.over() {
			return c.err()
		}
	}
}

// report tells scheduler for sure that compute ended without being asked.
func (a *agent) report(inv inventory, key ids.SessionKey, why string) {
	ref := sched.Ref{Session: key, Generation: inv.st.Generation, Epoch: inv.st.Epoch}
	a.w.say("report exited %s %s on %s: %s", short(key), ref.Epoch, a.m.id, why)
	a.w.spawn(a.m.agent, "report", func(t *task) {
		_ = a.persist(t, nil, func(c *ctx) error {
			_, err := ask[struct{}](t, c, "scheduler", "report", reportReq{ref: ref, what: "exited", why: why})
			return err
		})
	})
}

// act decides an event and sees it through.
func (a *agent) act(t *task, c *ctx, key ids.SessionKey, ev host.Event, req any) (any, error) {
	for pause := 20 * time.Millisecond; ; {
		s := a.session(key)
		cmds, err := a.decide(s, ev, req)
		if err != nil {
			return nil, err
		}
		wait, again, settled := a.command(s, cmds, req)
		if settled {
			return s.inv.reply, nil
		}
		if wait == nil {
			return nil, nil
		}
		t.wait(c, -1, &wait.done)
		if !wait.done.set {
			return nil, fail(c.kind, "waited for "+string(wait.op))
		}
		if !again {
			return wait.reply, wait.err
		}
		if starts(cmds) == "" || wait.err == nil {
			continue
		}
		t.wait(c, t.p.real(pause)) // what this call started itself failed: without a pause it would fail again and again
		pause = min(2*pause, time.Second)
		if c.over() {
			return nil, wait.err
		}
	}
}

// decide moves the state by one event and stores what must be known after a crash.
func (a *agent) decide(s *sess, ev host.Event, req any) ([]host.Command, error) {
	next, cmds, err := host.Decide(s.st, ev)
	if r := host.RefusalOf(err); r != nil {
		if r.Kind == errkind.StaleEpoch {
			a.w.cov.hit("host refuses a stale epoch")
		}
		return nil, &fault{kind: r.Kind, why: r.Reason, since: r.Since}
	}
	inv, soon := s.inv, false
	if starts(cmds) == host.OpWake {
		w, _ := req.(wakeReq)
		inv.box, inv.terms, inv.tenant, inv.reply, soon = boxID(s.key, next.Generation, next.Epoch), w.terms, w.tenant, nil, true
	}
	if end, ok := ev.(host.Ended); ok && !end.Failed {
		inv.reply = req
	}
	if sl, ok := req.(sleepReq); ok && inv.tenant == "" {
		inv.tenant = sl.tenant
	}
	changed := stored(s.st, next)
	inv.st = next
	if changed {
		inv.at, s.touched = a.w.now, a.w.now
		if !soon { // else a crash loses it
			a.m.inv[s.key] = inv
		}
	}
	s.st, s.inv = next, inv
	return cmds, nil
}

func stored(a, b host.State) bool {
	a.Running, a.Work, a.LastActivity = b.Running, b.Work, b.LastActivity
	a.Stopping, a.Recalled = b.Stopping, b.Recalled
	return a != b
}

func starts(cmds []host.Command) host.Op {
	for _, c := range cmds {
		if st, ok := c.(host.Start); ok {
			return st.Op
		}
	}
	return ""
}

func boxID(k ids.SessionKey, g ids.Generation, e ids.Epoch) string {
	return short(k) + "." + g.String() + "." + e.String()
}

func (a *agent) command(s *sess, cmds []host.Command, req any) (wait *operation, again, settled bool) {
	for _, c := range cmds {
		switch c := c.(type) {
		case host.Start:
			wait = a.start(s, c.Op, req)
		case host.Cancel:
			s.op.c.cancel(a.w, errkind.Canceled)
		case host.Join:
			wait = s.op
		case host.Retry:
			wait, again = s.op, true
		case host.Settled:
			settled = true
		case host.Report:
			a.report(s.inv, s.key, c.Reason)
		}
	}
	return wait, again, settled
}

func (a *agent) start(s *sess, op host.Op, req any) *operation {
	o := &operation{op: op, req: req, inv: s.inv, box: s.box, c: a.w.background()}
	s.op, s.box = o, nil
	a.w.say("%s begins %s of %s %s", a.m.id, op, short(s.key), s.st.Epoch)
	a.w.spawn(a.m.agent, string(op), func(t *task) { a.perform(t, s, o) })
	return o
}

func (a *agent) perform(t *task, s *sess, o *operation) {
	var b *box
	switch o.op {
	case host.OpWake:
		o.reply, b, o.err = a.wake(t, s, o)
	case host.OpSleep:
		o.reply, o.err = a.sleep(t, s, o)
	case host.OpDrop:
		o.err = a.drop(t, s, o)
	case host.OpDelete:
		o.reply, o.err = a.delete(t, s, o)
	}
	if s.st.Recalled {
		b, o.err = o.box, &fault{kind: errkind.Busy, why: "the session was opened before it slept", since: t.p.wall()}
	}
	a.w.say("%s ends %s of %s %s: %v", a.m.id, o.op, short(s.key), s.st.Epoch, o.err)
	_, _ = a.decide(s, host.Ended{Op: o.op, At: t.p.wall(), Failed: o.err != nil}, o.reply)
	s.op = nil
	if b != nil {
		s.box = b
		if a.m.boxes[b.id] != b { // it ended meanwhile
			a.lose(s, b, "the sandbox ended")
		}
	}
	o.done.fire(a.w)
}

// lose says that a sandbox is gone though nobody stopped it.
func (a *agent) lose(s *sess, b *box, why string) {
	if s.box != b {
		return
	}
	cmds, err := a.decide(s, host.Lost{Epoch: s.st.Epoch, Reason: why}, nil)
	if err == nil {
		a.command(s, cmds, nil)
	}
}

// Requests.

func (a *agent) target(t *task, c *ctx) error {
	t.wait(c, -1, &a.ready)
	if c.over() {
		return fail(errkind.Unavailable, "this host is still taking over what runs on it")
	}
	return nil
}

func (a *agent) rpcWake(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	r := req.(wakeReq)
	if err := a.target(t, c); err != nil {
		return nil, err
	}
	for a.noticed(); !a.sure && a.m.clock() < a.end() && !c.over(); a.noticed() {
		t.wait(c, 100*time.Millisecond, &a.again)
	}
	if err := a.check(); err != nil {
		return nil, err
	}
	out, err := a.act(t, c, r.ref.Session, host.Wake{Generation: r.ref.Generation, Epoch: r.ref.Epoch}, r)
	if _, ok := out.(wakeReply); !ok && err == nil {
		return wakeReply{}, nil
	}
	return out, err
}

func (a *agent) rpcSleep(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	r := req.(sleepReq)
	if err := a.target(t, c); err != nil {
		return nil, err
	}
	ev := host.Sleep{Generation: r.ref.Generation, Epoch: r.ref.Epoch, Force: r.force, IdleSince: r.idleSince}
	if !r.force || r.reason == sched.ReasonDrain { // else nothing is to be saved
		k := host.Key{Session: r.ref.Session, Generation: r.ref.Generation}
		ev.AtRest = a.atRest(k, r)
		ev.Missing = r.force && a.m.disks[k] == nil
	}
	if st := a.session(r.ref.Session).st; !(st.Slept && st.Generation == ev.Generation && st.Epoch == ev.Epoch) {
		if err := a.check(); err != nil {
			return nil, err
		}
	}
	out, err := a.act(t, c, r.ref.Session, ev, r)
	if f, ok := err.(*fault); ok && f.kind == errkind.Busy && !f.since.IsZero() {
		return sleepReply{busy: true, since: f.since}, nil
	}
	if is(err, errkind.NotFound) && ev.Missing {
		a.w.cov.hit("save of a disk that was evicted")
		return sleepReply{missing: true}, nil
	}
	if err == nil {
		if _, ok := out.(sleepReply); !ok { // it never was awake, so that nothing was stored
			return sleepReply{}, nil
		}
	}
	return out, err
}

// atRest reports whether a disk is here, in nobody's use, that is the head or can follow it.
func (a *agent) atRest(k host.Key, r sleepReq) bool {
	img := a.m.disks[k]
	return img != nil && img.rec.Savable(r.ref.Epoch, r.parent, r.lastActive)
}

func (a *agent) rpcDelete(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	r := req.(deleteReq)
	if err := a.target(t, c); err != nil {
		return nil, err
	}
	return a.remove(t, c, r)
}

func (a *agent) remove(t *task, c *ctx, r deleteReq) (any, error) {
	out, err := a.act(t, c, r.ref.Session, host.Delete{Generation: r.ref.Generation}, r)
	if is(err, errkind.StaleEpoch) {
		return a.eraseDisk(t, c, r.tenant, host.Key{Session: r.ref.Session, Generation: r.ref.Generation})
	}
	return out, err
}

func (a *agent) rpcActivity(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	r := req.(activityReq)
	if err := a.target(t, c); err != nil {
		return nil, err
	}
	s := a.session(r.ref.Session)
	if s.st.Generation != r.ref.Generation || s.st.Epoch != r.ref.Epoch || s.st.Phase != host.Awake {
		return nil, fail(errkind.StaleEpoch, "the session is not awake here in that epoch")
	}
	return activityReply{busy: s.st.Work > 0, since: s.st.LastActivity}, nil
}

// origin says what a wake gave.
func origin(r wakeReq, asOf time.Time) corev1.Origin {
	switch {
	case r.fresh:
		return corev1.Origin_ORIGIN_CREATED
	case !asOf.IsZero():
		return corev1.Origin_ORIGIN_RESTORED
	}
	return corev1.Origin_ORIGIN_RESUMED
}
