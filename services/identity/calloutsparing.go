package identity

import (
	"sync"
	"time"
)

// Refused logins are told one by one up to a burst, and then so many a second: whoever has no login
// must not be able to fill logs and audit.
const (
	refusalsBurst     = 100
	refusalsPerSecond = 10
)

// sparing counts what is told.
type sparing struct {
	now func() time.Time

	mu     sync.Mutex
	room   float64
	at     time.Time
	untold int
}

func newSparing(now func() time.Time) *sparing {
	return &sparing{now: now, room: refusalsBurst, at: now()}
}

// more reports whether one more may be told.
func (s *sparing) more() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	s.room = min(refusalsBurst, s.room+now.Sub(s.at).Seconds()*refusalsPerSecond)
	s.at = now
	if s.room < 1 {
		s.untold++
		return false
	}
	s.room--
	return true
}

// left is how many were not told since it was asked last.
func (s *sparing) left() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.untold
	s.untold = 0
	return n
}
