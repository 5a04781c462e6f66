package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/tools/berth/cluster/control"
)

// failover kills the scheduler's leader, then NATS servers, and looks how long
// the next open takes: the null driver makes its sandbox, so that what is seen
// is the control plane.
func (b *bench) failover(ctx context.Context) error {
	note("starting a cluster (null driver)")
	c, err := b.start(ctx, "--driver", "null")
	if err != nil {
		return err
	}
	defer c.stop()
	if err := c.whole(ctx); err != nil {
		return err
	}
	if err := b.leaders(ctx, c); err != nil {
		return err
	}
	return b.servers(ctx, c)
}

// leaders kills the leading scheduler and opens at once.
func (b *bench) leaders(ctx context.Context, c *cell) error {
	note("killing the scheduler's leader, %d times", b.rounds)
	var took, elected, transferred []time.Duration
	for i := range b.rounds {
		leader, err := c.leader(ctx)
		if err != nil {
			return err
		}
		began := time.Now()
		if err := c.act(ctx, control.Kill, leader); err != nil {
			return err
		}
		var wg sync.WaitGroup
		var open, answer time.Duration
		var openErr, answerErr error
		wg.Go(func() { open, openErr = c.opened(ctx, fmt.Sprintf("l%d", i), false, began) })
		wg.Go(func() {
			answerErr = until(ctx, "a scheduler answers", func() (bool, error) {
				probe, cancel := context.WithTimeout(ctx, probeTime)
				defer cancel()
				_, err := c.leader(probe)
				return err == nil, err
			})
			answer = time.Since(began)
		})
		wg.Wait()
		if openErr != nil || answerErr != nil {
			return fmt.Errorf("after the leader %s was killed: open: %w, peers: %w", leader, openErr, answerErr)
		}
		took, elected = append(took, open), append(elected, answer)
		if err := c.whole(ctx); err != nil {
			return err
		}
		if transferred, err = b.transfer(ctx, c, i, transferred); err != nil {
			return err
		}
	}
	floor := figures.Quantile(elected, 0.5)
	const of = "kill to the first answer of a new leader to an empty question"
	b.set.Add(figures.Result{Name: "leader killed: next open served, p50", Value: figures.Quantile(took, 0.5), Unit: "ms", Floor: floor, FloorOf: of}, figures.AtMost(1500, "ms"))
	b.set.Add(figures.Result{Name: "leader killed: next open served, worst", Value: ms(slices.Max(took)), Unit: "ms", Floor: ms(slices.Max(elected)), FloorOf: of}, figures.AtMost(1500, "ms"))
	b.set.Add(figures.Result{Name: "leader stopped in order: next open served, p50", Value: figures.Quantile(transferred, 0.5), Unit: "ms"}, figures.None)
	return nil
}

// transfer hands leadership over in order, and opens at once.
func (b *bench) transfer(ctx context.Context, c *cell, i int, took []time.Duration) ([]time.Duration, error) {
	began := time.Now()
	if err := c.berth(ctx, "scheduler", "transfer"); err != nil {
		return took, err
	}
	told := time.Since(began) // the program starts, asks and is answered
	d, err := c.opened(ctx, fmt.Sprintf("t%d", i), false, began)
	return append(took, max(d-told, 0)), err
}

// opened opens a new session and returns the time since began.
func (c *cell) opened(ctx context.Context, name string, durable bool, began time.Time) (time.Duration, error) {
	s, err := c.client.Open(ctx, sdk.OpenOptions{Name: name, ViaQueue: durable})
	if err != nil {
		return 0, err
	}
	s.Detach()
	return time.Since(began), nil
}

// servers kills each NATS server in turn and opens by both doors at once, beside what the bus itself needs.
func (b *bench) servers(ctx context.Context, c *cell) error {
	note("killing a NATS server, %d times", b.rounds)
	var direct, durable, core, stored []time.Duration
	for i := range b.rounds {
		began := time.Now()
		if err := c.act(ctx, control.Kill, fmt.Sprintf("nats-%d", i%3+1)); err != nil {
			return err
		}
		var wg sync.WaitGroup
		got, errs := [4]time.Duration{}, [4]error{}
		wg.Go(func() { got[0], errs[0] = c.opened(ctx, fmt.Sprintf("n%d", i), false, began) })
		wg.Go(func() { got[1], errs[1] = c.opened(ctx, fmt.Sprintf("q%d", i), true, began) })
		wg.Go(func() { got[2], errs[2] = c.answered(ctx, began) })
		wg.Go(func() { got[3], errs[3] = c.acked(ctx, began) })
		wg.Wait()
		for k, err := range errs {
			if err != nil {
				return fmt.Errorf("after a NATS server was killed, %s: %w", [4]string{"direct door", "durable door", "request", "publish"}[k], err)
			}
		}
		direct, durable, core, stored = append(direct, got[0]), append(durable, got[1]), append(core, got[2]), append(stored, got[3])
		if err := c.whole(ctx); err != nil {
			return err
		}
	}
	for _, q := range []struct {
		name string
		of   func([]time.Duration) float64
	}{{"p50", func(d []time.Duration) float64 { return figures.Quantile(d, 0.5) }}, {"worst", func(d []time.Duration) float64 { return ms(slices.Max(d)) }}} {
		b.set.Add(figures.Result{Name: "NATS server killed: next open served, direct door, " + q.name, Value: q.of(direct), Unit: "ms", Floor: q.of(core),
			FloorOf: "kill to the first answer of identity to an empty question"}, figures.AtMost(2000, "ms"))
		b.set.Add(figures.Result{Name: "NATS server killed: next open served, durable door, " + q.name, Value: q.of(durable), Unit: "ms", Floor: q.of(stored),
			FloorOf: "kill to the first acknowledged publish to the same stream (the bus's own)"}, figures.None)
	}
	return nil
}

const probeTime = 250 * time.Millisecond

// answered is the time until identity answers a plain question.
func (c *cell) answered(ctx context.Context, began time.Time) (time.Duration, error) {
	err := until(ctx, "identity answers", func() (bool, error) {
		rctx, cancel := context.WithTimeout(ctx, probeTime)
		defer cancel()
		_, err := c.client.NATS().RequestWithContext(rctx, "berth.v1.rpc.identity.keys.acme.web", nil)
		return err == nil, err
	})
	return time.Since(began), err
}

// acked is the time until the stream of requests takes a message: one that is no request, so that it
// is refused and gone.
func (c *cell) acked(ctx context.Context, began time.Time) (time.Duration, error) {
	err := until(ctx, "the stream takes a message", func() (bool, error) {
		rctx, cancel := context.WithTimeout(ctx, probeTime)
		defer cancel()
		_, err := c.client.NATS().RequestWithContext(rctx, "berth.v1.request.acme.web.open", []byte("{}"))
		return err == nil, err
	})
	return time.Since(began), err
}
