package callout

import (
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go/micro"
)

const (
	// waiting is the most questions that wait for a worker.
	waiting = 1024
	// patience is how long a question waits for one. Its client has given up soon after and asks again:
	// answers to those who are gone would leave no time for those who are there, and never would again.
	patience = time.Second
)

var (
	errLate   = errors.New("more logins come than can be answered")
	errTokens = errors.New("too many tokens are being verified")
)

// asked is a question, with the time at which it came.
type asked struct {
	micro.Request
	at time.Time
}

// take is called for one question after the other, and never waits: what waited before it would be old
// unseen.
func (r *Responder) take(req micro.Request) {
	select {
	case r.queue <- asked{req, time.Now()}:
	default:
		r.unanswered(errLate)
	}
}

// work answers questions until the responder stops, and then those that came before.
func (r *Responder) work() {
	for {
		select {
		case q := <-r.queue:
			r.next(q)
			continue
		case <-r.ctx.Done():
		}
		select {
		case q := <-r.queue:
			r.next(q)
		default:
			return
		}
	}
}

func (r *Responder) next(q asked) {
	if time.Since(q.at) > patience {
		r.unanswered(errLate)
		return
	}
	r.answer(q.Request)
}

// silent counts questions that were not answered: whoever has no login can cause them, and must not be
// able to fill the log.
type silent struct {
	mu    sync.Mutex
	said  time.Time
	since int
}

// unanswered says why a question was not answered, at most once a second.
func (r *Responder) unanswered(err error) {
	s := &r.silent
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.since++; time.Since(s.said) < time.Second {
		return
	}
	r.cfg.Log.Warn("logins were not answered", "error", err, "logins", s.since)
	s.said, s.since = time.Now(), 0
}
