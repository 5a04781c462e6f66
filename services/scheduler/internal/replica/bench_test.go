package replica

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func openLeader(t testing.TB, cfg Config) *Replica {
	t.Helper()
	if cfg.Log == nil {
		cfg.Log = quiet()
	}
	r, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	select {
	case is := <-r.Leadership():
		if !is {
			t.Fatal("lost leadership at once")
		}
	case <-time.After(10 * time.Second):
		t.Fatal("no leader after 10 s")
	}
	if err := r.Barrier(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	return r
}

func key(n int) ids.SessionKey {
	return ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", fmt.Sprint("u", n), "default")
}

func openEntry(n int) core.Entry {
	return core.Entry{Now: 1, Open: &core.Open{Actor: core.Actor{Tenant: "acme", Issuer: "https://issuer", Subject: fmt.Sprint("u", n), Frontend: "web"},
		Terms:   core.Terms{Plan: "free", Template: "python", Tier: 6, Limits: core.Limits{CPUMillis: 1, MemoryBytes: 1 << 20, PIDs: 512, DiskBytes: 1 << 30}, Idle: time.Minute, Image: "berth-default:1"},
		Request: ids.NewRequestID(), Hash: make([]byte, 32), Deadline: 1 << 60, Keys: []ids.SessionKey{key(n)}, Candidates: []core.Candidate{{Host: "h1"}}}}
}

// BenchmarkApply reports the time of one apply and the rate with many callers.
func BenchmarkApply(b *testing.B) {
	for _, callers := range []int{1, 8, 64, 256} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			r := openLeader(b, Config{Dir: b.TempDir()})
			if _, err := r.Apply(context.Background(), core.Entry{Now: 1, Join: &core.Host{ID: "h1", Boot: "b", Tiers: []corev1.Tier{6}, Capacity: core.Limits{CPUMillis: 1 << 30, MemoryBytes: 1 << 50}}}); err != nil {
				b.Fatal(err)
			}
			var mu sync.Mutex
			var took []time.Duration
			next := make(chan int)
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					for n := range next {
						start := time.Now()
						out, err := r.Apply(context.Background(), openEntry(n))
						if err == nil && n%1000 == 0 {
							_, err = r.Apply(context.Background(), core.Entry{Now: 1, Trim: &core.Trim{Upto: 1 << 40}})
						}
						if err != nil || out.Refused != nil {
							b.Error(err, out.Refused)
						}
						d := time.Since(start)
						mu.Lock()
						took = append(took, d)
						mu.Unlock()
					}
				})
			}
			b.ResetTimer()
			for n := range b.N {
				next <- n
			}
			close(next)
			wg.Wait()
			b.StopTimer()
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "applies/s")
		})
	}
}
