package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	rounds  = 40
	sitting = 50 // connections that are open at each change
)

// policy is how long it takes from an operator's request to change a policy until the connections that it does
// not allow any more are reset at the client: by the service that owns it, the bus and the gate.
func (b *bench) policy(ctx context.Context, w *world) error {
	deny := fmt.Sprintf("  - name: no-more\n    deny: {hosts: [%s, %s]}\n", passHost, openHost)
	var all []time.Duration
	for range rounds {
		if err := w.apply(ctx, w.document("")); err != nil {
			return err
		}
		took, err := w.revoke(ctx, []byte("rules:\n"+deny))
		if err != nil {
			return err
		}
		all = append(all, took...)
	}
	for _, q := range []float64{0.5, 0.99} {
		b.set.Add(figures.Result{Name: fmt.Sprintf("policy applied by an operator -> open connection reset, %d connections, p%g", sitting, q*100), Value: figures.Quantile(all, q), Unit: "ms"},
			figures.AtMost(1000, "ms"))
	}
	return w.apply(ctx, w.document(""))
}

// revoke opens connections, half of each kind, applies a policy and returns when each of them was reset.
func (w *world) revoke(ctx context.Context, document []byte) ([]time.Duration, error) {
	var (
		mu    sync.Mutex
		ended []time.Time
		all   sync.WaitGroup
	)
	for i := range sitting {
		m := modes[1+i%2]
		c, err := w.dial(ctx, m, w.from)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		// An answer under way: a request of HTTP is open only while it is answered. Little of it waits in buffers,
		// which a client reads before it sees the reset.
		if _, err := fmt.Fprintf(c, "GET /drip HTTP/1.1\r\nHost: %s:%d\r\n\r\n", m.host, w.at.Port()); err != nil {
			return nil, err
		}
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err != nil {
			return nil, err
		}
		all.Go(func() {
			buf := make([]byte, 16<<10)
			for {
				if _, err := c.Read(buf); err != nil {
					mu.Lock()
					defer mu.Unlock()
					ended = append(ended, time.Now())
					return
				}
			}
		})
	}
	began := time.Now()
	if err := w.ask(ctx, document); err != nil {
		return nil, err
	}
	all.Wait()
	var took []time.Duration
	for _, at := range ended {
		if at.Before(began) {
			return nil, errors.New("a connection ended before the policy changed")
		}
		took = append(took, at.Sub(began))
	}
	return took, nil
}

const judged = 200_000

// rules is how long a policy of 10,000 rules thinks, beside one of two.
func (b *bench) rules(ctx context.Context, w *world) error {
	const many = 10_000 - 2
	var more strings.Builder
	for i := range many {
		fmt.Fprintf(&more, "  - {name: r%d, allow: {hosts: [h%d.example.com]}}\n", i, i)
	}
	document := w.document(more.String())
	small, err := w.judge(ctx, w.document(""), 1)
	if err != nil {
		return err
	}
	large, err := w.judge(ctx, document, many)
	if err != nil {
		return err
	}
	b.set.Add(figures.Result{Name: "a request judged by 10,000 rules", Value: large, Unit: "ns", Floor: small, FloorOf: "the same by 2 rules"}, figures.None)
	runtime.GC()
	began := time.Now()
	if err := w.apply(ctx, document); err != nil {
		return err
	}
	b.set.Add(figures.Result{Name: fmt.Sprintf("a policy of 10,000 rules (%d KiB) applied by an operator -> in force", len(document)>>10), Value: float64(time.Since(began).Microseconds()) / 1000, Unit: "ms"},
		figures.AtMost(1000, "ms"))
	return w.apply(ctx, w.document(""))
}

// judge returns the time of one judgement in nanoseconds, of names that are allowed and of others.
func (w *world) judge(ctx context.Context, document []byte, names int) (float64, error) {
	if err := w.apply(ctx, document); err != nil {
		return 0, err
	}
	hosts := []string{openHost}
	for range 999 {
		hosts = append(hosts, fmt.Sprintf("h%d.example.com", rand.IntN(2*names))) // half of them unknown
	}
	if !w.gate.Judge(openHost, w.at.Port(), "GET", "/") {
		return 0, errors.New("what is allowed was denied")
	}
	began := time.Now()
	for i := range judged {
		w.gate.Judge(hosts[i%len(hosts)], 443, "GET", "/v1/things")
	}
	return float64(time.Since(began).Nanoseconds()) / judged, nil
}
