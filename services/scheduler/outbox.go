package scheduler

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
)

const (
	outboxBatch = 512
	trimEvery   = time.Second
	ackTime     = 15 * time.Second
)

// outbox publishes the stored events, in order, beside the critical path. An
// event is trimmed once its stream took it and had time to sync it. A new
// leader publishes again what is not trimmed; the stream knows the ids.
type outbox struct {
	l    *leader
	more chan struct{}
	acks chan acked
}

type acked struct {
	seq   uint64
	at    time.Time
	since time.Time // of the first that was merged into it
}

func newOutbox(l *leader) *outbox {
	return &outbox{l: l, more: make(chan struct{}, 1), acks: make(chan acked, 1024)}
}

// signal tells that events were added; it never blocks.
func (o *outbox) signal() {
	select {
	case o.more <- struct{}{}:
	default:
	}
}

func (o *outbox) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { o.publish(ctx); return nil })
	g.Go(func() error { o.trim(ctx); return nil })
	return g.Wait()
}

func (o *outbox) publish(ctx context.Context) {
	var done uint64 // every event up to here is in its stream
	fails := 0
	for ctx.Err() == nil {
		var events []*core.Event
		var last uint64
		o.l.rep.View(func(s *core.State) { events, last = s.EventsAfter(done, outboxBatch), s.OutSeq })
		events = oneEach(events)
		o.l.m.lag(last - min(done, last))
		if len(events) == 0 {
			select {
			case <-ctx.Done():
			case <-o.more:
			}
			continue
		}
		n, err := o.send(ctx, events)
		if n > 0 {
			done, fails = events[n-1].Seq, 0
			select {
			case o.acks <- acked{seq: done, at: time.Now()}:
			case <-ctx.Done():
			}
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		o.l.log.Warn("cannot publish events; they wait", "waiting", last-done, "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(min(o.l.backoff(fails), 5*time.Second)):
		}
		fails++
	}
}

// oneEach is the first part of events in which nobody has two. A stream that
// changes its leader may lose one message of a batch and store those behind it:
// then the next event of a session would be stored before the one that is sent
// again, and consumers would drop that one as old.
func oneEach(events []*core.Event) []*core.Event {
	type who struct {
		session ids.SessionKey
		host    ids.Host
	}
	seen := make(map[who]bool, len(events))
	for i, e := range events {
		w := who{session: e.Session}
		if e.Session == "" {
			w.host = e.Host
		}
		if seen[w] {
			return events[:i]
		}
		seen[w] = true
	}
	return events
}

// send publishes a batch and returns how many, from the first on, are stored.
func (o *outbox) send(ctx context.Context, events []*core.Event) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, ackTime)
	defer cancel()
	futures := make([]bus.Future, 0, len(events))
	var err error
	for _, e := range events {
		subject, body := message(e)
		var f bus.Future
		if f, err = o.l.conn.PublishAsync(ctx, subject, body, bus.WithID(e.ID), bus.WithTime(e.At.Std())); err != nil {
			break
		}
		futures = append(futures, f)
	}
	for i, f := range futures {
		if _, ferr := f.Wait(ctx); ferr != nil {
			if !o.hopeless(events[i], ferr) {
				return i, ferr
			}
		}
	}
	if err != nil && len(futures) < len(events) && o.hopeless(events[len(futures)], err) {
		return len(futures) + 1, nil
	}
	return len(futures), err
}

// hopeless tells of an event that no stream will ever take; it must not hold
// up the others.
func (o *outbox) hopeless(e *core.Event, err error) bool {
	if !errs.Is(err, errkind.TooLarge) && !errs.Is(err, errkind.Invalid) {
		return false
	}
	o.l.log.Error("an event can never be published", "id", e.ID, "kind", e.Kind, "error", err)
	return true
}

// trim removes events whose stream has had time to sync them.
func (o *outbox) trim(ctx context.Context) {
	var queue []acked
	t := time.NewTicker(trimEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case a := <-o.acks:
			if n := len(queue); n > 0 && a.at.Sub(queue[n-1].since) < trimEvery/4 {
				queue[n-1].seq, queue[n-1].at = a.seq, a.at // keeps the queue short
				continue
			}
			a.since = a.at
			queue = append(queue, a)
		case <-t.C:
			queue = o.trimReady(ctx, queue)
		}
	}
}

func (o *outbox) trimReady(ctx context.Context, queue []acked) []acked {
	n := 0
	for n < len(queue) && time.Since(queue[n].at) >= o.l.cfg.TrimAfter {
		n++
	}
	if n == 0 {
		return queue
	}
	if _, err := o.l.apply(ctx, core.Entry{Trim: &core.Trim{Upto: queue[n-1].seq}}); err != nil {
		if ctx.Err() == nil {
			o.l.log.Warn("cannot trim the outbox", "error", err)
		}
		return queue
	}
	return queue[n:]
}

// message is an event as the bus has it.
func message(e *core.Event) (string, proto.Message) {
	if e.Session == "" {
		return subjects.HostEvent(e.Host, string(e.Kind)), &schedulerv1.HostEvent{Host: e.Host.String(), Boot: e.Boot,
			At: protoTime(e.At), What: string(e.Kind), Tiers: e.Tiers, Capacity: protoLimits(e.Capacity), Reason: e.Reason}
	}
	out := &schedulerv1.Event{
		Session:  protoRef(e.Tenant, core.Ref{Session: e.Session, Generation: e.Generation, Epoch: e.Epoch}),
		Revision: e.Revision, At: protoTime(e.At), State: e.State,
	}
	detail(e, out)
	return subjects.Session(e.Tenant, e.Session, string(e.Kind)), out
}

func detail(e *core.Event, out *schedulerv1.Event) {
	terms := core.Terms{}
	if e.Terms != nil {
		terms = *e.Terms
	}
	host, req := e.Host.String(), e.Request.String()
	switch e.Kind {
	case core.Admitted:
		d := &schedulerv1.Admitted{Terms: protoTerms(terms), RequestId: req, Cause: e.Cause, SessionName: e.Name,
			TierDecision: protoDecision(e.Decision)}
		if e.Actor != nil {
			d.Actor = protoActor(*e.Actor)
		}
		out.Detail = &schedulerv1.Event_Admitted{Admitted: d}
	case core.Placed:
		out.Detail = &schedulerv1.Event_Placed{Placed: &schedulerv1.Placed{Host: host, Reason: e.Reason,
			Plan: protoPlan(e.Plan), RequestId: req}}
	case core.Activated:
		out.Detail = &schedulerv1.Event_Active{Active: &schedulerv1.Active{Host: host, Origin: e.Origin, RestoredAsOf: protoTime(e.RestoredAsOf),
			Timing: protoTiming(e.Timing), Idle: protoDuration(terms.Idle), Terms: protoTerms(terms), RequestId: req,
			Cause: e.Cause, FromHost: e.From.String()}}
	case core.Renewed:
		out.Detail = &schedulerv1.Event_Renewed{Renewed: &schedulerv1.Renewed{RequestId: req, Idle: protoDuration(terms.Idle)}}
	case core.FellAsleep:
		out.Detail = &schedulerv1.Event_Asleep{Asleep: &schedulerv1.Asleep{Manifest: e.Manifest, Host: host, Reason: e.Reason,
			Retention: protoDuration(terms.Retention), Timing: protoTiming(e.Timing)}}
	case core.Displaced:
		out.Detail = &schedulerv1.Event_Displaced{Displaced: &schedulerv1.Displaced{Host: host, Reason: e.Reason, Handoff: e.Handoff}}
	case core.HasFailed:
		out.Detail = &schedulerv1.Event_Failed{Failed: &schedulerv1.Failed{Failure: protoFailure(e.Failure)}}
	case core.WasPaused:
		out.Detail = &schedulerv1.Event_Paused{Paused: &schedulerv1.Paused{Reason: e.Reason}}
	case core.Unplaceable:
		out.Detail = &schedulerv1.Event_Unplaceable{Unplaceable: &schedulerv1.Unplaceable{Reason: e.Reason, RetryUntil: protoTime(e.RetryUntil)}}
	case core.WasDeleted:
		out.Detail = &schedulerv1.Event_Deleted{Deleted: &schedulerv1.Deleted{RequestId: req, Reason: e.Reason}}
	case core.WasErased:
		d := &schedulerv1.Erased{}
		for _, h := range e.Hosts {
			d.Hosts = append(d.Hosts, h.String())
		}
		out.Detail = &schedulerv1.Event_Erased{Erased: d}
	case core.WasRewound:
		out.Detail = &schedulerv1.Event_Rewound{Rewound: &schedulerv1.Rewound{Snapshot: e.Snapshot, AsOf: protoTime(e.RestoredAsOf), Head: e.Manifest}}
	}
}
