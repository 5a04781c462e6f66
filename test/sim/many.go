package sim

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// Total is what many simulations came to.
type Total struct {
	Seeds   int
	Steps   int
	Virtual time.Duration
	Hits    Coverage
	Broken  []Result // in order of their seeds, at most maxBroken
}

// maxBroken ends a run: one defect breaks many seeds.
const maxBroken = 10

// Many plays n seeds from first on, so many at a time, and reports what broke.
func Many(first uint64, n, workers int, opt Options, out io.Writer) Total {
	total := Total{Hits: Coverage{}}
	var mu sync.Mutex
	var work sync.WaitGroup
	next := first
	for range workers {
		work.Go(func() {
			for {
				mu.Lock()
				seed := next
				stop := seed >= first+uint64(n) || len(total.Broken) >= maxBroken
				next++
				mu.Unlock()
				if stop {
					return
				}
				r := Run(seed, opt)
				mu.Lock()
				total.Seeds++
				total.Steps += r.Steps
				total.Virtual += r.Virtual
				total.Hits.Add(r.Hits)
				if r.Broken != nil {
					total.Broken = append(total.Broken, r)
				}
				mu.Unlock()
			}
		})
	}
	work.Wait()
	slices.SortFunc(total.Broken, func(a, b Result) int { return int(int64(a.Seed) - int64(b.Seed)) })
	for i, r := range total.Broken {
		if i == 0 {
			r.Report(out)
		} else {
			_, _ = fmt.Fprintf(out, "seed %d: %v\n", r.Seed, r.Broken)
		}
	}
	return total
}

// Report says what broke, and how to see it again.
func (r Result) Report(out io.Writer) {
	_, _ = fmt.Fprintf(out, "seed %d: %v\nthe newest %d lines of the trace (microseconds):\n", r.Seed, r.Broken, len(r.Tail))
	for _, l := range r.Tail {
		_, _ = io.WriteString(out, "  "+l)
	}
	_, _ = fmt.Fprintf(out, "play it again: go test ./test/sim -run Sim -seed %d -v\n", r.Seed)
}
