package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
)

// Msg is one stored message in the hands of a consumer.
type Msg struct {
	Subject    string
	Header     nats.Header
	Data       []byte
	Stream     string
	Sequence   uint64    // in the stream
	Deliveries int       // 1 the first time
	Stored     time.Time // by the server's clock
	Retried    bool      // an operator had it handled again from BERTH_DEAD

	ack   string
	since time.Time
}

// Decode reads the body in its content type.
func (m *Msg) Decode(into proto.Message) error {
	return Decode(m.Data, contentTypeOf(m.Header), into)
}

// ID is the CloudEvents id, empty if there is none.
func (m *Msg) ID() string { return m.Header.Get(ceID) }

// Type is the CloudEvents type, empty if there is none.
func (m *Msg) Type() string { return m.Header.Get(ceType) }

// Handler handles one message. nil acknowledges it. The kind of an error
// decides otherwise: ack, redelivery after a back-off, or BERTH_DEAD at once.
type Handler func(context.Context, *Msg) error

// ConsumerSpec says which declared consumer to run, and how.
type ConsumerSpec struct {
	subjects.Consumer
	Workers   int           // handlers at once, and most messages in hand; default 8
	Timeout   time.Duration // of one handling, default 2 minutes
	SingleAck bool          // do not wait until the server confirmed an ack (a redelivery is then likelier)
	Heartbeat time.Duration // silence of more than twice this long means that the consumer's leader is gone; default 2 s
}

// Spec returns the spec of a consumer of the catalogue; an unknown name is a
// defect of the caller.
func Spec(durable string, workers int) ConsumerSpec {
	d, ok := subjects.FindConsumer(durable)
	if !ok {
		panic("bus: consumer " + durable + " is not declared")
	}
	return ConsumerSpec{Consumer: d, Workers: workers}
}

// Consumer is a running consumer.
type Consumer struct {
	conn    *Conn
	spec    ConsumerSpec
	handler Handler
	log     *slog.Logger
	trusted bool // the stream carries CloudEvents of services only
	work    chan *Msg
	done    chan struct{}
	cancel  context.CancelFunc // stops pulling
	abort   context.CancelFunc // cancels handlers

	mu          sync.Mutex
	held        map[*Msg]struct{}
	outstanding int // asked for and not yet delivered
	heard       time.Time
	received    uint64
	floor       uint64 // last acknowledgement floor seen, a stream sequence
	trouble     chan error
	wake        chan struct{}
}

// Consume runs a declared durable consumer until ctx ends or Stop is called.
// It supervises itself: a lost connection, a missing or a stalled consumer is
// healed, the latter two by asking the keeper.
func (c *Conn) Consume(ctx context.Context, spec ConsumerSpec, h Handler) (*Consumer, error) {
	if spec.Stream == "" || spec.Durable == "" || h == nil {
		return nil, errs.E("consume", errkind.Invalid, spec.Durable, "stream, durable name and handler are needed")
	}
	if c.self.Role != subjects.RoleService {
		return nil, errs.E("consume", errkind.Denied, spec.Durable, fmt.Sprintf("%s is no service", c.self))
	}
	spec.defaults()
	stream, _ := subjects.FindStream(spec.Stream)
	k := &Consumer{
		conn: c, spec: spec, handler: h, log: c.log.With("consumer", spec.Durable),
		trusted: !stream.Untrusted,
		work:    make(chan *Msg, spec.Workers), done: make(chan struct{}),
		held: map[*Msg]struct{}{}, trouble: make(chan error, 1), wake: make(chan struct{}, 1),
	}
	pulling, cancel := context.WithCancel(ctx)
	handling, abort := context.WithCancel(context.WithoutCancel(ctx))
	k.cancel, k.abort = cancel, abort
	var workers sync.WaitGroup
	for range spec.Workers {
		workers.Go(func() { k.worker(pulling, handling) })
	}
	go k.markProgress(handling)
	go func() {
		k.supervise(pulling)
		workers.Wait()
		abort()
		k.handBack()
		close(k.done)
	}()
	return k, nil
}

func (s *ConsumerSpec) defaults() {
	if s.Workers <= 0 {
		s.Workers = 8
	}
	if s.Timeout <= 0 {
		s.Timeout = 2 * time.Minute
	}
	if s.Heartbeat <= 0 {
		s.Heartbeat = 2 * time.Second
	}
	if s.AckWait <= 0 {
		s.AckWait = 30 * time.Second
	}
	if s.MaxDeliver <= 0 {
		s.MaxDeliver = 10
	}
	if len(s.Backoff) == 0 {
		s.Backoff = []time.Duration{time.Second}
	}
}

// Stop takes no more messages, waits for the handlers until ctx ends, then
// cancels them. What was not handled is redelivered.
func (k *Consumer) Stop(ctx context.Context) {
	k.cancel()
	select {
	case <-k.done:
	case <-ctx.Done():
		k.abort()
		<-k.done
	}
}

// Done is closed when the consumer has stopped.
func (k *Consumer) Done() <-chan struct{} { return k.done }

func (k *Consumer) worker(pulling, handling context.Context) {
	for {
		select {
		case <-pulling.Done():
			return
		case m := <-k.work:
			k.process(handling, m)
			k.finish(m)
		}
	}
}

// handBack returns what nobody began.
func (k *Consumer) handBack() {
	for {
		select {
		case m := <-k.work:
			k.nak(m, 0)
			k.finish(m)
		default:
			return
		}
	}
}

func (k *Consumer) finish(m *Msg) {
	k.mu.Lock()
	delete(k.held, m)
	k.mu.Unlock()
	k.poke()
}

func (k *Consumer) poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// process handles one message and settles it.
func (k *Consumer) process(ctx context.Context, m *Msg) {
	if m.Deliveries > k.spec.MaxDeliver {
		k.bury(ctx, m, fmt.Sprintf("delivered %d times without an outcome, at most %d are allowed", m.Deliveries-1, k.spec.MaxDeliver))
		return
	}
	if k.trusted && (m.ID() == "" || m.Type() == "") {
		// Such a message was written by no publisher of ours: for one, the
		// server's own acknowledgement, steered here by a foreign reply subject.
		k.bury(ctx, m, "it is no CloudEvents message (ce-id and ce-type are missing)")
		return
	}
	began := time.Now()
	err := k.handle(ctx, m)
	recordHandled(ctx, k.spec.Durable, began, err)
	switch kind := errs.Kind(err); {
	case err == nil:
		k.ackMsg(ctx, m)
	case kind.Disposition() == errkind.Ack:
		k.log.Debug("message settled with a final answer", "subject", m.Subject, "error", err)
		k.ackMsg(ctx, m)
	case kind.Disposition() == errkind.Term:
		k.bury(ctx, m, err.Error())
	case m.Deliveries >= k.spec.MaxDeliver && ctx.Err() == nil:
		k.bury(ctx, m, fmt.Sprintf("failed %d times, the last time: %v", m.Deliveries, err))
	default:
		wait := k.spec.Backoff[min(m.Deliveries, len(k.spec.Backoff))-1]
		k.log.Info("message will be handled again", "subject", m.Subject, "deliveries", m.Deliveries, "after", wait, "error", err)
		k.nak(m, wait)
	}
}

// handle runs the handler in a trace of its own, linked to the publisher's.
func (k *Consumer) handle(ctx context.Context, m *Msg) (err error) {
	ctx, cancel := context.WithTimeout(ctx, k.spec.Timeout)
	defer cancel()
	ctx, span := obs.StartLinked(ctx, "process "+k.spec.Durable, m.Header, trace.WithSpanKind(trace.SpanKindConsumer))
	defer func() {
		if p := recover(); p != nil {
			k.log.Error("handler panicked", "subject", m.Subject, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = errs.E("handle "+m.Subject, errkind.Internal, "", fmt.Sprintf("the handler panicked: %v", p))
		}
		obs.End(span, err)
	}()
	return k.handler(ctx, m)
}

const ackTimeout = 5 * time.Second

func (k *Consumer) ackMsg(ctx context.Context, m *Msg) {
	if k.spec.SingleAck {
		k.send(m, "+ACK")
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ackTimeout)
	defer cancel()
	if _, err := k.conn.nc.RequestWithContext(ctx, m.ack, []byte("+ACK")); err != nil {
		k.log.Warn("acknowledgement not confirmed; the message may be handled again", "subject", m.Subject, "error", err)
	}
}

func (k *Consumer) nak(m *Msg, wait time.Duration) {
	if wait <= 0 {
		k.send(m, "-NAK")
		return
	}
	k.send(m, fmt.Sprintf(`-NAK {"delay": %d}`, wait.Nanoseconds()))
}

func (k *Consumer) send(m *Msg, what string) {
	if err := k.conn.nc.Publish(m.ack, []byte(what)); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		k.log.Warn("cannot settle a message; it will be redelivered", "subject", m.Subject, "error", err)
	}
}

// markProgress tells the server about every message in hand, so that none is
// redelivered while somebody works on it. A handler that ignores its own
// time-out loses the message after twice as long.
func (k *Consumer) markProgress(ctx context.Context) {
	tick := time.NewTicker(k.spec.AckWait / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		k.mu.Lock()
		for m := range k.held {
			if time.Since(m.since) < 2*k.spec.Timeout {
				k.send(m, "+WPI")
			}
		}
		k.mu.Unlock()
	}
}
