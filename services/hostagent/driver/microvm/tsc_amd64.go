//go:build linux

package microvm

import (
	"sync"
	"time"
)

func rdtsc() uint64

// tscKHz measures the rate of the processor's time stamp counter, which an emulated machine has too
// and cannot find out by itself.
var tscKHz = sync.OnceValue(func() uint64 {
	// What the measure is off by, a machine's clock is off by for as long as it lives.
	const span = 50 * time.Millisecond
	best := uint64(0)
	for range 6 {
		began, first := time.Now(), rdtsc()
		time.Sleep(span)
		last, took := rdtsc(), time.Since(began)
		// A pause between the two readings only makes the counter look slow.
		best = max(best, (last-first)*uint64(time.Millisecond)/uint64(took))
	}
	return best
})
