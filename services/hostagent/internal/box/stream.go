package box

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

var (
	errCancelled = errors.New("the client cancelled the stream")
	errGone      = errors.New("the client was not heard of for 45 s")
)

// stream is one open stream. Frames to the client are sent by the one goroutine that runs the
// operation, and by the box for pings and its end; frames from the client are queued by take.
type stream struct {
	id      ids.StreamID
	deliver string
	claims  grant.Claims // of the grant that opened it
	publish func(subject string, data []byte) error
	ctx     context.Context
	stop    context.CancelCauseFunc

	out struct {
		sync.Mutex
		seq    uint64
		credit uint64
		more   chan struct{} // closed and replaced when credit arrives
		ended  bool
		buf    []byte
		// spans are the output without credit from the client, in the order of sending.
		spans      []span
		paid       uint64        // credit for a part of the first span
		acked      wire.Offsets  // the client has all output before these offsets
		ackChanged chan struct{} // acked has changed
	}
	in struct {
		sync.Mutex
		seq     uint64
		heard   time.Time
		window  uint64 // bytes that the client may still send
		queue   []*boxv1.Frame
		ready   chan struct{}
		control int // queued frames that are no data
	}
}

// span is a piece of output: its bytes, and where both channels end with it.
type span struct {
	bytes uint64
	end   wire.Offsets
}

// spanBytes is how large a span grows before the next one begins. It bounds their number.
const spanBytes = 16 << 10

// maxControl bounds queued frames that credit does not count.
const maxControl = 64

func newStream(ctx context.Context, id ids.StreamID, deliver string, credit, window uint32) *stream {
	s := &stream{id: id, deliver: deliver}
	s.ctx, s.stop = context.WithCancelCause(ctx)
	s.out.credit = uint64(credit)
	s.out.more = make(chan struct{})
	s.out.ackChanged = make(chan struct{}, 1)
	s.in.heard = time.Now()
	s.in.window = uint64(window)
	s.in.ready = make(chan struct{}, 1)
	return s
}

// send publishes one frame. After the last frame of a stream it does nothing.
func (s *stream) send(f *boxv1.Frame, last bool) error {
	s.out.Lock()
	defer s.out.Unlock()
	if s.out.ended {
		return nil
	}
	s.out.ended = last
	s.out.seq++
	f.Seq = s.out.seq
	raw, err := proto.MarshalOptions{}.MarshalAppend(s.out.buf[:0], f)
	if err != nil {
		return errs.E("send frame", errkind.Internal, s.id.String(), err)
	}
	if cap(raw) <= 2*maxFrame {
		s.out.buf = raw
	}
	if err := s.publish(s.deliver, raw); err != nil {
		err = errs.E("send frame", errkind.Unavailable, s.id.String(), err)
		s.stop(err)
		return err
	}
	return nil
}

// data sends the bytes of a channel as credit allows; it waits for credit.
func (s *stream) data(ch boxv1.Channel, offset uint64, data []byte) error {
	for len(data) > 0 {
		n, err := s.spend(len(data))
		if err != nil {
			return err
		}
		s.sent(ch, offset+uint64(n), uint64(n))
		d := &boxv1.Data{Channel: ch, Offset: offset, Data: data[:n]}
		if err := s.send(&boxv1.Frame{Body: &boxv1.Frame_Data{Data: d}}, false); err != nil {
			return err
		}
		data, offset = data[n:], offset+uint64(n)
	}
	return nil
}

// spend takes up to want bytes of credit, at most one chunk.
func (s *stream) spend(want int) (int, error) {
	for {
		s.out.Lock()
		n := min(uint64(want), s.out.credit, MaxChunk)
		s.out.credit -= n
		more := s.out.more
		s.out.Unlock()
		if n > 0 {
			return int(n), nil
		}
		select {
		case <-more:
		case <-s.ctx.Done():
			return 0, context.Cause(s.ctx)
		}
	}
}

// take accepts one frame of the client; it does not block. An error ends the stream.
func (s *stream) take(f *boxv1.Frame) error {
	const op = "read frame"
	s.in.Lock()
	defer s.in.Unlock()
	if f.GetSeq() != s.in.seq+1 {
		return errs.Errorf(op, errkind.Unavailable, "frame %d came after frame %d: a message was lost", f.GetSeq(), s.in.seq)
	}
	s.in.seq++
	s.in.heard = time.Now()
	switch b := f.GetBody().(type) {
	case *boxv1.Frame_Ping:
		return nil
	case *boxv1.Frame_Credit:
		return s.addCredit(b.Credit.GetBytes())
	case *boxv1.Frame_Data:
		n := uint64(len(b.Data.GetData()))
		if n > s.in.window {
			return errs.E(op, errkind.Exhausted, "", "more data than the credit allows")
		}
		s.in.window -= n
		if n == 0 {
			s.in.control++
		}
	case *boxv1.Frame_Cancel, *boxv1.Frame_CloseInput, *boxv1.Frame_Signal, *boxv1.Frame_Resize:
		s.in.control++
	default:
		return errs.E(op, errkind.Invalid, "", "a client may not send that frame")
	}
	if s.in.control > maxControl {
		return errs.E(op, errkind.Exhausted, "", "too many frames wait to be handled")
	}
	s.in.queue = append(s.in.queue, f)
	select {
	case s.in.ready <- struct{}{}:
	default:
	}
	return nil
}

func (s *stream) addCredit(n uint32) error {
	s.out.Lock()
	defer s.out.Unlock()
	if s.out.credit+uint64(n) > MaxCredit {
		return errs.Errorf("read frame", errkind.Invalid, "a credit above %d bytes", MaxCredit)
	}
	s.out.credit += uint64(n)
	close(s.out.more)
	s.out.more = make(chan struct{})
	for s.out.paid += uint64(n); len(s.out.spans) > 0 && s.out.paid >= s.out.spans[0].bytes; s.out.spans = s.out.spans[1:] {
		s.out.paid -= s.out.spans[0].bytes
		s.out.acked = s.out.spans[0].end
		select {
		case s.out.ackChanged <- struct{}{}:
		default:
		}
	}
	if len(s.out.spans) == 0 {
		s.out.paid = 0 // credit ahead of output acknowledges none
	}
	return nil
}

// sent notes output for which the client owes credit.
func (s *stream) sent(ch boxv1.Channel, end, n uint64) {
	s.out.Lock()
	defer s.out.Unlock()
	last := len(s.out.spans) - 1
	if last < 0 || s.out.spans[last].bytes >= spanBytes {
		next := span{end: s.out.acked}
		if last >= 0 {
			next.end = s.out.spans[last].end
		}
		s.out.spans = append(s.out.spans, next)
		last++
	}
	at := &s.out.spans[last]
	at.bytes += n
	switch ch {
	case boxv1.Channel_CHANNEL_STDOUT:
		at.end.Stdout = end
	case boxv1.Channel_CHANNEL_STDERR:
		at.end.Stderr = end
	}
}

// clientHas returns the offsets before which the client has all output.
func (s *stream) clientHas() wire.Offsets {
	s.out.Lock()
	defer s.out.Unlock()
	return s.out.acked
}

// next returns the client's next frame that is neither ping nor credit.
func (s *stream) next() (*boxv1.Frame, error) {
	for {
		s.in.Lock()
		if len(s.in.queue) > 0 {
			f := s.in.queue[0]
			s.in.queue[0] = nil
			s.in.queue = s.in.queue[1:]
			if len(f.GetData().GetData()) == 0 {
				s.in.control--
			}
			s.in.Unlock()
			return f, nil
		}
		s.in.Unlock()
		select {
		case <-s.in.ready:
		case <-s.ctx.Done():
			return nil, context.Cause(s.ctx)
		}
	}
}

// grant lets the client send n bytes more.
func (s *stream) grant(n int) error {
	s.in.Lock()
	s.in.window += uint64(n)
	s.in.Unlock()
	return s.send(&boxv1.Frame{Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: uint32(n)}}}, false)
}

// silent is how long nothing came from the client.
func (s *stream) silent(now time.Time) time.Duration {
	s.in.Lock()
	defer s.in.Unlock()
	return now.Sub(s.in.heard)
}

func (s *stream) ping() {
	_ = s.send(&boxv1.Frame{Body: &boxv1.Frame_Ping{Ping: &boxv1.Ping{}}}, false)
}

// fail ends the stream with a reason, if it has not ended.
func (s *stream) fail(err error) {
	_ = s.send(&boxv1.Frame{Body: &boxv1.Frame_Failure{Failure: failure(err)}}, true)
	s.stop(err)
}

// finish ends the stream with its last frame.
func (s *stream) finish(f *boxv1.Frame) error { return s.send(f, true) }

// mute ends the stream without a word: the client is gone or does not want to hear more.
func (s *stream) mute(cause error) {
	s.out.Lock()
	s.out.ended = true
	s.out.Unlock()
	s.stop(cause)
}

func failure(err error) *corev1.Failure {
	return &corev1.Failure{Kind: kindOf(err).String(), Reason: reason(err)}
}

func reason(err error) string {
	text := err.Error()
	if len(text) > 1024 {
		text = text[:1024]
	}
	return text
}
