package bus

import (
	"fmt"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
)

// sayAgain is the time between one word that a service serves and the next. A
// client leaves a node that hangs, or is cut off, after two to three seconds;
// the other nodes drop that node after three to four, and a node drops a
// client after 10 to 15. Until then the bus may still hand a request to who
// was subscribed there, and nobody is told that it is lost. So the word is
// said again while routes may end, and once more when clients have ended.
var sayAgain = []time.Duration{time.Second, time.Second, time.Second, 2 * time.Second, 4 * time.Second, 7 * time.Second}

// Announce says that the service serves now, so that calls which an earlier
// replica left without an answer are sent again; call it when every method is
// handled. It says so again after each reconnect until Stop, because what was
// under way over the lost connection has no answer either, and, unless each
// request reaches every replica (subjects.Leader), at growing intervals for
// 16 s after that: see sayAgain. An error means that the connection is away at
// this moment: the reconnect makes up for it.
func (s *Service) Announce() error {
	subject := subjects.Serving(s.cfg.Name)
	switch self := s.conn.self; {
	case self.Role == subjects.RoleHost && s.cfg.Name == "host":
		subject = subjects.ServingHost(self.Host)
	case self.Role != subjects.RoleService || self.Service != s.cfg.Name:
		return errs.E("announce", errkind.Denied, s.cfg.Name, fmt.Sprintf("%s is another identity", self))
	}
	s.mu.Lock()
	if s.announce == nil {
		s.announce = s.announcer(subject)
	}
	a := s.announce
	s.mu.Unlock()
	if err := a.begin(); err != nil {
		return s.conn.failed("announce "+s.cfg.Name, subject, err)
	}
	return nil
}

// announcer says that a service serves.
type announcer struct {
	say    func() error
	pauses []time.Duration
	remove func() // from the connection's reconnects

	mu    sync.Mutex
	next  *time.Timer
	ended bool
}

func (s *Service) announcer(subject string) *announcer {
	a := &announcer{say: func() error { return s.conn.nc.Publish(subject, nil) }, pauses: sayAgain}
	if subjects.Leader(s.cfg.Name) {
		a.pauses = nil
	}
	if s.stopped {
		a.ended, a.remove = true, func() {}
		return a
	}
	a.remove = s.conn.onReconnect(func() { _ = a.begin() }) // fails only if the connection is away again
	return a
}

// begin says it now and lets the later words follow.
func (a *announcer) begin() error {
	a.mu.Lock()
	if a.next != nil {
		a.next.Stop()
	}
	a.follow(a.pauses)
	a.mu.Unlock()
	return a.say()
}

// follow has the words that are left said; the lock is held.
func (a *announcer) follow(pauses []time.Duration) {
	if a.ended || len(pauses) == 0 {
		return
	}
	var own *time.Timer
	own = time.AfterFunc(pauses[0], func() {
		a.mu.Lock()
		current := a.next == own && !a.ended
		if current {
			a.follow(pauses[1:])
		}
		a.mu.Unlock()
		if current {
			_ = a.say() // while the connection is away the reconnect begins anew
		}
	})
	a.next = own
}

func (a *announcer) end() {
	a.remove()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	if a.next != nil {
		a.next.Stop()
	}
}
