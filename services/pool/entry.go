package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	_ "time/tzdata" // schedules name time zones, and hosts may have none

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

// entry is one pool at work. Decisions are made under its lock, and nothing is waited for under it.
type entry struct {
	l     *leader
	name  string
	tier  corev1.Tier
	terms *corev1.Terms // of its template; nil when the configuration has none
	tpl   core.Template
	poke  signal

	mu        sync.Mutex
	core      *core.Pool
	spec      *poolv1.Spec
	removed   bool
	caps      core.Caps // as they are stored
	capsRev   uint64
	demandRev uint64
	waiters   map[string][]chan core.Answer // of asks that wait, by reservation
	next      time.Time                     // when asks that wait are to be looked at
	retiring  map[ids.SandboxID]bool        // a request to retire it is under way
	said      said
	warm      int // that waited, and were wanted, when it was planned last
	goal      int
}

// newEntry makes a pool of what is known of it.
func (l *leader) newEntry(spec *poolv1.Spec, caps core.Caps, demand *core.Demand) (*entry, error) {
	read, err := core.NewSpec(spec, time.LoadLocation)
	if err != nil {
		return nil, err
	}
	e := &entry{l: l, name: spec.GetTemplate(), tier: spec.GetTier(), poke: newSignal(), spec: spec,
		waiters: map[string][]chan core.Answer{}, retiring: map[ids.SandboxID]bool{}}
	if e.terms = l.terms(e.name, e.tier); e.terms != nil {
		e.tpl = core.Template{Digest: digest(e.terms), Memory: e.terms.GetLimits().GetMemoryBytes()}
	}
	e.core = core.New(read, e.tpl, caps, demand, time.Now())
	return e, nil
}

// terms are what a pool's sandboxes are made of, or nil when the configuration has no such template.
func (s *server) terms(template string, tier corev1.Tier) *corev1.Terms {
	t, ok := s.cfg.Templates[template]
	if !ok {
		return nil
	}
	terms, err := t.terms(template)
	if err != nil {
		return nil // Validate has said so
	}
	terms.Tier = tier
	return terms
}

// open makes a pool that is stored this term's.
func (l *leader) open(ctx context.Context, spec *poolv1.Spec, removed bool) (*entry, error) {
	name := spec.GetTemplate()
	caps, capsRev, err := l.store.open(ctx, capsKey+name, &value{})
	if err != nil {
		return nil, err
	}
	demand, demandRev, err := l.store.open(ctx, demandKey+name, nil)
	if errors.Is(err, errDamaged) { // it is learned again
		demand, err = value{}, nil
	}
	if err != nil {
		return nil, err
	}
	e, err := l.newEntry(spec, caps.Caps, demand.Demand)
	if err != nil {
		return nil, err
	}
	e.caps, e.capsRev, e.demandRev, e.removed = caps.Caps, capsRev, demandRev, removed
	if removed || e.terms == nil {
		e.core.Remove()
	}
	return e, nil
}

// roundPause lets what happens together be planned together. A round that takes long, since thousands
// wait, is followed by a pause that is longer by roundPart, so that planning never takes the processor
// from the opens that it is for.
const (
	roundPause = 10 * time.Millisecond
	roundPart  = 10
	roundMost  = 500 * time.Millisecond
)

// run plans again and again until ctx ends or nothing of a removed pool is left.
func (e *entry) run(ctx context.Context) {
	for {
		began := time.Now()
		if e.round(ctx) {
			return
		}
		if !sleep(ctx, min(max(roundPause, roundPart*time.Since(began)), roundMost)) {
			return
		}
		t := time.NewTimer(e.pause())
		select {
		case <-ctx.Done():
		case <-e.poke:
		case <-t.C:
		}
		t.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// pause is until the next round when nothing happens.
func (e *entry) pause() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.l.cfg.WarmEvery
	if !e.next.IsZero() {
		d = min(d, max(time.Until(e.next), time.Millisecond))
	}
	return d
}

// round takes in what hosts said, plans, and begins what the plan says. It reports whether the pool is
// at its end.
func (e *entry) round(ctx context.Context) (over bool) {
	e.mu.Lock()
	plan, now, known := e.plan()
	var events []event
	if known {
		events = e.news(plan, now)
	}
	gone := e.removed && e.core.Gone()
	rev := e.capsRev
	e.mu.Unlock()
	e.l.publish(events...)
	if !known || !e.l.acts() {
		return false
	}
	if gone {
		return e.l.forget(ctx, e)
	}
	if plan.CapsChanged {
		rev, err := e.l.store.put(ctx, capsKey+e.name, value{Caps: plan.Caps}, rev)
		if err != nil {
			e.unstored(err)
			return false
		}
		e.mu.Lock()
		e.caps, e.capsRev = plan.Caps, rev
		e.core.Stored(plan.Caps)
		e.mu.Unlock()
	}
	e.carryOut(ctx, plan.Steps)
	return false
}

// unstored says that nothing follows from a plan, because it could not be stored.
func (e *entry) unstored(err error) {
	if errs.Is(err, errkind.NotLeader) {
		e.l.doubt.now()
	}
	if e.l.ctx.Err() == nil {
		e.l.log.Warn("what hosts may prepare cannot be stored; nothing is prepared until it can", "template", e.name, "error", err)
	}
}

// plan observes and plans; the lock is held. Until it is known which hosts there are nothing may follow.
func (e *entry) plan() (p core.Plan, now time.Time, known bool) {
	hosts, known := e.l.fleet.now()
	now = time.Now()
	if known {
		e.core.Observe(hosts, now)
	}
	e.grant(now)
	plan := e.core.Plan(now)
	e.warm, e.goal = 0, plan.Goal.N
	for _, h := range hosts {
		for _, w := range h.Warm {
			if w.Template == e.name && w.Tier == e.tier && w.State == core.Ready && h.Presence != core.Lost {
				e.warm++
			}
		}
	}
	return plan, now, known
}

// grant answers asks that wait no more; the lock is held.
func (e *entry) grant(now time.Time) {
	answers, next := e.core.Granted(now)
	for _, a := range answers {
		for _, c := range e.waiters[a.Reservation] {
			c <- a // has room for one
		}
		delete(e.waiters, a.Reservation)
	}
	e.next = next
}

// reserve asks for a warm sandbox, and waits for one as long as the pool says and ctx goes on.
func (e *entry) reserve(ctx context.Context, a core.Ask) (core.Answer, error) {
	now := time.Now()
	e.mu.Lock()
	if e.removed {
		e.mu.Unlock()
		return core.Answer{}, errNoPool
	}
	answer := e.core.Reserve(a, now)
	if answer.Verdict != core.Waiting {
		events := e.exhaustion(answer, now)
		e.mu.Unlock()
		e.poke.now()
		e.l.publish(events...)
		return answer, nil
	}
	c := make(chan core.Answer, 1)
	e.waiters[answer.Reservation] = append(e.waiters[answer.Reservation], c)
	e.grant(now)
	e.mu.Unlock()
	e.poke.now()
	select {
	case got := <-c:
		e.mu.Lock()
		events := e.exhaustion(got, time.Now())
		e.mu.Unlock()
		e.l.publish(events...)
		return got, nil
	case <-ctx.Done():
		e.abandon(answer.Reservation, c)
		return core.Answer{}, ctx.Err()
	}
}

// abandon frees a reservation whose asker went away.
func (e *entry) abandon(reservation string, c chan core.Answer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	left := slices.DeleteFunc(e.waiters[reservation], func(o chan core.Answer) bool { return o == c })
	if len(left) > 0 {
		e.waiters[reservation] = left
		return // it was asked twice
	}
	delete(e.waiters, reservation)
	now := time.Now()
	e.core.Settle(core.Settled{Reservation: reservation}, now)
	e.grant(now)
}

// status is the pool as it stands, with what follows.
func (e *entry) status() *poolv1.Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, now, _ := e.plan()
	return e.statusAt(now)
}

// current is the pool as it was seen last.
func (e *entry) current() *poolv1.Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.statusAt(time.Now())
}

// statusAt is status without a new plan; the lock is held.
func (e *entry) statusAt(now time.Time) *poolv1.Status {
	out := e.core.Status(now)
	if out == nil {
		out = &poolv1.Status{}
	}
	out = proto.CloneOf(out)
	out.Spec = e.spec
	switch {
	case e.removed:
		out.Unhealthy = "the pool was removed, and is being emptied"
	case e.terms == nil:
		out.Unhealthy = fmt.Sprintf("there is no template %q any more", e.name)
	}
	return out
}
