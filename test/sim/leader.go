package sim

import (
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// What the scheduler is configured with; see services/scheduler/config.go.
const (
	leaseTerm     = 9 * time.Second
	leaseDrift    = time.Second
	leaseMargin   = 2 * time.Second
	wakeTimeout   = 30 * time.Second
	sleepTimeout  = 40 * time.Second
	deleteTimeout = 20 * time.Second
	wakeTries     = 3
	retryMin      = 100 * time.Millisecond
	retryMax      = 10 * time.Second
	tickEvery     = 10 * time.Second
	eraseEvery    = 5 * time.Second
	trimAfter     = 4 * time.Second
	handoffWait   = 5 * time.Minute
	handoffs      = 2 // at one time
	drainJobs     = 2
	expireNotice  = 20 * time.Second
)

// leader is one term of leadership, modelled on services/scheduler/leader.go: what it keeps in memory
// can be rebuilt from the state.
type leader struct {
	w        *World
	r        *replica
	term     int
	c        *ctx
	over     bool
	ended    signal
	waiting  []*proposal // that nobody commits for it any more
	leases   map[ids.Host]*lease
	turns    map[ids.Host]*turn
	loops    map[ids.SessionKey]*loop
	changed  signalMap
	more     signal // events to publish
	trims    uint64
	trimming signal
	erase    signal
	queue    *queue
	drains   map[ids.Host]*signal
}

type lease struct {
	boot  string
	until time.Duration // on the leader's monotonic clock
	ended *signal       // this boot does not hold it any more
}

// signalMap wakes who waits for a session to change.
type signalMap map[ids.SessionKey]*signal

func (m signalMap) of(k ids.SessionKey) *signal {
	s := m[k]
	if s == nil || s.set {
		s = &signal{}
		m[k] = s
	}
	return s
}

func newLeader(r *replica, term int) *leader {
	w := r.g.w
	l := &leader{w: w, r: r, term: term, c: w.background(), leases: map[ids.Host]*lease{}, turns: map[ids.Host]*turn{}, loops: map[ids.SessionKey]*loop{},
		changed: signalMap{}, drains: map[ids.Host]*signal{}}
	l.queue = newQueue(l)
	w.spawn(r.p, "lead", l.run)
	return l
}

// end is the end of leadership: everything under way fails, some of it though it was committed.
func (l *leader) end() {
	l.over = true
	l.ended.fire(l.w)
	for _, p := range l.waiting {
		p.finish(l.w, fail(errkind.NotLeader, "leadership lost"))
	}
	l.waiting = nil
	l.c.cancel(l.w, errkind.NotLeader)
	clear(l.r.p.serve)
}

func (l *leader) run(t *task) {
	t.sleep(l.c, l.w.between(time.Millisecond, 10*time.Millisecond)) // Barrier
	if l.over {
		return
	}
	for _, h := range l.st().Hosts() {
		if !h.Lost {
			l.grant(h.ID, h.Boot)
		}
	}
	for _, s := range sorted(l.st()) {
		l.touch(s.Key)
	}
	l.queue.load()
	l.serve()
	l.w.served("scheduler")
	l.w.spawn(l.r.p, "outbox", l.publish)
	l.w.spawn(l.r.p, "trim", l.trim)
	l.w.spawn(l.r.p, "leases", l.watchLeases)
	l.w.spawn(l.r.p, "tick", l.tick)
	l.w.spawn(l.r.p, "erase", l.eraseAll)
	l.w.spawn(l.r.p, "clear", l.clearLefts)
	l.w.spawn(l.r.p, "queue", l.queue.run)
	for _, h := range l.st().Hosts() {
		if h.Draining {
			l.drain(h.ID)
		}
	}
}

func (l *leader) st() *sched.State { return l.r.st }

func (l *leader) session(keys ...ids.SessionKey) *sched.Session { return l.st().Session(keys...) }

// sorted returns the sessions in order of their keys.
func sorted(st *sched.State) []*sched.Session {
	out := st.Sessions()
	slices.SortFunc(out, func(a, b *sched.Session) int {
		if a.Key < b.Key {
			return -1
		}
		return 1
	})
	return out
}

// applied is told every outcome, in order.
func (l *leader) applied(out sched.Outcome) {
	if out.Events > 0 {
		l.more.fire(l.w)
	}
	for _, k := range out.Touched {
		if s := l.changed[k]; s != nil {
			delete(l.changed, k)
			s.fire(l.w)
		}
		l.queue.look(k)
		l.touch(k)
	}
}

func (l *leader) facts(h ids.Host) sched.HostFacts { return sched.HostFacts{Alive: l.alive(h)} }

func (l *leader) candidates(keys []ids.SessionKey, t *sched.Terms) []sched.Candidate {
	return l.w.advise(l.st().Rank(l.session(keys...), *t, l.facts))
}

func (l *leader) backoff(tries int) time.Duration { return min(retryMin<<min(tries, 16), retryMax) }

// Leases.

func (l *leader) grant(h ids.Host, boot string) (fresh bool) {
	cur := l.leases[h]
	if fresh = cur == nil || cur.boot != boot; fresh {
		if cur != nil {
			cur.ended.fire(l.w)
		}
		cur = &lease{boot: boot, ended: &signal{}}
		l.leases[h] = cur
	}
	cur.until = l.r.p.mono() + l.leaseTime()
	return fresh
}

func (l *leader) leaseTime() time.Duration {
	if l.w.opt.Mutation == GiveAwayEarly {
		return leaseTerm / 2
	}
	return leaseTerm + leaseDrift
}

func (l *leader) renew(h ids.Host, boot string) bool {
	cur := l.leases[h]
	if cur == nil || cur.boot != boot || l.r.p.mono() > cur.until {
		return false
	}
	cur.until = l.r.p.mono() + l.leaseTime()
	return true
}

func (l *leader) alive(h ids.Host) bool {
	cur := l.leases[h]
	return cur != nil && l.r.p.mono() < cur.until
}

// watchLeases declares hosts lost whose lease ran out. Time in which this process stood still is
// added, since nobody could renew.
func (l *leader) watchLeases(t *task) {
	every := leaseTerm / 18
	for last := l.r.p.mono(); ; {
		if t.sleep(l.c, every) != nil {
			return
		}
		now := l.r.p.mono()
		if stood := now - last - every; stood > every {
			for _, h := range sortedKeys(l.leases) {
				l.leases[h].until += stood
			}
		}
		last = now
		for _, h := range sortedKeys(l.leases) {
			l.lose(t, h)
		}
	}
}

// lose gives away what is on a host whose lease ran out, unless it has had another one meanwhile.
func (l *leader) lose(t *task, h ids.Host) {
	if l.leases[h] == nil || l.r.p.mono() <= l.leases[h].until {
		return
	}
	defer l.turn(t, h)()
	if l.over || l.alive(h) {
		return
	}
	boot := ""
	if rec := l.st().Host(h); rec != nil {
		boot = rec.Boot
	}
	_, err := l.apply(t, l.c, sched.Entry{HostLost: &sched.HostLost{Host: h, Boot: boot, Reason: "its lease ran out",
		Until: sched.At(l.r.p.wall().Add(handoffWait))}})
	if cur := l.leases[h]; err == nil && cur != nil && l.r.p.mono() > cur.until {
		l.forget(h)
		l.queue.room()
	}
}

// forget ends the lease of a host.
func (l *leader) forget(h ids.Host) {
	if cur := l.leases[h]; cur != nil {
		cur.ended.fire(l.w)
		delete(l.leases, h)
	}
}

// turn is a lock of one host; see services/scheduler/leases.go.
type turn struct {
	held bool
	free signal
}

// turn is held while a lease is given together with the entry that says so, and while a host is found to
// hold none together with the entry that says that.
func (l *leader) turn(t *task, h ids.Host) (leave func()) {
	x := l.turns[h]
	if x == nil {
		x = &turn{}
		l.turns[h] = x
	}
	for x.held {
		x.free.take()
		t.wait(nil, -1, &x.free)
	}
	x.held = true
	return func() {
		x.held = false
		x.free.fire(l.w)
	}
}

// tick advances leader time.
func (l *leader) tick(t *task) {
	for last := l.r.p.mono(); t.sleep(l.c, tickEvery) == nil; {
		now := l.r.p.mono()
		if _, err := l.apply(t, l.c, sched.Entry{Tick: &sched.Tick{Elapsed: now - last}}); err == nil {
			last = now
		}
	}
}

// eraseAll removes deleted sessions from hosts that had them before, or were away at the time.
func (l *leader) eraseAll(t *task) {
	for !l.over {
		tombs := l.st().Tombstones()
		slices.SortFunc(tombs, func(a, b *sched.Tombstone) int { return int(int64(a.Index) - int64(b.Index)) })
		for _, tomb := range tombs {
			for _, e := range tomb.Erase {
				if e.Done || !l.alive(e.Host) {
					continue
				}
				ref := e.Ref(tomb)
				if erased, err := l.hostDelete(t, l.w.within(l.c, deleteTimeout), e.Host, tomb.Tenant, ref); err == nil && erased {
					_, _ = l.apply(t, l.c, sched.Entry{Removed: &sched.Removed{Ref: ref, Erased: true, Hosts: []ids.Host{e.Host}}})
				}
			}
		}
		t.wait(l.c, l.r.p.real(eraseEvery), &l.erase)
		l.erase.take()
	}
}

// clearLefts removes compute of earlier epochs that may still run.
func (l *leader) clearLefts(t *task) {
	for !l.over {
		for _, p := range l.st().Lefts() {
			if !l.alive(p.Left.Host) {
				continue
			}
			l.w.cov.hit("left compute cleared")
			ref := sched.Ref{Session: p.Session.Key, Generation: p.Session.Generation, Epoch: p.Left.Epoch}
			a := sched.Answer{Kind: sched.HostClear, Session: p.Session, Left: p.Left}
			_, err := l.host(t, l.w.within(l.c, sleepTimeout), p.Left.Host, "sleep",
				sleepReq{tenant: p.Session.Tenant, ref: ref, parent: p.Session.Manifest, force: true})
			a.Err, a.NotFound = failureOf(err), gone(err) || is(err, errkind.Unsaved)
			if l.over {
				return
			}
			if e, ok := sched.After(l.session(p.Session.Key), a, wakeTries, nil); ok {
				_, _ = l.apply(t, l.c, e)
			}
		}
		if t.sleep(l.c, 2*time.Second) != nil {
			return
		}
	}
}
