package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/tools/berth/upproc"
)

const (
	latencyRounds = 300
	warmRounds    = 50
	payload       = 1024 // bytes of a sealed request, about
	openers       = 24
)

// control measures requests with the null driver: every service, raft and
// stream write of the real path, no sandbox.
func (b *bench) control(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	up, err := upproc.Start(ctx, upproc.Options{Bin: b.bin, Dir: dir, Args: []string{"--driver", "null", "--idle", "1h"}})
	if err != nil {
		return err
	}
	defer up.Kill() // the null driver leaves nothing, and putting thousands to sleep is not measured
	client, err := up.Connect(ctx, "acme", "bench")
	if err != nil {
		return err
	}
	defer client.Close()
	if err := b.latency(ctx, client); err != nil {
		return err
	}
	return b.throughput(ctx, up, client)
}

// latency of each door for new sessions, alternating with the floor so that
// all three see the same machine.
func (b *bench) latency(ctx context.Context, client *sdk.Client) error {
	note("request to ready, %d opens through each door", latencyRounds)
	direct, err := opens(ctx, client, "d", false)
	if err != nil {
		return err
	}
	floor, err := hopFloor(ctx, payload, latencyRounds)
	if err != nil {
		return err
	}
	durable, err := opens(ctx, client, "q", true)
	if err != nil {
		return err
	}
	const floorOf = "five JetStream hops of 1 KiB, one server, in process, async writes"
	for _, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.50}, {"p99", 0.99}} {
		aimDirect, aimDurable := figures.None, figures.None
		if q.q == 0.50 {
			aimDirect, aimDurable = figures.AtMost(5, "ms"), figures.AtMost(8, "ms")
		}
		f := figures.Quantile(floor, q.q)
		b.set.Add(figures.Result{Name: "control plane, direct door, " + q.name, Value: figures.Quantile(direct, q.q), Unit: "ms", Floor: f, FloorOf: floorOf}, aimDirect)
		b.set.Add(figures.Result{Name: "control plane, durable door, " + q.name, Value: figures.Quantile(durable, q.q), Unit: "ms", Floor: f, FloorOf: floorOf}, aimDurable)
	}
	return nil
}

func opens(ctx context.Context, client *sdk.Client, prefix string, durable bool) (took []time.Duration, err error) {
	for i := range warmRounds + latencyRounds {
		began := time.Now()
		s, err := client.Open(ctx, sdk.OpenOptions{Name: fmt.Sprintf("%s%d", prefix, i), ViaQueue: durable})
		if err != nil {
			return nil, err
		}
		if i >= warmRounds {
			took = append(took, time.Since(began))
		}
		s.Detach()
	}
	return took, nil
}

// throughput opens new sessions as fast as it can and follows the events: the
// outbox keeps up when the distance between opens and their events stays flat.
func (b *bench) throughput(ctx context.Context, up *upproc.Process, client *sdk.Client) error {
	note("opens a second over %s with %d openers", b.load, openers)
	operator, err := sdk.Connect(ctx, sdk.Config{ClientFile: up.ClientFile("operator")})
	if err != nil {
		return err
	}
	defer operator.Close()
	run, cancel := context.WithTimeout(ctx, b.load)
	defer cancel()
	events, err := operator.Events(run, sdk.EventFilter{Event: "active"})
	if err != nil {
		return err
	}
	var opened, told, failed atomic.Int64
	var firstErr atomic.Pointer[error]
	var wg sync.WaitGroup
	wg.Go(func() {
		for _, err := range events {
			if err == nil {
				told.Add(1)
			}
		}
	})
	for w := range openers {
		wg.Go(func() {
			for i := 0; run.Err() == nil; i++ {
				s, err := client.Open(run, sdk.OpenOptions{Name: fmt.Sprintf("t%d-%d", w, i)})
				if err != nil {
					if run.Err() == nil {
						failed.Add(1)
						firstErr.CompareAndSwap(nil, &err)
					}
					continue
				}
				opened.Add(1)
				s.Detach()
			}
		})
	}
	lag := sample(run, func() int64 { return opened.Load() - told.Load() })
	wg.Wait()
	if e := firstErr.Load(); e != nil {
		note("%d opens failed, the first: %v", failed.Load(), *e)
	}
	b.throughputFigures(opened.Load(), failed.Load(), lag)
	return nil
}

// sample reads f every second.
func sample(ctx context.Context, f func() int64) (out []int64) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return out
		case <-tick.C:
			out = append(out, f())
		}
	}
}

// throughputFigures counts the rate only while the lag is flat: the mean of
// the last third is at most what two seconds of opens add to the first third.
func (b *bench) throughputFigures(opened, failed int64, lag []int64) {
	rate := float64(opened) / b.load.Seconds()
	third := max(1, len(lag)/3)
	mean := func(v []int64) (m float64) {
		for _, x := range v {
			m += float64(x) / float64(len(v))
		}
		return m
	}
	if len(lag) < 3 {
		lag = append(lag, 0, 0, 0)
	}
	growth := mean(lag[len(lag)-third:]) - mean(lag[:third])
	flat := growth <= 2*rate && failed == 0
	b.set.Add(figures.Result{Name: "control plane, opens a second", Value: rate, Unit: "1/s"}, figures.Aim{
		Text: "at least 500 1/s, outbox lag flat, none failed",
		Met:  func(r figures.Result) bool { return r.Value >= 500 && flat }})
	b.set.Add(figures.Result{Name: "control plane, growth of the outbox lag", Value: growth, Unit: "events",
		Floor: rate, FloorOf: "opens in one second"}, figures.Aim{Text: "at most 2 s of opens", Met: func(figures.Result) bool { return growth <= 2*rate }})
}
