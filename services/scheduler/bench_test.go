package scheduler

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// BenchmarkOpen opens new sessions on a fake host: two commits, one call to
// the host, three events each.
func BenchmarkOpen(b *testing.B) {
	for _, callers := range []int{1, 16, 64} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			w := newWorld(b, func(c *Config) { c.TrimAfter = time.Second })
			h := newFakeHost(b, w, "b1")
			h.join(b)
			h.keepLease(b)
			var mu sync.Mutex
			var took []time.Duration
			next := make(chan int)
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					for n := range next {
						start := time.Now()
						if _, err := w.open(n, "r1"); err != nil {
							b.Error(err)
						}
						mu.Lock()
						took = append(took, time.Since(start))
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
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "opens/s")
		})
	}
}
