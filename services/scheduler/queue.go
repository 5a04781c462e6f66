package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

const (
	// lookAgain is how long the queue waits at most when nothing tells it that
	// something changed.
	lookAgain = 2 * time.Second
	// tellAgain is how long a reason stands before another one is recorded.
	tellAgain = 10 * time.Second
)

// queue places the sessions whose wake waits: opens for which there was no
// room, as soon as there is some, and what a host that was lost or drained
// leaves behind, a few at a time. Higher priority goes first, then a user who
// waits before a handoff, then who came first. It keeps nothing that cannot be
// read from the state again.
type queue struct {
	l    *leader
	more chan struct{}

	mu    sync.Mutex
	waits map[ids.SessionKey]*waiter
	seq   uint64
	// moving are the sessions that wake because of a handoff now.
	moving map[ids.SessionKey]bool
	next   time.Time // when the next handoff may begin
	// Room that came free is counted, and how much of it a pass has given away.
	freed, given uint64
	passed       chan struct{} // closed at the end of the pass under way
}

// waiter is one session whose wake waits.
type waiter struct {
	key      ids.SessionKey
	handoff  bool // no user waits for it
	priority uint32
	seq      uint64
	told     time.Time // when a reason was last recorded
	again    time.Time // not before, since a host that had room had none after all
}

func newQueue(l *leader) *queue {
	return &queue{l: l, more: make(chan struct{}, 1), waits: map[ids.SessionKey]*waiter{},
		moving: map[ids.SessionKey]bool{}, passed: make(chan struct{})}
}

// waits reports whether a session is one that the queue has to place.
func waits(s *core.Session) bool {
	next := core.Next(s)
	return len(next) > 0 && next[0].Kind == core.Retry
}

// isHandoff reports whether s wakes only because its host is lost or drained.
func isHandoff(s *core.Session) bool {
	return s.Wake != nil && s.Wake.Cause == corev1.Cause_CAUSE_HANDOFF
}

// asked reports whether a user waits for s to be active.
func asked(s *core.Session) bool {
	return slices.ContainsFunc(s.Pending, func(p core.Pending) bool { return p.Verb == core.VerbOpen })
}

// load reads who waits from the state.
func (q *queue) load() {
	var all []*core.Session
	q.l.rep.View(func(st *core.State) {
		for _, s := range st.Sessions() {
			if s.Wake != nil {
				all = append(all, s)
			}
		}
	})
	// Whose deadline is first came first, as far as that is known.
	slices.SortFunc(all, func(a, b *core.Session) int {
		return cmp.Or(cmp.Compare(a.Wake.Deadline, b.Wake.Deadline), cmp.Compare(a.ChangedAt, b.ChangedAt), byKey(a, b))
	})
	q.look(all...)
	q.wake()
}

// look takes note of sessions that changed, or are gone (state deleted): all
// of one entry together, so that a pass never sees a part of a host's sessions
// only. It never blocks for long: it is called while entries are applied.
func (q *queue) look(all ...*core.Session) {
	q.mu.Lock()
	defer q.mu.Unlock()
	due := false
	for _, s := range all {
		due = q.note(s) || due
	}
	if due {
		q.wake()
	}
}

// note reports whether the queue has something to do. mu is held.
func (q *queue) note(s *core.Session) (due bool) {
	if s.State == core.Waking && isHandoff(s) {
		q.moving[s.Key] = true
	} else if q.moving[s.Key] {
		delete(q.moving, s.Key)
		due = true
	}
	if !waits(s) {
		delete(q.waits, s.Key)
	} else {
		w := q.waits[s.Key]
		if w == nil {
			q.seq++
			w = &waiter{key: s.Key, seq: q.seq}
			q.waits[s.Key] = w
		}
		if s.Wake.Unplaced == "" {
			due = true // nobody has looked for a host yet
		} else if w.told.IsZero() {
			w.told = time.Now()
		}
		w.handoff, w.priority = isHandoff(s) && !asked(s), s.Wake.Terms.Priority
	}
	if len(q.waits) > 0 && !holds(s) {
		q.freed++
		due = true
	}
	return due
}

// holds reports whether s takes room of its host.
func holds(s *core.Session) bool {
	return s.State == core.Waking || s.State == core.Active || s.State == core.Sleeping
}

// room tells that a host has room that it did not have.
func (q *queue) room() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.freed++
	q.wake()
}

func (q *queue) wake() {
	select {
	case q.more <- struct{}{}:
	default:
	}
}

// turn has an open that comes in now wait until room that came free was
// offered to those who wait longer and are of no lower priority.
func (q *queue) turn(ctx context.Context, priority uint32) {
	q.mu.Lock()
	ahead := false
	for _, w := range q.waits {
		ahead = ahead || !w.handoff && w.priority >= priority
	}
	passed, due := q.passed, ahead && q.freed != q.given
	q.mu.Unlock()
	if !due {
		return
	}
	select {
	case <-passed:
	case <-ctx.Done():
	case <-time.After(lookAgain):
	}
}

// run places until ctx ends.
func (q *queue) run(ctx context.Context) error {
	for {
		wait := q.pass(ctx)
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-q.more:
		case <-t.C:
		}
		t.Stop()
	}
}

// order is who waits, first the next to be placed.
func (q *queue) order() (out []*waiter, freed uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, w := range q.waits {
		c := *w
		out = append(out, &c)
	}
	rank := func(w *waiter) int {
		if w.handoff {
			return 1
		}
		return 0
	}
	slices.SortFunc(out, func(a, b *waiter) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), cmp.Compare(rank(a), rank(b)), cmp.Compare(a.seq, b.seq))
	})
	return out, q.freed
}

// pass offers what room there is to everybody who waits, in order. It returns
// how long to wait before the next one.
func (q *queue) pass(ctx context.Context) time.Duration {
	order, freed := q.order()
	wait := lookAgain
	p := &passing{full: map[string]bool{}}
	for _, w := range order {
		if ctx.Err() != nil {
			return 0
		}
		s := q.l.session(w.key)
		if s == nil || !waits(s) {
			continue
		}
		wait = min(wait, q.one(ctx, w, s, p))
	}
	q.mu.Lock()
	q.given = freed
	close(q.passed)
	q.passed = make(chan struct{})
	q.mu.Unlock()
	return max(wait, time.Millisecond)
}

// passing is what one pass has found out. What it could not give to one it
// gives to no later one, even if it came free meanwhile: that is for the next
// pass, which begins with the first again.
type passing struct {
	full   map[string]bool // what nobody has room for
	closed bool            // no more handoffs may begin
}

// one places one session, gives it up, or lets it wait. It returns when it is to be looked at again.
func (q *queue) one(ctx context.Context, w *waiter, s *core.Session, p *passing) time.Duration {
	left := lookAgain
	if d := s.Wake.Deadline; d != 0 {
		left = time.Until(d.Std())
	}
	if left <= 0 {
		q.place(ctx, w, s, false)
		return lookAgain
	}
	left = max(left, time.Millisecond)
	if w.handoff {
		at := q.slot()
		if p.closed = p.closed || at > 0; p.closed {
			return min(left, max(at, time.Millisecond))
		}
	}
	if wait := time.Until(w.again); wait > 0 {
		return min(left, wait)
	}
	class := classOf(s)
	if p.full[class] && s.Wake.Unplaced != "" {
		return left
	}
	plan := q.l.explained(s)
	if plan.Host == "" {
		p.full[class] = true
		if s.Wake.Unplaced != "" && (s.Wake.Unplaced == plan.Reason || time.Since(w.told) < tellAgain) {
			return left
		}
	}
	if !q.place(ctx, w, s, plan.Host != "") {
		return min(left, q.l.cfg.RetryMax)
	}
	return left
}

// slot returns 0 when a handoff may begin now, else how long until the next
// look; a wake that ends says so before.
func (q *queue) slot() time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.moving) >= q.l.cfg.HandoffParallel {
		return lookAgain
	}
	return max(time.Until(q.next), 0)
}

// place commits one placement, or that there is none; expected: there should be one.
func (q *queue) place(ctx context.Context, w *waiter, s *core.Session, expected bool) bool {
	var c []core.Candidate
	if s.Wake.Deadline == 0 || s.Wake.Deadline.Std().After(time.Now()) {
		c = q.l.candidates(s, *s.Wake.Terms)
	}
	placed := func(core.Outcome, error) {}
	if expected {
		c, placed = q.l.pools.reserve(ctx, wanted{session: s, terms: *s.Wake.Terms, request: s.Wake.Request, deadline: s.Wake.Deadline, brief: true}, c)
	}
	out, err := q.l.apply(ctx, core.Entry{Place: &core.Place{Session: s.Key, Generation: s.Generation, Candidates: c}})
	placed(out, err)
	if err != nil {
		if ctx.Err() == nil {
			q.l.log.Warn("cannot place a session that waits", "session", s.Key, "error", err)
		}
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if now := q.waits[w.key]; now != nil {
		now.told = time.Now()
		if expected {
			now.again = now.told.Add(q.l.cfg.RetryMin)
		}
	}
	if w.handoff && out.Session != nil && out.Session.State == core.Waking {
		every := time.Second / time.Duration(q.l.cfg.HandoffRate)
		if q.next = q.next.Add(every); time.Until(q.next) < 0 {
			q.next = time.Now().Add(every)
		}
	}
	return true
}

// classOf is the same for sessions that the same hosts can take.
func classOf(s *core.Session) string {
	t, tenant := s.Wake.Terms, ""
	if t.MaxAwake > 0 {
		tenant = s.Tenant.String() + "/" + t.Plan
	}
	if len(s.Holders) >= core.MaxHolders || !s.Fresh() && s.Manifest == "" {
		tenant += "/" + s.Key.String() // a class of its own
	}
	return fmt.Sprintf("%d %v %v %s %s", t.Tier, t.Limits, t.Zones, tenant, s.Newest)
}
