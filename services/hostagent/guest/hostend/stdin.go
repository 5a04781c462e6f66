package hostend

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// stdinStream is the way to the stdin of one exec on one Conn.
type stdinStream struct {
	conn *Conn
	key  string
	id   uint32

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at every change
	known   bool          // the guest has said where it is
	taken   uint64        // bytes that the guest has
	limit   uint64        // up to which it takes more
	sent    uint64
	ended   bool  // an END was sent
	over    bool  // the guest has taken all, up to the end
	err     error // the stream is unusable

	sending sync.Mutex // keeps frames in the order of their offsets
}

// WriteStdin gives bytes to the stdin of an exec, the first of them at offset:
// the number of bytes before it since the start. It returns when the guest has
// them, which is before the process reads them; a guest lives as long as its
// processes, so they are safe against the loss of the host. Bytes that the guest
// had before are skipped, so a write may be repeated after a lost channel;
// ListExecs tells how many it has. It blocks while the process does not read and
// 1 MiB is waiting. Errors: ErrBadOffset (bytes before offset never came),
// ErrStdinClosed (by CloseStdin or by the process), ErrNoSuchExec,
// ErrChannelLost. After any error some of the bytes may have been taken.
func (c *Conn) WriteStdin(ctx context.Context, key string, offset uint64, p []byte) error {
	op := fmt.Sprintf("write stdin of exec %s at %d", key, offset)
	s, err := c.stdin(ctx, key)
	if err == nil {
		err = s.write(ctx, offset, p)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// CloseStdin ends the stdin of an exec at offset, the number of bytes written to
// it in all. The process sees the end after it has read them; on a terminal the
// end-of-file character is typed. Closing it again is no error.
func (c *Conn) CloseStdin(ctx context.Context, key string, offset uint64) error {
	op := fmt.Sprintf("close stdin of exec %s at %d", key, offset)
	s, err := c.stdin(ctx, key)
	if err == nil {
		err = s.close(ctx, offset)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// stdin opens the stream to the stdin of an exec, or finds it open.
func (c *Conn) stdin(ctx context.Context, key string) (*stdinStream, error) {
	c.mu.Lock()
	s := c.stdins[key]
	fresh := s == nil
	if fresh {
		s = &stdinStream{conn: c, key: key, changed: make(chan struct{})}
		c.stdins[key] = s
	}
	c.mu.Unlock()
	if fresh {
		id, err := c.open(ctx, wire.MethodStdin, wire.ExecRef{Key: wire.Text(key)}, s)
		if err != nil {
			s.end(err)
			return nil, err
		}
		s.mu.Lock()
		s.id = id
		s.changeLocked()
		s.mu.Unlock()
	}
	return s, s.wait(ctx, func() bool { return s.known && s.id != 0 })
}

// wait waits until cond holds; it is called with s.mu held.
func (s *stdinStream) wait(ctx context.Context, cond func() bool) error {
	for {
		s.mu.Lock()
		ok, err, changed := cond(), s.err, s.changed
		s.mu.Unlock()
		if ok || err != nil {
			if ok {
				return nil
			}
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *stdinStream) write(ctx context.Context, offset uint64, p []byte) error {
	end := offset + uint64(len(p))
	for {
		more, err := s.sendSome(ctx, offset, p)
		if err != nil {
			return err
		}
		if !more {
			break
		}
		before := s.progress()
		if err := s.wait(ctx, func() bool { return s.sent < end && s.sent < s.limit || s.sent != before }); err != nil {
			return err
		}
	}
	return s.wait(ctx, func() bool { return s.taken >= end })
}

func (s *stdinStream) advance(sent uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = sent
	s.changeLocked()
}

func (s *stdinStream) progress() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent
}

// sendSome sends what the window allows of p and says whether there is more.
func (s *stdinStream) sendSome(ctx context.Context, offset uint64, p []byte) (more bool, err error) {
	s.sending.Lock()
	defer s.sending.Unlock()
	end := offset + uint64(len(p))
	for {
		s.mu.Lock()
		sent, limit := s.sent, s.limit
		switch {
		case s.taken >= end:
			s.mu.Unlock()
			return false, nil
		case s.err != nil:
			defer s.mu.Unlock()
			return false, s.err
		case offset > sent:
			s.mu.Unlock()
			return false, &Error{Op: "write stdin", Kind: wire.KindBadOffset, Message: fmt.Sprintf("only %d bytes came before", sent)}
		case sent < end && s.ended:
			s.mu.Unlock()
			return false, &Error{Op: "write stdin", Kind: wire.KindStdinClosed, Message: "closed by the host"}
		}
		s.mu.Unlock()
		if sent >= end {
			return false, nil
		}
		n := min(end-sent, limit-min(limit, sent), wire.MaxPayload)
		if n == 0 {
			return true, nil
		}
		at := sent - offset
		s.advance(sent + n) // before sending: the answer may overtake us
		if err := s.conn.send(ctx, wire.Frame{Type: wire.TypeData, Stream: s.id, Offset: sent, Payload: p[at : at+n]}); err != nil {
			s.advance(sent) // it was not sent
			return false, err
		}
	}
}

func (s *stdinStream) close(ctx context.Context, offset uint64) error {
	s.sending.Lock()
	s.mu.Lock()
	sent, ended, err := s.sent, s.ended, s.err
	s.mu.Unlock()
	switch {
	case err != nil || ended:
	case offset != sent:
		err = &Error{Op: "close stdin", Kind: wire.KindBadOffset, Message: fmt.Sprintf("%d bytes came", sent)}
	default:
		err = s.conn.send(ctx, wire.Frame{Type: wire.TypeEnd, Stream: s.id, Offset: offset})
		if err == nil {
			s.mu.Lock()
			s.ended = true
			s.mu.Unlock()
		}
	}
	s.sending.Unlock()
	if err == nil {
		err = s.wait(ctx, func() bool { return s.over })
	}
	if closed, ok := err.(*Error); ok && closed.Is(ErrStdinClosed) {
		return nil
	}
	return err
}

func (s *stdinStream) changeLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// end makes the stream unusable; the next write opens another.
func (s *stdinStream) end(err error) {
	s.conn.mu.Lock()
	if s.conn.stdins[s.key] == s {
		delete(s.conn.stdins, s.key)
	}
	s.conn.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	s.changeLocked()
}

func (s *stdinStream) lost(err error) { s.end(err) }

// frame implements receiver.
func (s *stdinStream) frame(f wire.Frame) error {
	switch f.Type {
	case wire.TypeAck:
		return s.ack(f)
	case wire.TypeResult: // all was taken, up to the end
		s.mu.Lock()
		s.over = true
		s.mu.Unlock()
		s.conn.forget(f.Stream)
		s.end(&Error{Op: "write stdin", Kind: wire.KindStdinClosed, Message: "closed by the host"})
	case wire.TypeError:
		s.conn.forget(f.Stream)
		s.end(guestError("write stdin", f.Payload))
	}
	return nil
}

func (s *stdinStream) ack(f wire.Frame) error {
	if len(f.Payload) != 8 {
		return fmt.Errorf("%w: malformed acknowledgement", ErrProtocol)
	}
	limit := binary.BigEndian.Uint64(f.Payload)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known && (f.Offset < s.taken || f.Offset > s.sent) || limit < f.Offset || limit-f.Offset > wire.Window {
		return fmt.Errorf("%w: acknowledgement of %d of %d bytes", ErrProtocol, f.Offset, s.sent)
	}
	if !s.known {
		s.known, s.sent = true, f.Offset
	}
	s.taken, s.limit = f.Offset, limit
	s.changeLocked()
	return nil
}
