package agent

import (
	"os"
	"testing"
)

// TestSpareThreadsAreThere: the agent has the threads for blocking calls before a fork bomb can use up the
// limit of processes.
func TestSpareThreadsAreThere(t *testing.T) {
	spareThreads(spares)
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	if len(threads) < spares+1 {
		t.Errorf("%d threads, want at least %d", len(threads), spares+1)
	}
}
