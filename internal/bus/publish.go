package bus

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
)

// Ack is the stream's acknowledgement of a stored message.
type Ack struct {
	Stream    string
	Sequence  uint64
	Duplicate bool // the id was seen within the duplicate window; nothing was stored
}

// Future is the acknowledgement of an asynchronous publish, still to come.
type Future struct {
	f       jetstream.PubAckFuture
	conn    *Conn
	subject string
}

// Wait waits for the acknowledgement until ctx ends.
func (f Future) Wait(ctx context.Context) (Ack, error) {
	select {
	case a := <-f.f.Ok():
		return Ack{a.Stream, a.Sequence, a.Duplicate}, nil
	case err := <-f.f.Err():
		return Ack{}, f.conn.failed("publish "+f.subject, f.subject, err)
	case <-ctx.Done():
		return Ack{}, f.conn.failed("publish "+f.subject, f.subject, ctx.Err())
	}
}

// PubOption changes one publish.
type PubOption func(*pub)

type pub struct {
	id          string
	at          time.Time
	contentType string
	header      map[string]string
	opts        []jetstream.PublishOpt
}

func (p *pub) set(key, value string) {
	if p.header == nil {
		p.header = map[string]string{}
	}
	p.header[key] = value
}

// WithID sets ce-id and Nats-Msg-Id; without it the id is random. The id is
// unique within a stream's duplicate window: callers put their own name into
// it, because an id that somebody else used makes the message vanish.
func WithID(id string) PubOption { return func(p *pub) { p.id = id } }

// WithTime sets ce-time; without it the current time.
func WithTime(t time.Time) PubOption { return func(p *pub) { p.at = t } }

// WithContentType sets the content type: the form in which Publish writes the
// message, and what PublishRaw says of its body.
func WithContentType(ct string) PubOption { return func(p *pub) { p.contentType = ct } }

// WithHeader adds a header.
func WithHeader(key, value string) PubOption { return func(p *pub) { p.set(key, value) } }

// WithExpectedLast makes the publish fail with kind Conflict unless the last
// message on its subject has this sequence (0: there is none).
func WithExpectedLast(seq uint64) PubOption {
	return func(p *pub) { p.set("Nats-Expected-Last-Subject-Sequence", strconv.FormatUint(seq, 10)) }
}

// Publish stores a message and waits for the stream's acknowledgement.
func (c *Conn) Publish(ctx context.Context, subject string, m proto.Message, opts ...PubOption) (Ack, error) {
	ctx, span := publishSpan(ctx, subject)
	msg, err := c.event(ctx, subject, m, nil, opts)
	var ack Ack
	if err == nil {
		ack, err = c.publish(ctx, msg)
	}
	obs.End(span, err)
	return ack, err
}

// PublishRaw stores a body as it is.
func (c *Conn) PublishRaw(ctx context.Context, subject string, body []byte, opts ...PubOption) (Ack, error) {
	ctx, span := publishSpan(ctx, subject)
	msg, err := c.event(ctx, subject, nil, body, opts)
	var ack Ack
	if err == nil {
		ack, err = c.publish(ctx, msg)
	}
	obs.End(span, err)
	return ack, err
}

// PublishAsync sends a message and returns at once. It blocks only when 4096
// messages are unacknowledged. Messages of one Conn are stored in the order
// of the calls unless one fails.
func (c *Conn) PublishAsync(ctx context.Context, subject string, m proto.Message, opts ...PubOption) (Future, error) {
	msg, err := c.event(ctx, subject, m, nil, opts)
	if err != nil {
		return Future{}, err
	}
	return c.publishAsync(msg)
}

// PublishRawAsync is PublishAsync of a body as it is.
func (c *Conn) PublishRawAsync(ctx context.Context, subject string, body []byte, opts ...PubOption) (Future, error) {
	msg, err := c.event(ctx, subject, nil, body, opts)
	if err != nil {
		return Future{}, err
	}
	return c.publishAsync(msg)
}

func publishSpan(ctx context.Context, subject string) (context.Context, trace.Span) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return ctx, trace.SpanFromContext(ctx) // off, or nothing to be part of
	}
	return obs.Start(ctx, "publish "+subjects.EventType(subject), trace.WithSpanKind(trace.SpanKindProducer))
}

func (c *Conn) publishAsync(msg *nats.Msg) (Future, error) {
	f, err := c.js.PublishMsgAsync(msg)
	if err != nil {
		return Future{}, c.failed("publish "+msg.Subject, msg.Subject, err)
	}
	return Future{f, c, msg.Subject}, nil
}

// ackWait is how long one attempt waits. What a stream's leader had in hand
// when it died is never acknowledged; its successor is there in 4 to 8 s.
const ackWait = 3 * time.Second

// publish tries until ctx ends, or for ten seconds; the id makes a message
// that was stored after all count once while the stream remembers it.
func (c *Conn) publish(ctx context.Context, msg *nats.Msg) (Ack, error) {
	ctx, cancel := withTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx, done := c.failFast(ctx, msg.Subject)
	defer done()
	var a *jetstream.PubAck
	err := whileAway(ctx, ackWait, func(ctx context.Context) (err error) {
		a, err = c.js.PublishMsg(ctx, msg, jetstream.WithRetryAttempts(0))
		return err
	})
	if err != nil {
		return Ack{}, c.failed("publish "+msg.Subject, msg.Subject, err)
	}
	return Ack{a.Stream, a.Sequence, a.Duplicate}, nil
}

// whileAway repeats f, each time for at most once, while JetStream does not
// answer it, until ctx ends. f may have taken effect when it is repeated.
func whileAway(ctx context.Context, once time.Duration, f func(context.Context) error) error {
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		short, cancel := context.WithTimeout(ctx, once)
		err := f(short)
		cancel()
		if err == nil || ctx.Err() != nil || !away(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// away tells whether an error means that no leader is there now.
func away(err error) bool {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.Code == 503
	}
	var e *errs.Error
	if errors.As(err, &e) {
		return e.Kind == errkind.Unavailable || e.Kind == errkind.Deadline
	}
	for _, x := range []error{context.DeadlineExceeded, nats.ErrTimeout, nats.ErrNoResponders, nats.ErrDisconnected,
		nats.ErrReconnectBufExceeded, nats.ErrConnectionReconnecting, jetstream.ErrNoStreamResponse} {
		if errors.Is(err, x) {
			return true
		}
	}
	return false
}

// event makes a CloudEvents message in binary mode.
func (c *Conn) event(ctx context.Context, subject string, m proto.Message, body []byte, opts []PubOption) (*nats.Msg, error) {
	var p pub
	for _, o := range opts {
		o(&p)
	}
	if m != nil {
		var err error
		if body, err = Encode(m, p.contentType); err != nil {
			return nil, errs.Wrap("publish "+subject, "", err)
		}
	}
	if len(body) > MaxPayload-8*subjects.KiB {
		return nil, errs.Errorf("publish "+subject, errkind.TooLarge, "the body is %d bytes long", len(body))
	}
	if p.id == "" {
		p.id = nuid.Next()
	}
	if p.at.IsZero() {
		p.at = time.Now()
	}
	if p.contentType == "" {
		p.contentType = Protobuf
	}
	v := [...]string{p.id, subjects.EventType(subject), "berth/" + c.self.Name(), p.at.UTC().Format(time.RFC3339Nano), "1.0", p.contentType}
	h := nats.Header{ // of one piece of memory
		ceID:                  v[0:1:1],
		ceType:                v[1:2:2],
		ceSource:              v[2:3:3],
		ceTime:                v[3:4:4],
		ceSpec:                v[4:5:5],
		ceContentType:         v[5:6:6],
		jetstream.MsgIDHeader: v[0:1:1],
	}
	for k, v := range p.header {
		h[k] = []string{v}
	}
	obs.Inject(ctx, h)
	return &nats.Msg{Subject: subject, Header: h, Data: body}, nil
}

// ArmTimer arms, or re-arms, one timer: at the time given, exact to a few
// milliseconds, the body appears on the timer's due subject. A time that is
// past is due at once.
func (c *Conn) ArmTimer(ctx context.Context, t ids.Tenant, s ids.SessionKey, kind string, at time.Time, body proto.Message) error {
	set := subjects.TimerSet(t, s, kind)
	_, err := c.Publish(ctx, set, body,
		WithHeader("Nats-Schedule", "@at "+at.UTC().Format(time.RFC3339Nano)),
		WithHeader("Nats-Schedule-Target", subjects.TimerDue(t, s, kind)))
	return errs.Wrap("arm timer", "", err)
}

// CancelTimer removes a timer that has not fired; one that fires at this
// moment may still appear.
func (c *Conn) CancelTimer(ctx context.Context, t ids.Tenant, s ids.SessionKey, kind string) error {
	err := c.purge(ctx, "BERTH_TIMERS", subjects.TimerSet(t, s, kind))
	return errs.Wrap("cancel timer", "", err)
}
