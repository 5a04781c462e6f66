package scheduler

import (
	"context"
	"log/slog"
	"sync"
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
	eraseEvery  = 10 * time.Second
	stopTime    = 500 * time.Millisecond
)

// leader is one term of leadership. What it keeps in memory can be rebuilt
// from the state: leases begin afresh, drivers follow from the sessions.
type leader struct {
	cfg    Config
	conn   *bus.Conn
	rep    *replica.Replica
	log    *slog.Logger
	m      *metrics
	leases *leases
	driver *driver
	outbox *outbox
	raised *atomic.Bool
}

func newLeader(ctx context.Context, s *server) *leader {
	l := &leader{cfg: s.cfg, conn: s.conn, rep: s.rep, log: s.cfg.Log, m: s.m, raised: &s.raised,
		leases: newLeases(s.cfg.Lease + s.cfg.LeaseDrift)}
	l.driver = newDriver(ctx, l)
	l.outbox = newOutbox(l)
	return l
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
				l.leases.grant(h.ID, h.Boot)
			}
		}
	})
	l.rep.OnApply(l.applied)
	defer l.rep.OnApply(func(core.Outcome) {})
	defer l.driver.stop()
	l.driver.startAll()
	svc, err := l.serve(ctx)
	if err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return l.outbox.run(gctx) })
	g.Go(func() error { return l.watchLeases(gctx) })
	g.Go(func() error { return l.tick(gctx) })
	g.Go(func() error { return l.erase(gctx) })
	if l.cfg.Ready != nil {
		l.cfg.Ready()
	}
	err = g.Wait()
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	if serr := svc.Stop(sctx); serr != nil {
		l.log.Warn("stop serving", "error", serr)
	}
	return err
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
	l.m.applied(ctx, e.Name(), time.Since(start), out, err)
	return out, err
}

// applied is called for each outcome, in order, and must not block.
func (l *leader) applied(out core.Outcome) {
	if out.Events > 0 {
		l.outbox.signal()
	}
	for _, k := range out.Touched {
		l.driver.touch(k)
	}
}

func (l *leader) session(keys ...ids.SessionKey) (s *core.Session) {
	l.rep.View(func(st *core.State) { s = st.Session(keys...) })
	return s
}

// candidates are the hosts that may take a session now, best first.
func (l *leader) candidates(keys []ids.SessionKey, t core.Terms) (out []ids.Host) {
	l.rep.View(func(st *core.State) { out = st.Candidates(st.Session(keys...), t, l.leases.alive) })
	return out
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

// watchLeases declares hosts lost whose lease ran out.
func (l *leader) watchLeases(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(l.cfg.Lease / 18):
		}
		for host, boot := range l.leases.expired() {
			l.log.Warn("host lost: its lease ran out", "host", host)
			_, err := l.apply(ctx, core.Entry{HostLost: &core.HostLost{Host: host, Boot: boot, Reason: "its lease ran out"}})
			if err != nil {
				l.log.Warn("cannot record a lost host", "host", host, "error", err)
				continue
			}
			l.leases.drop(host, boot)
		}
	}
}

// erase removes deleted sessions from hosts that had them before, or were away at the time.
func (l *leader) erase(ctx context.Context) error {
	for {
		type job struct {
			t *core.Tombstone
			e core.Erasure
		}
		var todo []job
		l.rep.View(func(s *core.State) {
			for _, t := range s.Tombstones() {
				for _, e := range t.Erase {
					if !e.Done && l.leases.alive(e.Host) {
						todo = append(todo, job{t, e})
					}
				}
			}
		})
		for _, j := range todo {
			l.eraseOne(ctx, j.t, j.e)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(eraseEvery):
		case <-l.leases.joined:
		}
	}
}

// eraseNow has erase look at once: a host is back, or a session was deleted.
func (l *leader) eraseNow() {
	select {
	case l.leases.joined <- struct{}{}:
	default:
	}
}

func (l *leader) eraseOne(ctx context.Context, t *core.Tombstone, e core.Erasure) {
	ref := e.Ref(t)
	if err := l.hostDelete(ctx, e.Host, t.Tenant, ref); err != nil {
		l.log.Warn("cannot erase a deleted session yet", "session", t.Key, "host", e.Host, "error", err)
		return
	}
	if _, err := l.apply(ctx, core.Entry{Removed: &core.Removed{Ref: ref, Erased: true, Hosts: []ids.Host{e.Host}}}); err != nil {
		l.log.Warn("cannot record an erased session", "session", t.Key, "error", err)
	}
}

// leases are granted by the leader and live in its memory.
type leases struct {
	term   time.Duration
	joined chan struct{}
	mu     sync.Mutex
	held   map[ids.Host]lease
}

type lease struct {
	boot  string
	until time.Time // monotonic
	// held ends, by end, when this boot does not hold the lease any more.
	held context.Context
	end  context.CancelFunc
}

func newLeases(term time.Duration) *leases {
	return &leases{term: term, held: map[ids.Host]lease{}, joined: make(chan struct{}, 1)}
}

// grant reports whether the lease went to a boot that did not hold it.
func (l *leases) grant(h ids.Host, boot string) (fresh bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	cur, ok := l.held[h]
	if fresh = !ok || cur.boot != boot; fresh {
		if ok {
			cur.end()
		}
		cur = lease{boot: boot}
		cur.held, cur.end = context.WithCancel(context.Background())
	}
	cur.until = time.Now().Add(l.term)
	l.held[h] = cur
	return fresh
}

// renew extends the lease of a boot that has one.
func (l *leases) renew(h ids.Host, boot string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	cur, ok := l.held[h]
	if !ok || cur.boot != boot || time.Now().After(cur.until) {
		return false
	}
	cur.until = time.Now().Add(l.term)
	l.held[h] = cur
	return true
}

func (l *leases) alive(h ids.Host) bool {
	_, ok := l.of(h)
	return ok
}

// of returns the lease that a host holds now.
func (l *leases) of(h ids.Host) (lease, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	cur, ok := l.held[h]
	return cur, ok && time.Now().Before(cur.until)
}

func (l *leases) expired() map[ids.Host]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[ids.Host]string{}
	for h, cur := range l.held {
		if time.Now().After(cur.until) {
			out[h] = cur.boot
		}
	}
	return out
}

func (l *leases) drop(h ids.Host, boot string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if cur, ok := l.held[h]; ok && cur.boot == boot && time.Now().After(cur.until) {
		cur.end()
		delete(l.held, h)
	}
}
