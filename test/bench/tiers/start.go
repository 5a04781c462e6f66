package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/test/bench/first"
)

const (
	startRounds = 7
	atOnce      = 20
)

// start alternates a new session with the floor of the tier. The first open of a tier on a host finds
// nothing ready (no template of a machine, no compiled module) and is a figure of its own.
func (b *bench) start(ctx context.Context, t tier) error {
	o := b.ask(t, "first-"+t.name)
	earliest, s, err := first.Output(ctx, b.client, o, t.hello()...)
	if err != nil {
		return err
	}
	if err := s.Delete(ctx); err != nil {
		return err
	}
	var took, floor []time.Duration
	for range startRounds {
		b.opened++
		one, s, err := first.Output(ctx, b.client, b.ask(t, fmt.Sprintf("start%d", b.opened)), t.hello()...)
		if err != nil {
			return err
		}
		took = append(took, one)
		if err := s.Delete(ctx); err != nil {
			return err
		}
		plain, err := b.floorStart(ctx, t)
		if err != nil {
			return err
		}
		floor = append(floor, plain)
	}
	p, f := figures.Quantile(took, 0.5), figures.Quantile(floor, 0.5)
	b.set.Add(figures.Result{Name: t.name + ", first open on the host to first output", Value: ms(earliest), Unit: "ms", Floor: f, FloorOf: floorOf(t)}, figures.None)
	b.set.Add(figures.Result{Name: t.name + ", open of a new session to first output, p50", Value: p, Unit: "ms", Floor: f, FloorOf: floorOf(t)}, figures.None)
	return nil
}

// floorStart is what the tier's runtime costs without Berth.
func (b *bench) floorStart(ctx context.Context, t tier) (time.Duration, error) {
	switch t.name {
	case "microvm":
		return b.bareBoot(ctx)
	case "wasm":
		return b.plain.FirstOutput(ctx, "container")
	}
	return b.plain.FirstOutput(ctx, t.name)
}

func floorOf(t tier) string {
	switch t.name {
	case "microvm":
		return "bare QEMU, the same kernel and agent, process start to the agent's first word"
	case "wasm":
		return "ctr run of echo in tier container (a peer)"
	}
	return "ctr run of the same image and runtime, process start to first byte"
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// many opens sessions at once; all must have printed something.
func (b *bench) many(ctx context.Context, t tier) error {
	took := make([]time.Duration, atOnce)
	var mu sync.Mutex
	var sessions []*sdk.Session
	began := time.Now()
	err := first.Together(atOnce, func(i int) error {
		d, s, err := first.Output(ctx, b.client, b.ask(t, fmt.Sprintf("many-%s-%d", t.name, i)), t.hello()...)
		took[i] = d
		if s != nil {
			mu.Lock()
			sessions = append(sessions, s)
			mu.Unlock()
		}
		return err
	})
	all := time.Since(began)
	for _, s := range sessions {
		if derr := s.Delete(ctx); derr != nil && err == nil {
			err = derr
		}
	}
	if err != nil {
		return err
	}
	began = time.Now()
	for range atOnce {
		if _, err := b.floorStart(ctx, t); err != nil {
			return err
		}
	}
	floor := time.Since(began)
	b.set.Add(figures.Result{Name: fmt.Sprintf("%s, %d opens at once, all to first output", t.name, atOnce), Value: ms(all), Unit: "ms", Floor: ms(floor),
		FloorOf: fmt.Sprintf("%d times, one after the other: %s", atOnce, floorOf(t))}, figures.None)
	b.set.Add(figures.Result{Name: fmt.Sprintf("%s, %d opens at once, p50", t.name, atOnce), Value: figures.Quantile(took, 0.5), Unit: "ms", Floor: ms(all),
		FloorOf: "the last of them"}, figures.None)
	return nil
}
