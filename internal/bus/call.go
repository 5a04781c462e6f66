package bus

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
)

// defaultTimeout bounds a call whose context has no deadline.
const defaultTimeout = 30 * time.Second

// Call calls an RPC subject and decodes the answer. A failure of the other
// side comes back as an *errs.Error with its kind; nobody serving is
// Unavailable; time running out is Deadline, and then the effect is unknown.
func Call[Resp proto.Message](ctx context.Context, c *Conn, subject string, req proto.Message) (Resp, error) {
	var zero Resp
	body, err := Encode(req, Protobuf)
	if err != nil {
		return zero, err
	}
	msg, err := c.CallRaw(ctx, subject, body, Protobuf)
	return decoded[Resp](subject, msg, err)
}

func decoded[Resp proto.Message](subject string, msg *nats.Msg, err error) (Resp, error) {
	var zero Resp
	if err != nil {
		return zero, err
	}
	resp := newMessage[Resp]()
	if err := Decode(msg.Data, contentTypeOf(msg.Header), resp); err != nil {
		return zero, errs.Wrap("answer of "+subject, "", err)
	}
	return resp, nil
}

// Invoke calls a service's method as the connection's own identity, across a
// restart of the service and the loss of a node of the bus: the request is
// sent again when the service says that it serves, and when this connection
// came back. Of a service with a leader (subjects.Leader) it also waits until
// there is one, until ctx ends; any other must be on the bus within 2 s.
func Invoke[Resp proto.Message](ctx context.Context, c *Conn, service, method string, req proto.Message) (Resp, error) {
	var zero Resp
	body, err := Encode(req, Protobuf)
	if err != nil {
		return zero, err
	}
	subject := subjects.RPC(service, method, c.self)
	msg, err := c.invoke(ctx, service, subject, body)
	return decoded[Resp](subject, msg, err)
}

// InvokeHost calls a method of one host as the connection's own identity, and
// again as Invoke does: also commands to hosts are idempotent.
func InvokeHost[Resp proto.Message](ctx context.Context, c *Conn, h ids.Host, method string, req proto.Message) (Resp, error) {
	var zero Resp
	body, err := Encode(req, Protobuf)
	if err != nil {
		return zero, err
	}
	subject := subjects.HostRPC(h, method, c.self)
	msg, err := c.invoke(ctx, "host."+string(h), subject, body)
	return decoded[Resp](subject, msg, err)
}

// InvokeGate calls a method of the gate of one host.
func InvokeGate[Resp proto.Message](ctx context.Context, c *Conn, h ids.Host, method string, req proto.Message) (Resp, error) {
	var zero Resp
	body, err := Encode(req, Protobuf)
	if err != nil {
		return zero, err
	}
	subject := subjects.GateRPC(h, method, c.self)
	msg, err := c.invoke(ctx, "gate."+string(h), subject, body)
	return decoded[Resp](subject, msg, err)
}

// CallRaw calls an RPC subject with a body as it is and returns the answer.
func (c *Conn) CallRaw(ctx context.Context, subject string, body []byte, contentType string) (*nats.Msg, error) {
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	ctx, span := obs.Start(ctx, "call "+spanName(subject), trace.WithSpanKind(trace.SpanKindClient))
	msg, err := c.callRaw(ctx, subject, body, contentType)
	obs.End(span, err)
	return msg, err
}

func (c *Conn) callRaw(ctx context.Context, subject string, body []byte, contentType string) (*nats.Msg, error) {
	h := nats.Header{HeaderContentType: {contentType}}
	if d, ok := ctx.Deadline(); ok {
		left := time.Until(d)
		if left <= 0 {
			return nil, errs.E("call "+subject, errkind.Deadline, "", context.DeadlineExceeded)
		}
		h[HeaderTimeout] = []string{strconv.FormatInt(max(left.Milliseconds(), 1), 10)}
	}
	obs.Inject(ctx, h)
	ctx, done := c.failFast(ctx, subject)
	defer done()
	msg, err := c.nc.RequestMsgWithContext(ctx, &nats.Msg{Subject: subject, Header: h, Data: body})
	if err != nil {
		return nil, c.failed("call "+subject, subject, err)
	}
	if len(msg.Header[errs.HeaderCode]) > 0 {
		return nil, errs.FromHeader("call "+spanName(subject), msg.Header)
	}
	return msg, nil
}

// spanName is an RPC subject without its variable parts: "scheduler.wake".
func spanName(subject string) string {
	rest, ok := strings.CutPrefix(subject, subjects.Prefix+"rpc.")
	if !ok {
		return "bus"
	}
	service, rest, _ := strings.Cut(rest, ".")
	if subjects.PerHost(service) {
		_, rest, _ = strings.Cut(rest, ".")
	}
	method, _, _ := strings.Cut(rest, ".")
	return service + "." + method
}

func withTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, d)
}

// newMessage makes an empty message of a generated type.
func newMessage[M proto.Message]() M {
	var zero M
	return zero.ProtoReflect().Type().New().Interface().(M)
}
