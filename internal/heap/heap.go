// Package heap keeps the garbage collector from running all the time in a
// program whose heap is small. It guarantees that a program takes at most the
// floor more memory than it would without, and that a heap that has grown
// beyond it is collected as ever.
package heap

import (
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// percents between which the collector is set.
const (
	leastPercent = 100
	mostPercent  = 1000
)

// Floor has the next collection begin when the heap has grown by floor bytes,
// or has doubled, whichever is later. Somebody who set GOGC knows better: then
// it does nothing.
func Floor(floor uint64) {
	if os.Getenv("GOGC") != "" {
		return
	}
	again(floor, 0)
}

// again adjusts now and after every collection, by the finalizer of something
// that each one finds unused.
func again(floor uint64, is int) {
	type sentinel struct{ _ [64]byte } // larger than what shares memory with others
	is = adjust(floor, is)
	runtime.SetFinalizer(new(sentinel), func(*sentinel) { again(floor, is) })
}

// adjust sets what the live heap asks for, unless it is so already.
func adjust(floor uint64, is int) int {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return is
	}
	want := percent(sample[0].Value.Uint64(), floor)
	if want != is {
		debug.SetGCPercent(want)
	}
	return want
}

// percent is what of a live heap is to be allocated before the next collection.
func percent(live, floor uint64) int {
	part := float64(floor) / math.Max(float64(live), 1)
	return int(math.Min(math.Max(part*100, leastPercent), mostPercent))
}
