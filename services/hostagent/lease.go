package hostagent

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// boottime is the time since the machine started, also while it was suspended; no clock change
// moves it.
func boottime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0 // cannot happen on Linux; a lease that never runs on is the safe side
	}
	return time.Duration(ts.Nano())
}

// lease is how long this host may act on its sessions. It is counted from before the request was
// sent, so that it ends here before it ends at scheduler.
type lease struct {
	mu     sync.Mutex
	now    func() time.Duration
	margin time.Duration
	until  time.Duration
	term   time.Duration
}

func newLease(margin time.Duration) *lease { return &lease{now: boottime, margin: margin} }

// granted notes the answer to a request that was sent at sent.
func (l *lease) granted(sent, term time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.term = term
	l.until = max(l.until, sent+term)
}

// left is how long this host may still act.
func (l *lease) left() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.until - min(l.margin, l.term/4) - l.now()
}

// check is asked before every effect on a session.
func (l *lease) check() error {
	if l.left() > 0 {
		return nil
	}
	return errs.E("act on a session", errkind.Unavailable, "",
		"this host's lease has run out; it goes on once scheduler answers")
}

// pause is the time between two renewals.
func (l *lease) pause() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return max(l.term/3, 50*time.Millisecond)
}
