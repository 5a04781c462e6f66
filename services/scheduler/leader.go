package scheduler

import (
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/berth-dev/berth/services/scheduler/internal/replica"
	"golang.org/x/sync/errgroup"
)

const (
	barrierTime = 10 * time.Second
	tickEvery   = 30 * time.Second
	stopTime    = 500 * time.Millisecond
)

// leader is one term of leadership. What it keeps in memory can be rebuilt
// from the state: leases begin afresh, drivers and the queue follow from the
// sessions. When its context ends it does nothing more.
type leader struct {
	cfg    Config
	ctx    context.Context
	conn   *bus.Conn
	rep    *replica.Replica
	log    *slog.Logger
	m      *metrics
	leases *leases
	driver *driver
	queue  *queue
	outbox *outbox
	pools  *pools
	tidy   signal // erasures and what earlier epochs left are to be looked at
	drains signal // likewise hosts that are drained
	raised *atomic.Bool
	began  time.Time
}

func newLeader(ctx context.Context, s *server) *leader {
	l := &leader{cfg: s.cfg, ctx: ctx, conn: s.conn, rep: s.rep, log: s.cfg.Log, m: s.m, raised: &s.raised, began: time.Now(),
		leases: newLeases(s.cfg.Lease + s.cfg.LeaseDrift), tidy: newSignal(), drains: newSignal()}
	l.driver = newDriver(ctx, l)
	l.queue = newQueue(l)
	l.outbox = newOutbox(l)
	l.pools = newPools(l)
	return l
}

// signal has one loop look again; any number of them before it does are one.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) now() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// run works until ctx ends or the work cannot go on.
func (l *leader) run(ctx context.Context) error {
	if err := l.rep.Barrier(barrierTime); err != nil {
		return err
	}
	if err := l.raise(ctx); err != nil {
		return err
	}
	l.rep.View(func(s *core.State) {
		for _, h := range s.Hosts() {
			if !h.Lost {
				l.leases.inherit(h.ID, h.Boot, max(h.Lease-l.cfg.Lease, 0))
			}
		}
	})
	l.rep.OnApply(l.applied)
	defer l.rep.OnApply(func(core.Outcome) {})
	defer l.driver.stop()
	l.queue.load()
	l.driver.startAll()
	svc, err := l.serve(ctx)
	if err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	for _, loop := range []func(context.Context) error{l.outbox.run, l.queue.run, l.pools.run, l.watchLeases, l.tick, l.tidyUp, l.drain} {
		g.Go(func() error { return loop(gctx) })
	}
	if l.cfg.onLead != nil {
		l.cfg.onLead(l)
	}
	if l.cfg.Ready != nil {
		l.cfg.Ready()
	}
	<-gctx.Done() // handlers end with ctx: nobody is kept waiting for an answer that cannot come
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	if serr := svc.Stop(sctx); serr != nil {
		l.log.Warn("stop serving", "error", serr)
	}
	return g.Wait()
}

// raise makes a restored cell a new incarnation, once.
func (l *leader) raise(ctx context.Context) error {
	if !l.cfg.Restored || l.raised.Load() {
		return nil
	}
	if _, err := l.apply(ctx, core.Entry{Incarnate: &core.Incarnate{}}); err != nil {
		return err
	}
	l.raised.Store(true)
	return nil
}

// apply commits one entry and counts it.
func (l *leader) apply(ctx context.Context, e core.Entry) (core.Outcome, error) {
	e.Now = core.At(time.Now())
	start := time.Now()
	ctx, span := obs.Start(ctx, "scheduler.apply "+e.Name())
	out, err := l.rep.Apply(ctx, e)
	obs.End(span, err)
	l.m.applied(ctx, e, time.Since(start), out, err)
	return out, err
}

// applied is called for each outcome, in order, and must not block.
func (l *leader) applied(out core.Outcome) {
	if out.Events > 0 {
		l.outbox.signal()
	}
	var all []*core.Session
	for _, k := range out.Touched {
		s := l.session(k)
		if s == nil {
			s = &core.Session{Key: k, State: core.Deleted}
		}
		all = append(all, s)
		if len(s.Left) > 0 {
			l.tidy.now()
		}
	}
	if len(all) > 0 {
		l.queue.look(all...)
	}
	for _, k := range out.Touched {
		l.driver.touch(k)
	}
}

func (l *leader) session(keys ...ids.SessionKey) (s *core.Session) {
	l.rep.View(func(st *core.State) { s = st.Session(keys...) })
	return s
}

// candidates are the hosts that may take a session now, best first, and some
// that may not, for the plan. One whose wakes fail again and again comes last
// of those that may.
func (l *leader) candidates(s *core.Session, t core.Terms) (out []core.Candidate) {
	l.rep.View(func(st *core.State) {
		if now := st.Session(s.Key); now != nil {
			s = now
		}
		out = st.Rank(s, t, l.leases.facts)
	})
	var fit, sick, no []core.Candidate
	for _, c := range out {
		why := l.leases.sick(c.Host)
		switch {
		case c.Refused != "":
			no = append(no, c)
		case why != "":
			c.Ranks = append(slices.Clone(c.Ranks), why)
			sick = append(sick, c)
		default:
			fit = append(fit, c)
		}
	}
	return slices.Concat(fit, sick, no)
}

// explained is the plan that a wake would get now.
func (l *leader) explained(s *core.Session) (p core.Plan) {
	l.rep.View(func(st *core.State) { p = st.Explain(s, l.leases.facts) })
	return p
}

// tick advances leader time by the monotonic clock.
func (l *leader) tick(ctx context.Context) error {
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(tickEvery):
		}
		now := time.Now()
		if _, err := l.apply(ctx, core.Entry{Tick: &core.Tick{Elapsed: now.Sub(last)}}); err != nil {
			if errs.Is(err, errkind.NotLeader) || ctx.Err() != nil {
				return nil
			}
			l.log.Warn("cannot advance leader time", "error", err)
			continue
		}
		last = now
	}
}

// watchLeases declares hosts lost whose lease ran out. Time in which this
// process stood still does not count: nobody could renew.
func (l *leader) watchLeases(ctx context.Context) error {
	every := l.cfg.Lease / 18
	for last := time.Now(); ; last = time.Now() {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
		if stood := time.Since(last) - every; stood > every {
			l.leases.extend(stood)
			continue
		}
		for _, host := range l.leases.expired() {
			l.lose(ctx, host)
		}
	}
}

// lose gives away what is on a host whose lease ran out, unless it has had
// another one meanwhile. The boot that the state has is the one that is lost:
// the lease may be that of a later one, whose join came to nothing.
func (l *leader) lose(ctx context.Context, host ids.Host) {
	turn := l.leases.turn(host)
	turn.Lock()
	defer turn.Unlock()
	if l.leases.alive(host) {
		return
	}
	boot := ""
	l.rep.View(func(st *core.State) {
		if rec := st.Host(host); rec != nil {
			boot = rec.Boot
		}
	})
	l.log.Warn("host lost: its lease ran out", "host", host)
	_, err := l.apply(ctx, core.Entry{HostLost: &core.HostLost{Host: host, Boot: boot, Reason: "its lease ran out",
		Until: core.At(time.Now().Add(l.cfg.HandoffFor))}})
	if err != nil {
		l.log.Warn("cannot record a lost host", "host", host, "error", err)
		return
	}
	l.leases.drop(host)
	l.queue.room() // what is bound to it may go elsewhere
	l.drains.now()
}
