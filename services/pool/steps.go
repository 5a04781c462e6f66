package pool

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

const (
	// answerWithin is how long one answer to a preparation is waited for. It may have been lost with a
	// connection, which nobody is told: then the host is asked once more, and joins what it is doing.
	answerWithin = 10 * time.Second
	// retireBatch is how many one request retires.
	retireBatch = 64
	// retireAgain is how long a host that did not retire is not asked for the same again.
	retireAgain = time.Second
)

// callHost asks a host once.
func callHost[R proto.Message](ctx context.Context, l *leader, h ids.Host, method string, req proto.Message) (R, error) {
	resp, err := bus.Call[R](ctx, l.conn, subjects.HostRPC(h, method, l.conn.Self()), req)
	if stale(err) {
		l.doubt.now()
	}
	return resp, err
}

// stale reports whether a host has heard of a later leader.
func stale(err error) bool { return errs.Is(err, errkind.StaleEpoch) }

// carryOut begins the steps of a plan as far as hosts have room for them; the next plan has the rest.
func (e *entry) carryOut(ctx context.Context, steps []core.Step) {
	goes := map[string][]ids.SandboxID{}
	why := map[string]string{}
	for _, s := range steps {
		switch s.Kind {
		case core.PrepareOne:
			e.beginPrepare(ctx, s)
		case core.RetireOne:
			e.mu.Lock()
			under := e.retiring[s.Sandbox]
			e.mu.Unlock()
			if !under && len(goes[s.Host]) < retireBatch {
				goes[s.Host], why[s.Host] = append(goes[s.Host], s.Sandbox), s.Why
			}
		}
	}
	for name, sandboxes := range goes {
		e.beginRetire(ctx, name, sandboxes, why[name])
	}
}

// beginPrepare has a host make one sandbox, unless too much is under way there.
func (e *entry) beginPrepare(ctx context.Context, s core.Step) {
	h := e.l.fleet.of(s.Host)
	if h == nil {
		return
	}
	select {
	case h.slots <- struct{}{}:
	default:
		return
	}
	id, begun := ids.NewWarmID(), time.Now()
	e.mu.Lock()
	ok := e.l.acts() && e.core.Begin(s, id, begun)
	e.mu.Unlock()
	if !ok {
		<-h.slots
		return
	}
	e.l.work.Go(func() {
		defer func() { <-h.slots }()
		o := e.prepare(ctx, h, &hostv1.PrepareRequest{Term: e.l.t.term, Warm: id.String(), Terms: e.terms, TemplateDigest: e.tpl.Digest,
			Cap: uint32(s.Cap), Deadline: timestamppb.New(begun.Add(core.PrepareLimit))}, begun)
		if ctx.Err() != nil {
			return // the next leader counts what it finds
		}
		if o.Failed != "" {
			e.l.log.Warn("a warm sandbox could not be prepared", "template", e.name, "host", s.Host, "warm", id, "reason", o.Failed)
		}
		e.mu.Lock()
		e.core.End(id, o, time.Now())
		e.grant(time.Now())
		e.mu.Unlock()
		if o.Made == nil {
			h.poke.now() // what is there now nobody knows but the host
		}
		e.poke.now()
	})
}

// prepare asks the host until it has answered or the deadline is over.
func (e *entry) prepare(ctx context.Context, h *host, req *hostv1.PrepareRequest, begun time.Time) core.Outcome {
	ctx, cancel := context.WithDeadline(ctx, begun.Add(core.PrepareLimit))
	defer cancel()
	for first := true; ; first = false {
		one, done := context.WithTimeout(ctx, answerWithin)
		reply, err := callHost[*hostv1.PrepareReply](one, e.l, h.id, "prepare", req)
		late := one.Err() != nil || errs.Is(err, errkind.Deadline) // which may come a moment before
		done()
		switch {
		case err == nil:
			made := sandbox(reply.GetWarm())
			return core.Outcome{Made: &made}
		case late && ctx.Err() == nil:
			continue
		}
		// What reached nobody was not done; what was sent before may be.
		nobody := first && errors.Is(err, nats.ErrNoResponders)
		answered := !late && (nobody || !errs.Is(err, errkind.Unavailable))
		return core.Outcome{Failed: reason(err), Unanswered: !answered}
	}
}

// reason is what went wrong, in words.
func reason(err error) string {
	if errors.Is(err, nats.ErrNoResponders) {
		return "the host's agent does not answer"
	}
	if errs.Is(err, errkind.Deadline) {
		return "the host has not done it in time"
	}
	var e *errs.Error
	for errors.As(err, &e) && e.Cause != nil {
		err = e.Cause
	}
	return err.Error()
}

// beginRetire has a host remove sandboxes that nobody has claimed.
func (e *entry) beginRetire(ctx context.Context, name string, all []ids.SandboxID, why string) {
	h := e.l.fleet.of(name)
	if h == nil || !e.l.acts() {
		return
	}
	e.mu.Lock()
	for _, id := range all {
		e.retiring[id] = true
	}
	e.mu.Unlock()
	e.l.work.Go(func() {
		gone, err := e.l.retire(ctx, h, all, why)
		if err != nil {
			sleep(ctx, retireAgain) // it may have refused at once
		}
		e.mu.Lock()
		for _, id := range all {
			delete(e.retiring, id)
		}
		if err == nil && ctx.Err() == nil {
			e.core.Retired(name, gone, time.Now())
			e.grant(time.Now())
		}
		e.mu.Unlock()
		h.poke.now()
		e.poke.now()
	})
}

// retire removes sandboxes of a host and returns those that are gone.
func (l *leader) retire(ctx context.Context, h *host, all []ids.SandboxID, why string) (gone []ids.SandboxID, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.RetireTimeout)
	defer cancel()
	req := &hostv1.RetireRequest{Term: l.t.term, Reason: why}
	for _, id := range all {
		req.Warm = append(req.Warm, id.String())
	}
	reply, err := callHost[*hostv1.RetireReply](ctx, l, h.id, "retire", req)
	if err != nil {
		l.log.Debug("warm sandboxes are not retired", "host", h.id, "error", err)
		return nil, err
	}
	for _, id := range reply.GetGone() {
		gone = append(gone, ids.SandboxID(id))
	}
	return gone, nil
}

// retireStrays removes what waits on a host and is of no pool.
func (l *leader) retireStrays(ctx context.Context, h *host, warm []core.Sandbox) {
	var strays []ids.SandboxID
	for _, w := range warm {
		if e := l.entry(w.Template); (e == nil || e.tier != w.Tier) && w.State == core.Ready && len(strays) < retireBatch {
			strays = append(strays, w.ID)
		}
	}
	if len(strays) > 0 && l.acts() {
		_, _ = l.retire(ctx, h, strays, "no pool is declared for it") // asked again with the next list
	}
}
