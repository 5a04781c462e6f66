package core

import (
	"fmt"
	"time"
)

// backoff is how one host fails to prepare for the pool.
type backoff struct {
	failures int
	last     time.Time
	until    time.Time
	reason   string
}

// failed doubles the wait. Preparations that were under way together fail as one.
func (b *backoff) failed(began, now time.Time, reason string) {
	b.reason = reason
	if b.failures > 0 && !began.After(b.last) {
		return
	}
	b.failures++
	b.last = now
	wait := BackoffMost
	if b.failures < 10 {
		wait = min(BackoffMost, BackoffFirst<<(b.failures-1))
	}
	b.until = now.Add(wait)
}

// why says why nothing may be asked of the host now; one at a time may when the wait is over.
func (b *backoff) why(underWay int, now time.Time) string {
	switch {
	case b.failures == 0:
		return ""
	case now.Before(b.until):
		return fmt.Sprintf("failed %d times, tried again in %s: %s", b.failures, b.until.Sub(now).Round(time.Second), b.reason)
	case underWay > 0:
		return fmt.Sprintf("failed %d times, tried again now: %s", b.failures, b.reason)
	}
	return ""
}
