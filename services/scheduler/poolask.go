package scheduler

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
)

// ask waits for the pool's answer to one request, nil if there is none: it was
// not given before until, or the pool answers nobody. A pool that waits for a
// sandbox to be made answers others meanwhile; when there are none it is asked
// something that it refuses at once.
func (p *pools) ask(ctx context.Context, req *poolv1.ReserveRequest, until time.Time) *poolv1.ReserveReply {
	answer, gone := make(chan *poolv1.ReserveReply), make(chan struct{})
	defer close(gone)
	go p.call(ctx, req, answer, gone)
	since, wait := time.Now(), p.times.soon/2
	for look := 0; ; look++ {
		select {
		case r := <-answer:
			return r
		case <-ctx.Done():
			return nil
		case <-time.After(min(wait, time.Until(until))):
		}
		switch {
		case !time.Now().Before(until):
			return nil
		case look > 0 && !p.answers(since):
			p.restAWhile()
			return nil
		case look > 0: // it goes on for as long as the pool does
			since, wait = time.Now(), p.times.look
		}
		if !p.answers(since) {
			p.probe()
		}
	}
}

// call asks the pool. A reservation that nobody waits for any more is given back.
func (p *pools) call(ctx context.Context, req *poolv1.ReserveRequest, answer chan<- *poolv1.ReserveReply, gone <-chan struct{}) {
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.times.most)
	defer cancel()
	defer context.AfterFunc(p.l.ctx, cancel)()
	r, err := bus.Invoke[*poolv1.ReserveReply](cctx, p.l.conn, "pool", "reserve", req)
	p.hear(err)
	if err != nil {
		r = nil
	}
	select {
	case answer <- r:
	case <-gone:
		p.release(r.GetReservation(), req)
	}
}

// probe has a pool that is there say so, unless one is under way.
func (p *pools) probe() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.probing {
		return
	}
	p.probing = true
	go func() {
		ctx, cancel := context.WithTimeout(p.l.ctx, p.times.look)
		defer cancel()
		_, err := bus.Invoke[*poolv1.ReserveReply](ctx, p.l.conn, "pool", "reserve", &poolv1.ReserveRequest{})
		p.hear(err)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.probing = false
	}()
}

// hear notes that the pool answered, if err is an answer of its own.
func (p *pools) hear(err error) {
	if err != nil {
		switch errs.Kind(err) {
		case errkind.Unavailable, errkind.Deadline, errkind.Canceled, errkind.NotLeader:
			return
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard = time.Now()
}

// answers reports whether the pool has answered anybody since a moment.
func (p *pools) answers(since time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.heard.After(since)
}

// restAWhile has nobody ask a pool that does not answer.
func (p *pools) restAWhile() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rest = time.Now().Add(poolRest)
}
