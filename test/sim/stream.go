package sim

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// stream keeps events and timers, as JetStream does: what it took it has, and it knows the ids of what
// it took. It may be away for a while.
type stream struct {
	w      *World
	p      *proc
	events []*sched.Event
	ids    map[string]bool
	more   signal
	last   map[ids.SessionKey]uint64 // newest revision of each session
	timers map[timerKey]*timer
	asked  []*durable // requests that came by the durable door
	queued signal
	early  bool // timers of retention fire before their time
}

func newStream(w *World) *stream {
	s := &stream{w: w, ids: map[string]bool{}, last: map[ids.SessionKey]uint64{}, timers: map[timerKey]*timer{}}
	s.p = w.proc("stream", "stream")
	w.services["stream"] = []*proc{s.p}
	s.p.begin = func() { s.p.serve["publish"] = s.publish }
	return s
}

// publish stores a batch in order, all of it or a first part.
func (s *stream) publish(_ *task, _ *ctx, _ ids.Host, req any) (any, error) {
	batch := req.([]*sched.Event)
	n := len(batch)
	if s.w.chance(s.w.net.drop) {
		n = s.w.rng.IntN(n + 1)
	}
	for _, e := range batch[:n] {
		s.store(e)
	}
	if n < len(batch) {
		return nil, fail(errkind.Unavailable, "the stream has no leader")
	}
	return n, nil
}

func (s *stream) store(e *sched.Event) {
	if s.ids[e.ID] {
		s.w.cov.hit("event published again")
		return
	}
	s.ids[e.ID] = true
	s.events = append(s.events, e)
	s.more.fire(s.w)
	s.w.say("event %s %s rev %d %s %s", e.Kind, short(e.Session), e.Revision, e.Host, e.Reason)
	switch e.Kind {
	case sched.HostDrained:
		s.w.cov.hit("host drained")
	case sched.WasErased:
		s.w.cov.hit("generation erased")
		return // its revision was kept free: it comes when it comes
	case sched.Unplaceable:
		s.w.cov.hit("unplaceable")
	}
	if e.Session == "" {
		return
	}
	if last := s.last[e.Session]; e.Revision <= last {
		s.w.breaks("outbox-order", "session %s: event %s of revision %d was published after revision %d", short(e.Session), e.Kind, e.Revision, last)
	}
	s.last[e.Session] = e.Revision
}

// publish sends what is in the outbox, in order.
func (l *leader) publish(t *task) {
	var done uint64
	for fails := 0; !l.over; {
		l.more.take()
		events := l.st().EventsAfter(done, 64)
		if l.w.opt.Mutation == OutboxSkips && len(events) > 2 {
			events = events[1:]
		}
		if len(events) == 0 {
			t.wait(l.c, -1, &l.more)
			continue
		}
		if _, err := t.call(l.w.within(l.c, 5*time.Second), "stream", "publish", events); err != nil {
			if t.sleep(l.c, min(l.backoff(fails), 5*time.Second)) != nil {
				return
			}
			fails++
			continue
		}
		done, fails = events[len(events)-1].Seq, 0
		upto := done
		l.w.after(trimAfter, func() {
			if !l.over && l.r.p.up {
				l.trims = max(l.trims, upto)
				l.trimming.fire(l.w)
			}
		})
	}
}

// trim removes events that their stream had time to sync.
func (l *leader) trim(t *task) {
	for done := uint64(0); !l.over; {
		t.wait(l.c, -1, &l.trimming)
		l.trimming.take()
		if upto := l.trims; upto > done && !l.over {
			if _, err := l.apply(t, l.c, sched.Entry{Trim: &sched.Trim{Upto: upto}}); err == nil {
				done = upto
			}
		}
		if t.sleep(l.c, time.Second) != nil {
			return
		}
	}
}
