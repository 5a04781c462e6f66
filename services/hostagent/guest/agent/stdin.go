package agent

import (
	"context"
	"errors"
	"os"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// stdin feeds one process. Its inbox belongs to the exec: it survives the host.
type stdin struct {
	in   *inbox
	file *os.File // nil for /dev/null
	pty  bool

	once sync.Once
}

var errStdinClosed = wire.Failf(wire.KindStdinClosed, "stdin is closed")

// endOfTransmission is what a terminal takes for the end of its input.
const endOfTransmission = 0x04

func newStdin(file *os.File, pty bool) *stdin {
	s := &stdin{in: newInbox(), file: file, pty: pty}
	if file == nil {
		s.in.fail(errStdinClosed)
	}
	return s
}

// feed moves bytes to the process until the host ends them or the process does
// not want them any more.
func (s *stdin) feed() {
	defer s.close()
	for {
		p, err := s.in.next()
		if err != nil {
			if s.pty && !errors.Is(err, errStdinClosed) {
				_, _ = s.file.Write([]byte{endOfTransmission})
			}
			return
		}
		if _, err := s.file.Write(p); err != nil {
			return
		}
	}
}

// close refuses further bytes and closes the pipe; a terminal stays open, since
// its output is read from the same file.
func (s *stdin) close() {
	s.in.fail(errStdinClosed)
	s.once.Do(func() {
		if s.file != nil && !s.pty {
			_ = s.file.Close()
		}
	})
}

// state returns how many bytes were taken and whether more are welcome.
func (s *stdin) state() (uint64, bool) {
	s.in.mu.Lock()
	defer s.in.mu.Unlock()
	return s.in.received, s.in.err == nil && !s.in.ended
}

// execStdin takes bytes for an exec. It acknowledges what the agent has, which
// lives as long as the process, and says how much more fits.
func (c *call) execStdin() (any, error) {
	x, err := c.execRef()
	if err != nil {
		return nil, err
	}
	q := x.stdin.in
	stop := context.AfterFunc(c.ctx, q.poke)
	defer stop()
	c.mu.Lock()
	c.in, c.shared = q, true
	c.mu.Unlock()
	var received, limit uint64
	for first := true; ; first = false {
		q.mu.Lock()
		for !first && c.ctx.Err() == nil && q.err == nil && q.received == received &&
			q.limitLocked() < limit+wire.MaxPayload && !(q.limitLocked() > limit && q.held == 0) {
			q.cond.Wait()
		}
		received, limit = q.received, q.limitLocked()
		closed, ended := q.err, q.ended
		q.mu.Unlock()
		if c.ctx.Err() != nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			return nil, c.failure
		}
		if err := c.sendAck(received, limit); err != nil {
			return nil, err
		}
		if closed != nil {
			return nil, closed
		}
		if ended {
			return struct{}{}, nil
		}
	}
}
