package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/test/bench/figures"
)

var connections = []int{1, 100}

// aims of large bodies.
var aims = map[string]figures.Aim{"passed through": atLeast(0.8), "intercepted with injection": atLeast(0.6)}

// throughput is that of bodies of 100 MB.
func (b *bench) throughput(ctx context.Context, w *world) error {
	for _, n := range connections {
		got, err := b.turns(ctx, w, n, "/body", func(m moved) float64 { return float64(m.bytes) / m.took.Seconds() / 1e6 })
		if err != nil {
			return err
		}
		direct := 0.0
		for i, m := range modes {
			b.add(fmt.Sprintf("bodies of 100 MB, %s", connWord(n)), m, got[i], "MB/s", &direct, aims[m.name])
		}
	}
	return nil
}

// requests are small ones on connections that stay open.
func (b *bench) requests(ctx context.Context, w *world) error {
	for _, n := range connections {
		before := w.keyed.Load()
		got, err := b.turns(ctx, w, n, "/page", func(m moved) float64 { return float64(m.requests) / m.took.Seconds() })
		if err != nil {
			return err
		}
		if w.keyed.Load() == before {
			return errors.New("no request arrived with the secret")
		}
		direct := 0.0
		for i, m := range modes {
			b.add(fmt.Sprintf("requests of 1 KiB, %s", connWord(n)), m, got[i], "1/s", &direct, figures.None)
		}
	}
	sent, waiting := w.gate.Recorded()
	b.set.Add(figures.Result{Name: "audit records on the bus so far", Value: float64(sent), Unit: "records", FloorOf: fmt.Sprintf("%d bytes wait", waiting)}, figures.None)
	return nil
}

func connWord(n int) string {
	if n == 1 {
		return "1 connection"
	}
	return fmt.Sprintf("%d connections", n)
}

// add keeps a row with what the same takes without the gate, which is measured first.
func (b *bench) add(what string, m mode, value float64, unit string, direct *float64, aim figures.Aim) {
	r := figures.Result{Name: what + ", " + m.name, Value: value, Unit: unit}
	if !m.gate {
		*direct = value
	} else {
		r.Floor, r.FloorOf = *direct, "direct"
	}
	b.set.Add(r, aim)
}

const turns = 5

// turns measures the modes in turn, several times, and returns the median of each, so that what else the
// machine does meets all of them.
func (b *bench) turns(ctx context.Context, w *world, n int, path string, rate func(moved) float64) ([]float64, error) {
	all := make([][]float64, len(modes))
	for range turns {
		for i, m := range modes {
			got, err := b.load(ctx, w, m, n, path)
			if err != nil {
				return nil, err
			}
			all[i] = append(all[i], rate(got))
		}
	}
	out := make([]float64, len(modes))
	for i := range all {
		slices.Sort(all[i])
		out[i] = all[i][turns/2]
	}
	return out, nil
}

// moved is what a load moved.
type moved struct {
	bytes, requests int64
	took            time.Duration
}

// load asks again and again on each of n connections. It counts once all are open and warm.
func (b *bench) load(ctx context.Context, w *world, m mode, n int, path string) (moved, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var (
		all             sync.WaitGroup
		bytes, requests atomic.Int64
		failed          atomic.Pointer[error]
		warm            sync.WaitGroup
	)
	warm.Add(n)
	for range n {
		all.Go(func() {
			c, buf := w.client(m, w.from), make([]byte, 256<<10)
			defer c.CloseIdleConnections()
			var none atomic.Int64
			err := get(ctx, c, w.url(m, "/page"), buf, &none)
			warm.Done()
			for err == nil {
				if err = get(ctx, c, w.url(m, path), buf, &bytes); err == nil {
					requests.Add(1)
				}
			}
			if ctx.Err() == nil {
				failed.CompareAndSwap(nil, &err)
				cancel()
			}
		})
	}
	warm.Wait()
	pause(ctx, b.window/5)
	was := moved{bytes: bytes.Load(), requests: requests.Load()}
	began := time.Now()
	pause(ctx, b.window)
	out := moved{bytes: bytes.Load() - was.bytes, requests: requests.Load() - was.requests, took: time.Since(began)}
	cancel()
	all.Wait()
	if err := failed.Load(); err != nil {
		return out, *err
	}
	return out, nil
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

const samples = 2000

// latency is that of one request at a time, on a connection that is open and on a new one.
func (b *bench) latency(ctx context.Context, w *world) error {
	var direct, fresh [2]float64
	for _, m := range modes {
		took, err := w.paced(ctx, m, samples, false)
		if err != nil {
			return err
		}
		b.quantiles("a request of 1 KiB", m, took, &direct)
	}
	for _, m := range modes {
		took, err := w.paced(ctx, m, samples/4, true)
		if err != nil {
			return err
		}
		b.quantiles("a new connection with one request", m, took, &fresh)
	}
	return nil
}

func (b *bench) quantiles(what string, m mode, took []time.Duration, direct *[2]float64) {
	for i, q := range []struct {
		name string
		at   float64
	}{{"p50", 0.5}, {"p99", 0.99}} {
		v := figures.Quantile(took, q.at)
		b.add(what+", "+q.name, m, v, "ms", &direct[i], figures.None)
		if m.gate {
			b.set.Add(figures.Result{Name: what + ", " + q.name + ", added when " + m.name, Value: v - direct[i], Unit: "ms"}, figures.None)
		}
	}
}

// paced asks one after the other.
func (w *world) paced(ctx context.Context, m mode, n int, anew bool) ([]time.Duration, error) {
	c, buf := w.client(m, w.from), make([]byte, 64<<10)
	defer c.CloseIdleConnections()
	var (
		none atomic.Int64
		out  []time.Duration
	)
	for i := range n + n/10 {
		began := time.Now()
		if err := get(ctx, c, w.url(m, "/page"), buf, &none); err != nil {
			return nil, err
		}
		if i >= n/10 {
			out = append(out, time.Since(began))
		}
		if anew {
			c.CloseIdleConnections()
		}
	}
	return out, nil
}
