package heap

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"
)

// TestALargeHeapIsCollectedAsEver: the floor is for small heaps alone.
func TestALargeHeapIsCollectedAsEver(t *testing.T) {
	for _, c := range []struct {
		live, floor uint64
		want        int
	}{
		{0, 128 << 20, 1000}, {1 << 20, 128 << 20, 1000}, {32 << 20, 128 << 20, 400}, {128 << 20, 128 << 20, 100},
		{4 << 30, 128 << 20, 100}, {1 << 20, 0, 100},
	} {
		if got := percent(c.live, c.floor); got != c.want {
			t.Errorf("%d live, floor %d: %d%%, want %d%%", c.live, c.floor, got, c.want)
		}
	}
}

// TestCollectionsFollowTheHeap: the percentage falls when the heap grows, and
// rises again when it is small.
func TestCollectionsFollowTheHeap(t *testing.T) {
	t.Setenv("GOGC", "")
	was := debug.SetGCPercent(100)
	t.Cleanup(func() { debug.SetGCPercent(was) })
	Floor(32 << 20)
	for range 2 {
		await(t, mostPercent)
		kept = make([]byte, 64<<20)
		await(t, leastPercent)
		kept = nil
	}
}

var kept []byte

func await(t *testing.T, want uint64) {
	t.Helper()
	is := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	for deadline := time.Now().Add(10 * time.Second); ; runtime.GC() {
		if metrics.Read(is); is[0].Value.Uint64() == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the percentage is %d, not %d after 10 s", is[0].Value.Uint64(), want)
		}
	}
}
