package hostend

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Stream names an output stream of an exec.
type Stream = wire.Sub

// The output streams.
const (
	Stdout Stream = wire.Stdout
	Stderr Stream = wire.Stderr
)

// Event is one thing that an exec did. Exactly one of Data, Gap and Exit is set.
type Event struct {
	Stream Stream // of Data and Gap
	Offset uint64 // of the first byte of Data, or of the first that is gone
	Data   []byte // the caller's to keep
	Gap    uint64 // if not 0: the bytes from Offset up to here are gone
	Exit   *Exit
}

const (
	maxQueued = 1024    // events, before chunks of one stream are merged
	maxGaps   = 64      // gaps and exits that a consumer has not taken
	ackEvery  = 1 << 18 // bytes
)

// ExecStream is the output of an exec on one Conn. It is safe for concurrent
// use, though only one goroutine should take events.
type ExecStream struct {
	conn *Conn
	key  string
	id   uint32
	info ExecInfo

	// ManualAck leaves acknowledging to the caller; set it before the first
	// Next. Otherwise an event is acknowledged when the next one is asked for.
	ManualAck bool

	mu     sync.Mutex
	wake   chan struct{}
	answer *answer
	queue  []Event
	last   [2]*Event // newest queued chunk of each stream, nil after a gap
	marks  int       // queued gaps and exits
	pos    [2]uint64 // end of what came
	acked  [2]uint64 // what the guest was told
	taken  [2]uint64 // end of what was handed out
	exited bool
	err    error // after the queue: why there is no more
	closed bool
}

func (c *Conn) follow(ctx context.Context, op, key, method string, req any, from Offsets) (*ExecStream, error) {
	s := &ExecStream{conn: c, key: key, wake: make(chan struct{}, 1), answer: newAnswer(op)}
	s.pos = [2]uint64{from.Stdout, from.Stderr}
	s.acked, s.taken = s.pos, s.pos
	id, err := c.open(ctx, method, req, s)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	s.mu.Lock()
	s.id = id
	s.mu.Unlock()
	if err := s.answer.wait(ctx, &s.info); err != nil {
		c.cancel(id)
		return nil, err
	}
	return s, nil
}

// Info is the state of the exec when this stream began.
func (s *ExecStream) Info() ExecInfo { return s.info }

// Key is the key of the exec.
func (s *ExecStream) Key() string { return s.key }

// Next waits for the next event. After the exit there may be output of processes
// that the exec left behind; io.EOF comes when all of them have closed it. Other
// errors: ErrReplaced, ErrCancelled after a detach, ErrChannelLost. Events that
// came before an error are returned first. An error of ctx loses nothing.
func (s *ExecStream) Next(ctx context.Context) (Event, error) {
	if !s.ManualAck {
		// What came before the channel was lost is still handed out.
		if err := s.ackTaken(ctx); err != nil && !errors.Is(err, ErrChannelLost) {
			return Event{}, err
		}
	}
	for {
		s.mu.Lock()
		if len(s.queue) > 0 {
			ev := s.pop()
			s.mu.Unlock()
			return ev, nil
		}
		err := s.err
		if s.closed && err == nil {
			err = io.EOF
		}
		s.mu.Unlock()
		if err != nil {
			return Event{}, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return Event{}, ctx.Err()
		}
	}
}

// pop takes the first event of the queue.
func (s *ExecStream) pop() Event {
	ev := s.queue[0]
	for i := range s.last {
		if s.last[i] == &s.queue[0] {
			s.last[i] = nil
		}
	}
	s.queue[0] = Event{}
	s.queue = s.queue[1:]
	switch {
	case ev.Exit != nil:
		s.marks--
	case ev.Gap != 0:
		s.marks--
		s.taken[ev.Stream-Stdout] = ev.Gap
	default:
		s.taken[ev.Stream-Stdout] = ev.Offset + uint64(len(ev.Data))
	}
	return ev
}

// ackTaken acknowledges what was handed out, in larger pieces while more waits.
func (s *ExecStream) ackTaken(ctx context.Context) error {
	s.mu.Lock()
	upTo := s.taken
	for i := range upTo {
		if len(s.queue) > 0 && upTo[i]-s.acked[i] < ackEvery {
			upTo[i] = s.acked[i]
		}
	}
	s.mu.Unlock()
	return s.Ack(ctx, Offsets{Stdout: upTo[0], Stderr: upTo[1]})
}

// Ack tells the guest that everything before the offsets was taken: it may be
// dropped from the ring, and as many bytes may follow. Offsets that go back, or
// beyond what was received, have no effect.
func (s *ExecStream) Ack(ctx context.Context, upTo Offsets) error {
	for i, offset := range [2]uint64{upTo.Stdout, upTo.Stderr} {
		s.mu.Lock()
		offset = min(offset, s.pos[i])
		before := s.acked[i]
		news := offset > s.acked[i] && s.err == nil && !s.closed
		if news {
			s.acked[i] = offset
		}
		s.mu.Unlock()
		if !news {
			continue
		}
		ack := wire.Frame{Type: wire.TypeAck, Sub: Stdout + Stream(i), Stream: s.id, Offset: offset}
		if err := s.conn.send(ctx, ack); err != nil {
			s.mu.Lock()
			if s.acked[i] == offset {
				s.acked[i] = before
			}
			s.mu.Unlock()
			return fmt.Errorf("acknowledge output of exec %s: %w", s.key, err)
		}
	}
	return nil
}

// Detach gives up the exec: see Conn.DetachExec. The stream is over.
func (s *ExecStream) Detach(ctx context.Context) error {
	s.Close()
	return s.conn.DetachExec(ctx, s.key)
}

// Close ends this stream and nothing else: the exec stays held, and blocks when
// its ring is full, until it is attached again or detached.
func (s *ExecStream) Close() {
	s.mu.Lock()
	first, over := !s.closed, s.err != nil
	s.closed = true
	s.queue = nil
	s.last = [2]*Event{}
	s.mu.Unlock()
	if first && !over {
		s.conn.cancel(s.id)
	}
	if first {
		s.signal()
	}
}

func (s *ExecStream) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *ExecStream) lost(err error) {
	s.answer.fail(err)
	s.end(err)
}

func (s *ExecStream) end(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	s.signal()
}

// frame implements receiver.
func (s *ExecStream) frame(f wire.Frame) error {
	if !s.answer.settled() {
		_, err := s.answer.frame(f)
		return err
	}
	var err error
	switch f.Type {
	case wire.TypeData:
		err = s.takeData(f)
	case wire.TypeGap:
		err = s.takeGap(f)
	case wire.TypeExit:
		err = s.takeExit(f)
	case wire.TypeEnd:
		s.conn.forget(f.Stream)
		s.end(io.EOF)
	case wire.TypeError:
		s.conn.forget(f.Stream)
		s.end(guestError("read exec "+s.key, f.Payload))
	}
	if err != nil {
		return fmt.Errorf("output of exec %s: %w", s.key, err)
	}
	s.signal()
	return nil
}

// takeData queues bytes. The order between the two streams is kept until many
// events wait; from then on only the order within each is.
func (s *ExecStream) takeData(f wire.Frame) error {
	if f.Sub != Stdout && f.Sub != Stderr {
		return fmt.Errorf("%w: stream %d", ErrProtocol, f.Sub)
	}
	i := f.Sub - Stdout
	s.mu.Lock()
	defer s.mu.Unlock()
	switch end := f.Offset + uint64(len(f.Payload)); {
	case s.closed:
		return nil
	case f.Offset != s.pos[i]:
		return fmt.Errorf("%w: bytes at %d, expected %d", ErrProtocol, f.Offset, s.pos[i])
	case end < f.Offset || end > s.acked[i]+wire.Window:
		return fmt.Errorf("%w: bytes up to %d exceed the window", ErrProtocol, end)
	default:
		s.pos[i] = end
	}
	if last := s.last[i]; last != nil && len(s.queue) > 0 &&
		(last == &s.queue[len(s.queue)-1] && len(last.Data) < wire.MaxPayload || len(s.queue) >= maxQueued) {
		last.Data = append(last.Data, f.Payload...)
		return nil
	}
	s.push(Event{Stream: f.Sub, Offset: f.Offset, Data: append([]byte(nil), f.Payload...)})
	s.last[i] = &s.queue[len(s.queue)-1]
	return nil
}

// push appends to the queue and keeps s.last pointing into it.
func (s *ExecStream) push(ev Event) {
	if len(s.queue) < cap(s.queue) {
		s.queue = append(s.queue, ev)
		return
	}
	old := s.queue
	s.queue = append(make([]Event, 0, 2*len(old)+16), old...)
	for i := range old {
		for j := range s.last {
			if s.last[j] == &old[i] {
				s.last[j] = &s.queue[i]
			}
		}
	}
	s.queue = append(s.queue, ev)
}

func (s *ExecStream) takeGap(f wire.Frame) error {
	if f.Sub != Stdout && f.Sub != Stderr || len(f.Payload) != 8 {
		return fmt.Errorf("%w: malformed gap", ErrProtocol)
	}
	i := f.Sub - Stdout
	to := binary.BigEndian.Uint64(f.Payload)
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.Offset != s.pos[i] || to <= f.Offset || to > 1<<62 {
		return fmt.Errorf("%w: gap from %d to %d at %d", ErrProtocol, f.Offset, to, s.pos[i])
	}
	s.pos[i] = to
	s.acked[i] = to // the window moves with the gap, on both sides
	s.last[i] = nil
	return s.mark(Event{Stream: f.Sub, Offset: f.Offset, Gap: to})
}

func (s *ExecStream) takeExit(f wire.Frame) error {
	var exit Exit
	if err := decode(f.Payload, &exit); err != nil {
		return err
	}
	if !plausible(exit) {
		exit = Exit{Unknown: "the guest reported an impossible status", Output: exit.Output, EndedAt: exit.EndedAt}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exited {
		return fmt.Errorf("%w: second exit", ErrProtocol)
	}
	s.exited = true
	s.last = [2]*Event{}
	return s.mark(Event{Exit: &exit})
}

// mark queues a gap or exit, of which there are few.
func (s *ExecStream) mark(ev Event) error {
	if s.closed {
		return nil
	}
	if s.marks++; s.marks > maxGaps {
		return fmt.Errorf("%w: more than %d gaps", ErrProtocol, maxGaps)
	}
	s.push(ev)
	return nil
}

// plausible says whether exactly one of code, signal and reason is there, in the
// range that the kernel gives.
func plausible(x Exit) bool {
	switch {
	case x.Code != nil:
		return *x.Code >= 0 && *x.Code <= 255 && x.Signal == 0 && x.Unknown == ""
	case x.Signal != 0:
		return x.Signal > 0 && x.Signal <= 64 && x.Unknown == ""
	}
	return x.Unknown != ""
}
