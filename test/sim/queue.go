package sim

import (
	"cmp"
	"slices"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// lookAgain is how long the queue waits at most when nothing tells it that something changed.
const lookAgain = 2 * time.Second

// queue places the sessions whose wake waits, modelled on services/scheduler/queue.go: what a lost or
// drained host leaves a few at a time, opens as soon as there is room.
type queue struct {
	l      *leader
	more   signal
	moving map[ids.SessionKey]bool
	seen   map[ids.SessionKey]uint64
	told   map[ids.SessionKey]time.Duration
	seq    uint64
}

func newQueue(l *leader) *queue {
	return &queue{l: l, moving: map[ids.SessionKey]bool{}, seen: map[ids.SessionKey]uint64{}, told: map[ids.SessionKey]time.Duration{}}
}

func waits(s *sched.Session) bool {
	next := sched.Next(s)
	return len(next) > 0 && next[0].Kind == sched.Retry
}

func isHandoff(s *sched.Session) bool {
	return s.Wake != nil && s.Wake.Cause == corev1.Cause_CAUSE_HANDOFF
}

// asked reports whether a user waits for s to be active.
func asked(s *sched.Session) bool {
	return slices.ContainsFunc(s.Pending, func(p sched.Pending) bool { return p.Verb == sched.VerbOpen })
}

func (q *queue) load() {
	for _, s := range sorted(q.l.st()) {
		q.look(s.Key)
	}
	q.more.fire(q.l.w)
}

// look takes note of a session that changed.
func (q *queue) look(key ids.SessionKey) {
	s := q.l.session(key)
	if s != nil && s.State == sched.Waking && isHandoff(s) {
		q.moving[key] = true
	} else {
		delete(q.moving, key)
	}
	if s == nil || !waits(s) {
		delete(q.seen, key)
	} else if q.seen[key] == 0 {
		q.seq++
		q.seen[key] = q.seq
	}
	q.more.fire(q.l.w)
}

func (q *queue) room() { q.more.fire(q.l.w) }

// turn lets those go first who wait longer.
func (q *queue) turn(t *task, c *ctx, priority uint32) {
	for _, k := range sortedKeys(q.seen) {
		if s := q.l.session(k); s != nil && s.Wake != nil && s.Wake.Terms.Priority >= priority {
			t.wait(c, 2*time.Millisecond)
			return
		}
	}
}

func (q *queue) run(t *task) {
	for !q.l.over {
		q.more.take()
		wait := q.pass(t)
		t.wait(q.l.c, q.l.r.p.real(wait), &q.more)
		if q.more.set { // what changes at once is looked at together
			t.wait(q.l.c, time.Millisecond)
		}
	}
}

func (q *queue) pass(t *task) time.Duration {
	keys := sortedKeys(q.seen)
	slices.SortStableFunc(keys, func(a, b ids.SessionKey) int { return cmp.Compare(q.seen[a], q.seen[b]) })
	for _, handoff := range []bool{false, true} {
		for _, k := range keys {
			s := q.l.session(k)
			if q.l.over || s == nil || !waits(s) || (isHandoff(s) && !asked(s)) != handoff {
				continue
			}
			if handoff && len(q.moving) >= handoffs && !(s.Wake.Deadline != 0 && s.Wake.Deadline.Std().Before(q.l.r.p.wall())) {
				q.l.w.cov.hit("handoff waits for its turn")
				continue
			}
			if s.Wake.Unplaced != "" && !(s.Wake.Deadline != 0 && s.Wake.Deadline.Std().Before(q.l.r.p.wall())) &&
				q.l.st().Explain(s, q.l.facts).Host == "" && q.l.w.now-q.told[k] < 10*time.Second {
				continue // as was said
			}
			q.told[k] = q.l.w.now
			_, _ = q.l.apply(t, q.l.c, sched.Entry{Place: &sched.Place{Session: s.Key, Generation: s.Generation,
				Candidates: q.l.candidates([]ids.SessionKey{s.Key}, s.Wake.Terms)}})
		}
	}
	return lookAgain
}

// drain empties a host, modelled on services/scheduler/drain.go.
func (l *leader) drain(h ids.Host) {
	if l.drains[h] != nil {
		l.drains[h].fire(l.w)
		return
	}
	poke := &signal{}
	l.drains[h] = poke
	l.w.spawn(l.r.p, "drain", func(t *task) {
		defer delete(l.drains, h)
		asked := map[ids.SessionKey]drainAsk{}
		for !l.over {
			rec := l.st().Host(h)
			if rec == nil || !rec.Draining || rec.Drained {
				return
			}
			l.drainHost(t, rec, asked)
			t.wait(l.c, l.r.p.real(time.Second))
		}
	})
}

// drainHost takes one more step with everything that is on a host.
func (l *leader) drainHost(t *task, h *sched.Host, asked map[ids.SessionKey]drainAsk) {
	late := h.DrainDeadline != 0 && sched.At(l.r.p.wall()) >= h.DrainDeadline
	busy := 0
	var asks []sched.Entry
	for _, s := range l.st().OnHost(h.ID) {
		e, ok := l.drainStep(s, h.ID, late)
		if ok && e.Save != nil && e.Save.Host != h.ID && !l.alive(e.Save.Host) {
			// What is unsaved is on a host that is away; this one has nothing of it.
			e = sched.Entry{Move: &sched.Move{Session: s.Key, Generation: s.Generation, Host: h.ID}}
		}
		switch {
		case s.State == sched.Sleeping:
			busy++
		case !ok:
		case e.Move != nil:
			l.handOver(t, e)
		case (e.Save != nil || e.Sleep != nil && !late) && l.r.p.mono() < asked[s.Key].at:
		default:
			asks = append(asks, e)
		}
	}
	if l.over || !l.alive(h.ID) {
		return
	}
	for _, e := range asks[:min(len(asks), max(drainJobs-busy, 0))] {
		switch {
		case e.Sleep != nil:
			asked[e.Sleep.Keys[0]] = drainAsk{at: l.r.p.mono() + drainIdle}
		case e.Save != nil:
			n := asked[e.Save.Session].saves
			asked[e.Save.Session] = drainAsk{at: l.r.p.mono() + min(time.Second<<min(n, 8), drainSlow), saves: n + 1}
		}
		l.handOver(t, e)
	}
}

func (l *leader) handOver(t *task, e sched.Entry) {
	if out, err := l.apply(t, l.c, e); err == nil && out.Refused == nil {
		l.w.cov.hit("drain " + e.Name())
	}
}

// drainAsk is when a drain asks for a session next, and how often it asked for a save.
type drainAsk struct {
	at    time.Duration
	saves int
}

// drainSlow is the longest pause before a session is saved again whose save came to nothing.
const drainSlow = 30 * time.Second

// drainIdle is how long an awake session must have been left alone to be taken away.
const drainIdle = 5 * time.Second

// drainStep is the entry that brings a session on h nearer to its being elsewhere.
func (l *leader) drainStep(s *sched.Session, h ids.Host, late bool) (sched.Entry, bool) {
	switch s.State {
	case sched.Active:
		if s.Host != h || s.Terms.Ephemeral && !late {
			return sched.Entry{}, false
		}
		c := &sched.SleepCmd{Tenant: s.Tenant, Keys: []ids.SessionKey{s.Key}, Generation: s.Generation, Epoch: s.Epoch, Reason: sched.ReasonDrain, Force: late}
		if !late {
			c.IdleSince = sched.At(l.r.p.wall().Add(-drainIdle))
		}
		return sched.Entry{Sleep: c}, true
	case sched.Asleep, sched.Paused, sched.Failed:
		switch {
		case s.NeedsStop || s.Wake != nil:
		case s.Dirty: // also where h has nothing of it but the epoch of a wake that failed
			return sched.Entry{Save: &sched.Save{Ref: refOf(s), Host: s.Newest}}, true
		case !s.Dirty && s.Host == h:
			return sched.Entry{Move: &sched.Move{Session: s.Key, Generation: s.Generation, Host: h}}, true
		}
	}
	return sched.Entry{}, false
}
