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
	seq    uint64
}

func newQueue(l *leader) *queue {
	return &queue{l: l, moving: map[ids.SessionKey]bool{}, seen: map[ids.SessionKey]uint64{}}
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
			_, _ = q.l.apply(t, q.l.c, sched.Entry{Place: &sched.Place{Session: s.Key, Generation: s.Generation,
				Candidates: q.l.candidates([]ids.SessionKey{s.Key}, s.Wake.Terms)}})
		}
	}
	return lookAgain
}

// drain empties a host, modelled on decision D10: what sleeps and is saved moves at once, what sleeps
// and is not saved is saved first, what is awake sleeps at its next idle moment or at the deadline.
func (l *leader) drain(h ids.Host) {
	if l.drains[h] != nil {
		l.drains[h].fire(l.w)
		return
	}
	poke := &signal{}
	l.drains[h] = poke
	l.w.spawn(l.r.p, "drain", func(t *task) {
		defer delete(l.drains, h)
		for !l.over {
			rec := l.st().Host(h)
			if rec == nil || !rec.Draining || rec.Drained {
				return
			}
			poke.take()
			l.drainPass(t, rec)
			t.wait(l.c, time.Second, poke)
			t.wait(l.c, 100*time.Millisecond)
		}
	})
}

func (l *leader) drainPass(t *task, rec *sched.Host) {
	jobs := 0
	for _, s := range l.st().OnHost(rec.ID) {
		if s.Host == rec.ID && s.State == sched.Sleeping {
			jobs++
		}
	}
	for _, s := range l.st().OnHost(rec.ID) {
		if l.over || s.Host != rec.ID && s.Newest != rec.ID {
			continue
		}
		e, busy := l.drainStep(rec, s)
		if busy && jobs >= drainJobs {
			continue
		}
		if e == nil {
			continue
		}
		if busy {
			jobs++
		}
		if out, err := l.apply(t, l.c, *e); err == nil && out.Refused == nil {
			l.w.cov.hit("drain " + e.Name())
		}
	}
	if l.over || len(l.st().OnHost(rec.ID)) > 0 {
		return
	}
	// Nothing is left: the state tells it with the next entry about the host.
	_, _ = l.apply(t, l.c, sched.Entry{Drain: &sched.Drain{Host: rec.ID, On: true, Deadline: rec.DrainDeadline}})
}

// drainStep is what one session of a draining host needs next; busy says that it is work for the host.
func (l *leader) drainStep(rec *sched.Host, s *sched.Session) (e *sched.Entry, busy bool) {
	now := l.r.p.wall()
	switch {
	case s.Wake != nil:
		return nil, false
	case s.State == sched.Active:
		cmd := &sched.SleepCmd{Tenant: s.Tenant, Keys: []ids.SessionKey{s.Key}, Generation: s.Generation, Epoch: s.Epoch, Reason: sched.ReasonDrain}
		if rec.DrainDeadline != 0 && rec.DrainDeadline.Std().Before(now) {
			cmd.Force = true
		} else {
			cmd.IdleSince = sched.At(now.Add(-5 * time.Second))
		}
		return &sched.Entry{Sleep: cmd}, true
	case s.Dirty && s.Newest == rec.ID && (s.State == sched.Asleep || s.State == sched.Paused):
		if !l.alive(rec.ID) {
			return nil, false
		}
		return &sched.Entry{Save: &sched.Save{Ref: refOf(s), Host: rec.ID}}, true
	case s.Host == rec.ID && (s.State == sched.Asleep || s.State == sched.Paused || s.State == sched.Failed):
		return &sched.Entry{Move: &sched.Move{Session: s.Key, Generation: s.Generation, Host: rec.ID}}, false
	}
	return nil, false
}
