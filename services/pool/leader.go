package pool

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

const (
	stopTime   = 500 * time.Millisecond
	firstTime  = time.Second     // for hosts to say what waits on them, before requests are served
	demandTime = 2 * time.Minute // between two writes of the demand
	againTime  = 200 * time.Millisecond
	againMost  = 2 * time.Second
)

// signal has one loop look again; any number of them before it does are one.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) now() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// leader is one term of leadership. What it keeps in memory follows from what is stored and from what
// hosts say. When its context ends it does nothing more.
type leader struct {
	*server
	t     *tenure
	ctx   context.Context
	store store
	fleet *fleet
	doubt signal // a host says that it has heard of a later leader
	work  sync.WaitGroup

	// declaring is held while what is declared changes.
	declaring sync.Mutex
	specsRev  uint64
	unread    []record // stored, and not understood: kept as they are

	mu    sync.RWMutex
	pools map[string]*entry
}

// lead leads for one tenure. An error is one that no other tenure would help.
func (s *server) lead(ctx context.Context, t *tenure) error {
	lctx, end := context.WithCancel(ctx)
	defer end()
	l := &leader{server: s, t: t, ctx: lctx, store: store{kv: s.bucket, term: t.term}, doubt: newSignal(), pools: map[string]*entry{}}
	l.fleet = newFleet(l)
	s.log.Info("leads", "term", t.term)
	lost := make(chan bool, 1)
	go func() {
		defer end()
		lost <- s.election.keep(lctx, t, l.doubt)
	}()
	err := l.run(lctx)
	end()
	l.work.Wait()
	if <-lost {
		s.log.Warn("another instance leads now", "term", t.term)
		return err
	}
	if err == nil && !errs.Is(err, errkind.NotLeader) {
		l.keepDemand(context.WithoutCancel(ctx))
	}
	s.election.leave(t)
	if errs.Is(err, errkind.NotLeader) {
		return nil
	}
	return err
}

// run works until ctx ends or another leads.
func (l *leader) run(ctx context.Context) error {
	if err := l.load(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	l.work.Go(func() { l.fleet.run(ctx) })
	select {
	case <-l.fleet.first:
	case <-time.After(firstTime):
	case <-ctx.Done():
		return nil
	}
	svc, err := l.serve(ctx)
	if err != nil {
		return err
	}
	l.m.leads(l)
	defer l.m.leads(nil)
	l.work.Go(func() { l.declareFile(ctx) })
	for sleep(ctx, demandTime) {
		l.keepDemand(ctx)
	}
	sctx, done := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer done()
	return svc.Stop(sctx)
}

// load makes what is stored this term's, and the pools of it. While the store cannot be written it
// tries on.
func (l *leader) load(ctx context.Context) error {
	for wait := againTime; ; wait = min(2*wait, againMost) {
		err := l.loadOnce(ctx)
		if err == nil || errs.Is(err, errkind.NotLeader) || ctx.Err() != nil {
			return err
		}
		l.log.Warn("cannot take over the pools", "error", err)
		if !sleep(ctx, wait) {
			return nil
		}
	}
}

func (l *leader) loadOnce(ctx context.Context) error {
	v, rev, err := l.store.open(ctx, specsKey, &value{})
	if err != nil {
		return err
	}
	l.specsRev, l.unread = rev, nil
	for _, r := range v.Pools {
		spec, err := r.spec()
		if err == nil {
			_, err = core.NewSpec(spec, time.LoadLocation)
		}
		if err != nil { // one pool keeps no other from being served
			l.log.Error("a declared pool cannot be read; it is left alone", "spec", string(r.Spec), "error", err)
			l.unread = append(l.unread, r)
			continue
		}
		if l.entry(spec.GetTemplate()) != nil {
			continue // loaded before the store was away
		}
		e, err := l.open(ctx, spec, r.Removed)
		if errors.Is(err, errDamaged) { // nobody knows what hosts may have of it
			l.log.Error("what hosts may have of a pool cannot be read; it is left alone", "template", spec.GetTemplate(), "error", err)
			l.unread = append(l.unread, r)
			continue
		}
		if err != nil {
			return err
		}
		l.begin(e)
	}
	return nil
}

// begin adds a pool and has it work.
func (l *leader) begin(e *entry) {
	l.mu.Lock()
	l.pools[e.name] = e
	l.mu.Unlock()
	l.work.Go(func() { e.run(l.ctx) })
}

// acts reports whether this leader may still act: nobody else can have taken the seat. While it may
// not it answers from memory, and nothing is prepared.
func (l *leader) acts() bool { return l.ctx.Err() == nil && l.t.holds(l.cfg.Lease) }

func (l *leader) entry(template string) *entry {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.pools[template]
}

// entries are all pools in order of their templates.
func (l *leader) entries() []*entry {
	l.mu.RLock()
	defer l.mu.RUnlock()
	out := make([]*entry, 0, len(l.pools))
	for _, name := range slices.Sorted(maps.Keys(l.pools)) {
		out = append(out, l.pools[name])
	}
	return out
}

func (l *leader) pokeAll() {
	for _, e := range l.entries() {
		e.poke.now()
	}
}

// keepDemand stores what the next leader should know of the demand.
func (l *leader) keepDemand(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	for _, e := range l.entries() {
		e.mu.Lock()
		d, rev := e.core.Demand(), e.demandRev
		e.mu.Unlock()
		rev, err := l.store.put(ctx, demandKey+e.name, value{Demand: &d}, rev)
		if err != nil {
			l.log.Debug("the demand is not kept", "template", e.name, "error", err)
			continue
		}
		e.mu.Lock()
		e.demandRev = rev
		e.mu.Unlock()
	}
}

// serve registers the methods of the service. Who may call what is the catalogue's word, checked by
// the bus before a handler runs.
func (l *leader) serve(ctx context.Context) (*bus.Service, error) {
	svc, err := l.conn.Serve(ctx, bus.ServiceConfig{Name: "pool", Limit: requestLimit,
		Description: "How many warm sandboxes each template has, and where."})
	if err != nil {
		return nil, err
	}
	for _, err := range []error{
		led(l, svc, "reserve", l.reserve),
		led(l, svc, "settle", l.settle),
		led(l, svc, "apply", l.apply),
		led(l, svc, "show", l.show),
		led(l, svc, "remove", l.remove),
	} {
		if err != nil {
			_ = svc.Stop(ctx)
			return nil, err
		}
	}
	if err := svc.Announce(); err != nil {
		l.log.Warn("cannot say that this instance serves; callers ask again by themselves", "error", err)
	}
	return svc, nil
}
