package sdk

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

const (
	window    = 1 << 20  // credit that we give: bytes that may be on their way to us
	chunk     = 64 << 10 // most data of one frame
	refill    = window / 4
	pingEvery = 15 * time.Second
	silence   = 3 * pingEvery // a stream that is silent for so long is lost
	ringLimit = 64 << 20      // frames and their overhead that wait in memory for a slow reader
)

// Reasons for which a stream is lost though its process goes on.
var (
	errReconnected = errors.New("the connection to the bus was interrupted")
	errSilent      = errors.New("the host has been silent for too long")
	errSeqGap      = errors.New("a frame was lost on the way")
)

// lostError marks an error after which the stream may be attached again.
type lostError struct{ cause error }

func (e lostError) Error() string { return "stream lost: " + e.cause.Error() }
func (e lostError) Unwrap() error { return e.cause }

func isLost(err error) bool {
	var l lostError
	return errors.As(err, &l)
}

// stream is one open data-plane stream. recv is for one goroutine; send may
// be called from any.
type stream struct {
	c       *Client
	born    int           // reconnects before its request was sent
	subject string        // where our frames go
	id      string        // the host's name for the stream
	deliver string        // the subject that the host publishes frames on
	first   *boxv1.Result // result in the answer to the opening, if any

	ctx  context.Context // ends when the stream is lost or closed
	end  context.CancelCauseFunc
	ping *time.Timer

	leave func() // of the session: the stream has ended

	seqIn  uint64
	unpaid int // bytes taken since the last credit that we gave

	in    sync.Mutex
	queue []*nats.Msg
	held  int           // bytes in queue
	ready chan struct{} // something was queued

	mu     sync.Mutex
	cond   *sync.Cond
	seqOut uint64
	credit int64 // data bytes that we may send
	heard  time.Time
	extra  func(uint32) // also told of every credit
}

func newStream(c *Client) *stream {
	st := &stream{c: c, born: c.life(), heard: time.Now(), ready: make(chan struct{}, 1)}
	st.cond = sync.NewCond(&st.mu)
	st.ctx, st.end = context.WithCancelCause(c.ctx)
	return st
}

// deliveries hands the frames that come into the client's inbox to its streams.
// One subscription serves all: a new one for each stream would cost the bus
// more than the frames of a short exec.
type deliveries struct {
	mu      sync.Mutex
	sub     *nats.Subscription
	streams map[string]*stream // by subject
}

// listen has the frames that the host will publish on deliver queued.
func (st *stream) listen(deliver string) error {
	d := &st.c.frames
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sub == nil {
		sub, err := st.c.nc.Subscribe(st.c.me.Inbox()+".box.*", d.arrived)
		if err != nil {
			return err
		}
		d.sub, d.streams = sub, map[string]*stream{}
	}
	st.deliver = deliver
	d.streams[deliver] = st
	return nil
}

func (d *deliveries) arrived(msg *nats.Msg) {
	d.mu.Lock()
	st := d.streams[msg.Subject]
	d.mu.Unlock()
	if st != nil {
		st.arrived(msg)
	}
}

func (d *deliveries) forget(deliver string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.streams, deliver)
}

// arrived queues one message. What waits is bounded by the credit that the
// host has; a host that does not keep to it loses the stream.
func (st *stream) arrived(msg *nats.Msg) {
	st.in.Lock()
	st.queue = append(st.queue, msg)
	st.held += len(msg.Data)
	full := st.held > ringLimit
	st.in.Unlock()
	if full {
		st.lose(errSeqGap)
	}
	select {
	case st.ready <- struct{}{}:
	default:
	}
}

// pop takes the first message of the queue, or nil.
func (st *stream) pop() *nats.Msg {
	st.in.Lock()
	defer st.in.Unlock()
	if len(st.queue) == 0 {
		return nil
	}
	msg := st.queue[0]
	st.queue[0] = nil
	st.queue = st.queue[1:]
	st.held -= len(msg.Data)
	return msg
}

// begin is called when the host has answered with a stream.
func (st *stream) begin(subject string, r *boxv1.OpenReply) {
	st.subject, st.id, st.first = subject, r.GetStream(), r.GetResult()
	st.credit = int64(r.GetCredit())
	st.c.track(st)
	st.ping = time.AfterFunc(pingEvery, st.beat)
}

// beat sends a ping and judges the silence.
func (st *stream) beat() {
	if st.ctx.Err() != nil {
		return
	}
	st.mu.Lock()
	quiet := time.Since(st.heard)
	st.mu.Unlock()
	if quiet > silence {
		st.lose(errSilent)
		return
	}
	_ = st.send(&boxv1.Frame{Body: &boxv1.Frame_Ping{Ping: &boxv1.Ping{}}})
	st.ping.Reset(pingEvery)
}

// lose ends the stream with a reason; what it carried can be attached again.
func (st *stream) lose(why error) {
	st.end(lostError{why})
	st.wake()
}

// finish ends the stream with a reason for good.
func (st *stream) finish(why error) {
	st.end(why)
	go st.wake() // the caller may hold the session's lock
}

func (st *stream) wake() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.cond.Broadcast()
}

// close forgets the stream. The host is told unless the stream has ended.
func (st *stream) close(cancel *boxv1.Cancel) {
	if cancel != nil && st.id != "" {
		_ = st.send(&boxv1.Frame{Body: &boxv1.Frame_Cancel{Cancel: cancel}})
	}
	st.end(context.Canceled)
	st.wake()
	if st.ping != nil {
		st.ping.Stop()
	}
	if st.leave != nil {
		st.leave()
	}
	if st.deliver != "" {
		st.c.frames.forget(st.deliver)
	}
	st.c.untrack(st)
}

// send publishes one frame; frames leave in the order of their numbers.
func (st *stream) send(f *boxv1.Frame) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	f.Seq = st.seqOut + 1
	raw, err := proto.Marshal(f)
	if err != nil {
		return err
	}
	msg := &nats.Msg{Subject: st.subject, Data: raw, Header: nats.Header{headerStream: []string{st.id}}}
	if err := st.c.nc.PublishMsg(msg); err != nil {
		return lostError{err}
	}
	st.seqOut++
	return nil
}

// reserve waits for credit and takes up to want bytes of it.
func (st *stream) reserve(ctx context.Context, want int) (int, error) {
	stop := context.AfterFunc(ctx, st.wake)
	defer stop()
	st.mu.Lock()
	defer st.mu.Unlock()
	for st.credit <= 0 {
		if err := ctx.Err(); err != nil {
			return 0, context.Cause(ctx)
		}
		if st.ctx.Err() != nil {
			return 0, context.Cause(st.ctx)
		}
		st.cond.Wait()
	}
	n := int(min(int64(want), st.credit, chunk))
	st.credit -= int64(n)
	return n, nil
}

// recv returns the next frame that is not about the stream itself. Its error
// is lost when the stream may be attached again.
func (st *stream) recv(ctx context.Context) (*boxv1.Frame, error) {
	for {
		msg, err := st.next(ctx)
		if err != nil {
			return nil, err
		}
		f := &boxv1.Frame{}
		if err := proto.Unmarshal(msg.Data, f); err != nil {
			return nil, fmt.Errorf("read a frame of the host: %w", err)
		}
		if f.GetSeq() <= st.seqIn {
			continue
		}
		if f.GetSeq() != st.seqIn+1 {
			return nil, lostError{errSeqGap}
		}
		st.seqIn++
		st.mu.Lock()
		st.heard = time.Now()
		if c := f.GetCredit(); c != nil {
			st.credit += int64(c.GetBytes())
			st.cond.Broadcast()
		}
		extra := st.extra
		st.mu.Unlock()
		if c := f.GetCredit(); c != nil && extra != nil {
			extra(c.GetBytes())
		}
		switch b := f.GetBody().(type) {
		case *boxv1.Frame_Credit, *boxv1.Frame_Ping:
			continue
		case *boxv1.Frame_Failure:
			err := failed("", b.Failure)
			if k := KindOf(err); k == errkind.Unavailable || k == errkind.Busy || k == errkind.Canceled {
				return nil, lostError{err}
			}
			return nil, err
		}
		return f, nil
	}
}

// next takes the next message, also when the stream was lost after it came.
func (st *stream) next(ctx context.Context) (*nats.Msg, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		if msg := st.pop(); msg != nil {
			return msg, nil
		}
		select {
		case <-st.ready:
		case <-ctx.Done():
		case <-st.ctx.Done():
			if msg := st.pop(); msg != nil {
				return msg, nil
			}
			return nil, context.Cause(st.ctx)
		}
	}
}

// onCredit has f told of every credit of the host from now on.
func (st *stream) onCredit(f func(bytes uint32)) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.extra = f
}

// took pays for n bytes of data once they are with the user.
func (st *stream) took(n int) {
	st.unpaid += n
	if st.unpaid < refill {
		return
	}
	_ = st.send(&boxv1.Frame{Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: uint32(st.unpaid)}}})
	st.unpaid = 0
}

func newDeliver(c *Client) string { return c.me.Inbox() + ".box." + string(ids.NewStreamID()) }
