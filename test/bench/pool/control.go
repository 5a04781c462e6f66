package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/test/bench/first"
)

const (
	latencyRounds = 200
	burst         = 300
	burstRounds   = 3
	openers       = 24
	loadTime      = 20 * time.Second
	// published is the p99 that another platform gives for a burst of 3,600.
	published = 851
)

// pool of the null driver: bare records, so that what is seen is the control plane.
const nullPool = "pools:\n  - {template: default, minimum: %d, ceiling: %d, in_flight: 64, share: 1}\n"

// control measures the way of a claim without any sandbox: every service, raft and stream write.
func (b *bench) control(ctx context.Context) error {
	note("the null driver on the embedded bus")
	up, err := b.up(ctx, "--driver", "null")
	if err != nil {
		return err
	}
	defer up.kill()
	if err := b.share(ctx, up, "embedded bus", figures.AtMost(5, "ms")); err != nil {
		return err
	}
	if err := b.bursts(ctx, up); err != nil {
		return err
	}
	return b.rate(ctx, up)
}

// threeNATS measures the same with three NATS servers and three schedulers as processes of their own.
func (b *bench) threeNATS(ctx context.Context) error {
	note("the null driver on three NATS servers")
	up, err := b.up(ctx, "--driver", "null", "--hosts", "3", "--schedulers", "3", "--nats", "3")
	if err != nil {
		return err
	}
	defer up.stop()
	return b.share(ctx, up, "three NATS servers", figures.AtMost(30, "ms"))
}

// kill ends it at once: the null driver leaves nothing, and putting thousands to sleep is not measured.
func (i *installation) kill() {
	i.client.Close()
	i.Kill()
	i.stop()
}

// share measures opens without a pool, then claims.
func (b *bench) share(ctx context.Context, up *installation, bus string, aim figures.Aim) error {
	cold, err := b.opens(ctx, up, "c", 0)
	if err != nil {
		return err
	}
	warm, err := b.warmOpens(ctx, up)
	if err != nil {
		return err
	}
	for _, q := range []struct {
		name string
		q    float64
		aim  figures.Aim
	}{{"p50", 0.5, aim}, {"p99", 0.99, figures.None}} {
		b.set.Add(figures.Result{Name: "control plane's share of a warm claim, " + bus + ", " + q.name, Value: figures.Quantile(warm, q.q), Unit: "ms",
			Floor: figures.Quantile(cold, q.q), FloorOf: "an open of the same run without a pool"}, q.aim)
	}
	return nil
}

// warmOpens measures claims while the pool has more than is taken at once.
func (b *bench) warmOpens(ctx context.Context, up *installation) ([]time.Duration, error) {
	const ready = 50
	if err := up.ApplyPools(ctx, fmt.Sprintf(nullPool, ready, ready)); err != nil {
		return nil, err
	}
	if err := up.AwaitWarm(ctx, "default", ready); err != nil {
		return nil, err
	}
	return b.opens(ctx, up, "w", ready/2)
}

// opens measures new sessions one after the other; every so many of them the pool is waited for.
func (b *bench) opens(ctx context.Context, up *installation, prefix string, wait int) (took []time.Duration, err error) {
	for i := range latencyRounds {
		if wait > 0 && i%wait == 0 {
			if err := up.AwaitWarm(ctx, "default", uint32(wait)); err != nil {
				return nil, err
			}
		}
		began := time.Now()
		s, err := up.client.Open(ctx, sdk.OpenOptions{Name: fmt.Sprintf("%s%d", prefix, i)})
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(began))
		if warm := first.Claimed(s); warm != (wait > 0) {
			return nil, fmt.Errorf("open %d: warm is %v, want %v", i, warm, wait > 0)
		}
		s.Detach()
	}
	return took, nil
}

// bursts opens as many sessions in one moment as sandboxes wait.
func (b *bench) bursts(ctx context.Context, up *installation) error {
	note("%d claims at once on %d warm null sandboxes, %d times", burst, burst, burstRounds)
	if err := up.ApplyPools(ctx, fmt.Sprintf(nullPool, burst, burst)); err != nil {
		return err
	}
	var all []time.Duration
	cold := 0
	for r := range burstRounds {
		if err := up.AwaitWarm(ctx, "default", burst); err != nil {
			return err
		}
		took, claimed := make([]time.Duration, burst), make([]bool, burst)
		err := first.Together(burst, func(i int) error {
			began := time.Now()
			s, err := up.client.Open(ctx, sdk.OpenOptions{Name: fmt.Sprintf("b%d-%d", r, i)})
			if err != nil {
				return err
			}
			took[i], claimed[i] = time.Since(began), first.Claimed(s)
			s.Detach()
			return nil
		})
		if err != nil {
			return err
		}
		for _, c := range claimed {
			if !c {
				cold++
			}
		}
		all = append(all, took...)
	}
	if cold > 0 {
		note("%d of %d started cold", cold, burst*burstRounds)
	}
	b.set.Add(figures.Result{Name: fmt.Sprintf("%d claims at once, p50", burst), Value: figures.Quantile(all, 0.5), Unit: "ms"}, figures.None)
	b.set.Add(figures.Result{Name: fmt.Sprintf("%d claims at once, p99", burst), Value: figures.Quantile(all, 0.99), Unit: "ms", Floor: published,
		FloorOf: "p99 that another platform publishes for a burst of 3,600"}, figures.Aim{Text: "at most 300 ms, none cold",
		Met: func(r figures.Result) bool { return r.Value <= 300 && cold == 0 }})
	return nil
}

// rate claims as fast as it can.
func (b *bench) rate(ctx context.Context, up *installation) error {
	if err := up.ApplyPools(ctx, fmt.Sprintf(nullPool, 2000, 4000)); err != nil {
		return err
	}
	if err := up.AwaitWarm(ctx, "default", 2000); err != nil {
		return err
	}
	note("claims a second over %s with %d openers", loadTime, openers)
	run, cancel := context.WithTimeout(ctx, loadTime)
	defer cancel()
	var opened, warm, failed atomic.Int64
	var wg sync.WaitGroup
	for w := range openers {
		wg.Go(func() {
			for i := 0; run.Err() == nil; i++ {
				s, err := up.client.Open(run, sdk.OpenOptions{Name: fmt.Sprintf("t%d-%d", w, i)})
				if err != nil {
					if run.Err() == nil {
						failed.Add(1)
					}
					continue
				}
				opened.Add(1)
				if first.Claimed(s) {
					warm.Add(1)
				}
				s.Detach()
			}
		})
	}
	wg.Wait()
	rate := float64(opened.Load()) / loadTime.Seconds()
	b.set.Add(figures.Result{Name: "opens a second with a pool, null driver", Value: rate, Unit: "1/s"},
		figures.Aim{Text: "at least 1000 1/s, none failed", Met: func(r figures.Result) bool { return r.Value >= 1000 && failed.Load() == 0 }})
	b.set.Add(figures.Result{Name: "of these, claims a second", Value: float64(warm.Load()) / loadTime.Seconds(), Unit: "1/s", Floor: rate,
		FloorOf: "all opens a second"}, figures.None)
	return nil
}
