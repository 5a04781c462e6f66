package hostagent

import (
	"context"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
)

// lease is how long this host may act on its sessions. It is counted from before the request was
// sent, so that it ends here before it ends at scheduler.
//
// A lease that was lost (its end passed here before it was renewed, or scheduler does not know it any
// more) is not simply had again by the next grant: until the host has compared itself with what it
// owns, and removed what it does not, nothing begins and what is frozen stays so. The same holds for a
// process that has just started.
type lease struct {
	now    func() time.Duration
	margin time.Duration
	// stops: what is frozen is stopped before scheduler may give it away.
	stops bool

	// act is held while the fence hears of a change, so that it hears of them in order. Before mu.
	act sync.Mutex
	// fence, if set, stands in for this process.
	fence fencer
	// changed, if set, is called after a grant, a settling and a loss; it must not wait.
	changed func()

	mu    sync.Mutex
	until time.Duration
	term  time.Duration
	// settled says that the host knows what it owns; losses counts how often it did not any more.
	settled bool
	losses  int
	again   chan struct{} // closed when it is settled
}

// fencer is told from when on nothing may run here, and nothing may be left (0: for ever).
type fencer interface {
	Until(freeze, stop time.Duration)
	Keep(stop time.Duration)
	Freeze()
}

func newLease(margin time.Duration, stops bool) *lease {
	return &lease{now: watchdog.Now, margin: margin, stops: stops, again: make(chan struct{})}
}

// granted notes the answer to a request that was sent at sent. settled says that the host may go on; if
// not it has to compare itself first.
func (l *lease) granted(sent, term time.Duration) (settled bool) {
	l.act.Lock()
	defer l.act.Unlock()
	l.mu.Lock()
	l.noticed()
	l.term = term
	l.until = max(l.until, sent+term)
	defer l.tell()
	settled = l.settled
	freeze, stop := l.end(), l.stopAt()
	l.mu.Unlock()
	switch {
	case l.fence == nil:
	case settled:
		l.fence.Until(freeze, stop)
	default:
		l.fence.Keep(stop)
	}
	return settled
}

// lost says that scheduler does not know of this lease any more. Nothing may run at once.
func (l *lease) lost() {
	l.act.Lock()
	defer l.act.Unlock()
	l.mu.Lock()
	l.unsettle()
	l.mu.Unlock()
	defer l.tell()
	if l.fence != nil {
		l.fence.Freeze()
	}
}

// asking is called before scheduler is asked what this host owns; settle takes what it returned.
func (l *lease) asking() (losses int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noticed()
	return l.losses
}

// settle says that the host compared itself with what it owns, by an answer that was asked for when
// asking said losses. From here on things may run and begin. False if the lease was lost meanwhile.
func (l *lease) settle(losses int) bool {
	l.act.Lock()
	defer l.act.Unlock()
	l.mu.Lock()
	l.noticed()
	if l.losses != losses || l.now() >= l.end() {
		l.mu.Unlock()
		return false
	}
	if l.settled {
		l.mu.Unlock()
		return true
	}
	l.settled = true
	defer l.tell()
	close(l.again)
	freeze, stop := l.end(), l.stopAt()
	l.mu.Unlock()
	if l.fence != nil {
		l.fence.Until(freeze, stop)
	}
	return true
}

// noticed sees whether the lease has ended. mu is held.
func (l *lease) noticed() {
	if l.settled && l.now() >= l.end() {
		l.unsettle()
	}
}

func (l *lease) unsettle() {
	l.losses++
	if l.settled {
		l.settled, l.again = false, make(chan struct{})
	}
}

// before is how long before the end of the lease at scheduler this host stops to act. mu is held.
func (l *lease) before() time.Duration { return min(l.margin, l.term/4) }

// end is when this host stops to act. mu is held.
func (l *lease) end() time.Duration { return l.until - l.before() }

// stopAt is when what is frozen is stopped, 0 if never. mu is held.
func (l *lease) stopAt() time.Duration {
	if !l.stops {
		return 0
	}
	return l.until - l.before()/4
}

// tell says that something changed, in the order in which it did. act is held.
func (l *lease) tell() {
	if l.changed != nil {
		l.changed()
	}
}

// acts is how long this host may act from now on, 0 if it may not.
func (l *lease) acts() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noticed()
	if !l.settled {
		return 0
	}
	return l.end() - l.now()
}

// untilNanos is until when this host may act, in nanoseconds of its clock, 0 if it may not.
func (l *lease) untilNanos() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noticed()
	if !l.settled {
		return 0
	}
	return l.end().Nanoseconds()
}

// left is how long this host may still act.
func (l *lease) left() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.end() - l.now()
}

// over reports that nothing may begin now.
func (l *lease) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noticed()
	return !l.settled
}

// check is asked before every effect on a session.
func (l *lease) check() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noticed()
	switch {
	case l.settled:
		return nil
	case l.now() >= l.end():
		return errs.E("act on a session", errkind.Unavailable, "",
			"this host's lease has run out; it goes on once scheduler answers")
	}
	return errs.E("act on a session", errkind.Unavailable, "",
		"this host had no lease for a while and finds out first what it still owns")
}

// leaseWait is how long a wake waits for a lease. Whoever asks for one can reach this host and leads, so
// that a renewal is most likely on its way: after a change of leader the new one takes every host for
// alive, and some may have frozen a moment ago.
const leaseWait = 3 * time.Second

// wait waits until the host may act: for the comparison after a lease was lost as long as ctx, for a
// lease leaseWait.
func (l *lease) wait(ctx context.Context) error {
	var enough <-chan time.Time
	for {
		l.mu.Lock()
		l.noticed()
		again, settled, has := l.again, l.settled, l.now() < l.end()
		l.mu.Unlock()
		if settled {
			return l.check()
		}
		if !has && enough == nil {
			enough = time.After(leaseWait)
		}
		select {
		case <-again:
		case <-enough:
			if l.left() <= 0 {
				return l.check()
			}
			enough = nil // it has one again and compares
		case <-ctx.Done():
			return l.check()
		}
	}
}

// pause is the time between two renewals.
func (l *lease) pause() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return max(l.term/3, 50*time.Millisecond)
}
