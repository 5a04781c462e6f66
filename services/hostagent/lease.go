package hostagent

import (
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
)

// lease is how long this host may act on its sessions. It is counted from before the request was
// sent, so that it ends here before it ends at scheduler.
type lease struct {
	mu     sync.Mutex
	now    func() time.Duration
	margin time.Duration
	until  time.Duration
	term   time.Duration
	// fence, if set, is told when this host must stop to act: from then on nothing of it may run.
	fence func(at time.Duration)
}

func newLease(margin time.Duration) *lease { return &lease{now: watchdog.Now, margin: margin} }

// granted notes the answer to a request that was sent at sent.
func (l *lease) granted(sent, term time.Duration) {
	l.mu.Lock()
	l.term = term
	l.until = max(l.until, sent+term)
	end, fence := l.end(), l.fence
	l.mu.Unlock()
	if fence != nil {
		fence(end)
	}
}

// end is the margin before the lease is over at scheduler. mu is held.
func (l *lease) end() time.Duration { return l.until - min(l.margin, l.term/4) }

// left is how long this host may still act.
func (l *lease) left() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.end() - l.now()
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
