package hostile

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"testing"
)

// counts of rows by tier, and why a tier did not run. Make hostile shows what TestMain prints of them.
var counts = struct {
	sync.Mutex
	held, failed map[string]int
	missing      map[string]string
}{held: map[string]int{}, failed: map[string]int{}, missing: map[string]string{}}

// counted counts the row that t is.
func counted(t *testing.T, tier string) {
	t.Cleanup(func() {
		counts.Lock()
		defer counts.Unlock()
		switch {
		case t.Failed():
			counts.failed[tier]++
		case !t.Skipped():
			counts.held[tier]++
		}
	})
}

// notRun skips a tier with its reason.
func notRun(t *testing.T, tier, why string) {
	t.Helper()
	counts.Lock()
	counts.missing[tier] = why
	counts.Unlock()
	t.Skipf("NOT RUN: tier %s: %s", tier, why)
}

func TestMain(m *testing.M) {
	code := m.Run()
	all := 0
	for _, tier := range append(slices.Clone(tiers), wasmTier) {
		if n := counts.held[tier] + counts.failed[tier]; n > 0 {
			fmt.Printf("ROWS tier %s: %d ran, %d held, %d failed\n", tier, n, counts.held[tier], counts.failed[tier])
			all += n
		}
	}
	for _, tier := range slices.Sorted(maps.Keys(counts.missing)) {
		fmt.Printf("NOT RUN tier %s: %s\n", tier, counts.missing[tier])
	}
	if all > 0 {
		fmt.Printf("ROWS in all: %d ran; the tables have %d, each for every tier that offers it\n", all, len(unique()))
	}
	os.Exit(code)
}
