//go:build linux && amd64

package microvm

import (
	"testing"
	"time"
)

// TestTheCounterIsMeasured: a machine whose clock runs at another rate than the host's.
func TestTheCounterIsMeasured(t *testing.T) {
	rate := tscKHz()
	if rate < 100_000 || rate > 10_000_000 {
		t.Fatalf("the counter has %d kHz", rate)
	}
	began, first := time.Now(), rdtsc()
	for time.Since(began) < 300*time.Millisecond {
	}
	last, took := rdtsc(), time.Since(began)
	counted := time.Duration((last - first) * uint64(time.Millisecond) / rate)
	if off := (took - counted).Abs(); off > 3*time.Millisecond {
		t.Errorf("in %s a machine counts %s at %d kHz", took, counted, rate)
	}
}
