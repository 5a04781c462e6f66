// Package auditlog records what a service decided, beside the path of the
// request: while JetStream has no leader, requests go on and records wait. It guarantees order per Log, that nothing is dropped while the bus
// can be written within a minute, and backpressure instead of loss: when its
// queue is full, Record waits. What could not be written in time is logged as
// an error without its body.
package auditlog

import (
	"context"
	"log/slog"
	"time"

	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
)

const (
	queue    = 4096
	patience = time.Minute
	pause    = 200 * time.Millisecond
)

// Log writes audit records of one service.
type Log struct {
	conn *bus.Conn
	log  *slog.Logger
	in   chan record
	done chan struct{}
	stop context.CancelFunc
	ctx  context.Context
}

type record struct {
	ctx     context.Context
	subject string
	body    proto.Message
	at      time.Time
	id      string
	sent    bus.Future
	err     error
}

// New starts a log; Close ends it.
func New(conn *bus.Conn, log *slog.Logger) *Log {
	ctx, stop := context.WithCancel(context.Background())
	l := &Log{conn: conn, log: log, in: make(chan record, queue), done: make(chan struct{}), ctx: ctx, stop: stop}
	sent := make(chan record, queue)
	go func() {
		for r := range l.in {
			r.sent, r.err = l.publish(r)
			sent <- r
		}
		close(sent)
	}()
	go func() {
		defer close(l.done)
		for r := range sent {
			l.settle(r)
		}
	}()
	return l
}

// Record queues a record. It keeps body; ctx serves tracing only. It must not
// be called after Close.
func (l *Log) Record(ctx context.Context, subject string, body proto.Message) {
	l.in <- l.record(ctx, subject, body)
}

// Offer is Record for what may rather be lost than waited for: when the queue
// is full, after minutes without a bus that can be written, it says false.
func (l *Log) Offer(ctx context.Context, subject string, body proto.Message) bool {
	select {
	case l.in <- l.record(ctx, subject, body):
		return true
	default:
		return false
	}
}

func (l *Log) record(ctx context.Context, subject string, body proto.Message) record {
	return record{ctx: context.WithoutCancel(ctx), subject: subject, body: body, at: time.Now(), id: "audit-" + l.conn.Self().Name() + "-" + nuid.Next()}
}

func (l *Log) publish(r record) (bus.Future, error) {
	return l.conn.PublishAsync(r.ctx, r.subject, r.body, bus.WithID(r.id), bus.WithTime(r.at))
}

// settle waits for the acknowledgement and tries again for a while; the id
// makes a record that arrived after all count once.
func (l *Log) settle(r record) {
	ctx, cancel := context.WithDeadline(l.ctx, r.at.Add(patience))
	defer cancel()
	// Without a pause at first: of the many that failed while the stream had no
	// leader only the first has to wait for the next one.
	for wait := time.Duration(0); ; wait = pause {
		if r.err == nil {
			_, r.err = r.sent.Wait(ctx)
		}
		if r.err == nil {
			return
		}
		select {
		case <-ctx.Done():
			l.log.Error("audit record not written", "subject", r.subject, "id", r.id, "error", r.err)
			return
		case <-time.After(wait):
		}
		r.sent, r.err = l.publish(r)
	}
}

// Close writes what is queued until ctx ends.
func (l *Log) Close(ctx context.Context) {
	close(l.in)
	select {
	case <-l.done:
	case <-ctx.Done():
		l.stop()
		<-l.done
	}
	l.stop()
}
