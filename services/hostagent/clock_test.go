package hostagent

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
)

// movedClock is the machine's clock, and what a test moves it by: as much as a suspended machine was
// away.
type movedClock struct{ by atomic.Int64 }

func (c *movedClock) now() time.Duration { return watchdog.Now() + time.Duration(c.by.Load()) }

// notes are the refusals that were counted.
type notes struct {
	mu  sync.Mutex
	all []string
}

func (n *notes) add(what, place string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, what+" "+place)
}

func (n *notes) have(what, place string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Contains(n.all, what+" "+place)
}

func (n *notes) clear() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = nil
}

// suspend is what a host sees that was suspended beyond its lease, with a scheduler that does not answer
// at once.
func (r *rig) suspend() {
	r.sched.with(func() { r.sched.mute = true })
	r.clock.by.Add(int64(time.Hour))
}

// resumed lets scheduler answer, and waits until the host goes on.
func (r *rig) resumed(t *testing.T) {
	t.Helper()
	r.sched.with(func() { r.sched.mute = false })
	r.run.h.askRejoin()
	eventually(t, 10*time.Second, "the host goes on", func() bool { return r.run.h.lease.check() == nil })
}
