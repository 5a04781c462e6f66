package sdk

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// Headers and content types of the bus.
const (
	headerContentType = "Content-Type"
	headerReply       = "Berth-Reply"
	headerStream      = "Berth-Stream"
	headerTrace       = "traceparent"
	contentProto      = "application/protobuf"
	contentJSON       = "application/json"
)

// ask is one request to identity by either door.
type ask struct {
	op      string // for errors
	verb    string
	id      ids.RequestID
	user    TokenSource
	proof   ed25519.PublicKey
	durable bool
	limit   time.Duration // for the whole of it, all attempts
	// body makes the request; it must give the same bytes at every attempt of
	// one id.
	body func(at time.Time) proto.Message
	json []byte // the body as JSON, instead of body
	// optional: go on without a token if there is none.
	optional bool
}

func (a ask) encode(at time.Time) (raw []byte, contentType string, err error) {
	if a.json != nil {
		return a.json, contentJSON, nil
	}
	raw, err = proto.MarshalOptions{Deterministic: true}.Marshal(a.body(at))
	return raw, contentProto, err
}

// do asks until there is an answer, the failure is final, or ctx ends.
func (c *Client) do(ctx context.Context, a ask) (*identityv1.Reply, error) {
	ctx, cancel := context.WithTimeout(ctx, a.limit)
	defer cancel()
	reply, err := newKey()
	if err != nil {
		return nil, wrap(a.op, err)
	}
	ctx, span := c.span(ctx, "berth "+a.verb)
	defer span.End()
	var why error // what the platform last said
	for n := 0; ; n++ {
		r, err := c.attempt(ctx, a, reply)
		if err == nil {
			return r, nil
		}
		if ctx.Err() != nil {
			return nil, wrap(a.op, inTime(err, why))
		}
		if !again(err) || c.forgetKey(err) && n > 3 {
			return nil, wrap(a.op, err)
		}
		why = err
		if err := pause(ctx, n); err != nil {
			return nil, wrap(a.op, inTime(err, why))
		}
	}
}

// inTime is why a request did not end in time: rather what the platform said before than that time ran
// out.
func inTime(err, why error) error {
	if e := (*Error)(nil); errors.Is(err, context.DeadlineExceeded) && errors.As(why, &e) && e.Reason != "" {
		return why
	}
	return err
}

// again reports whether a request that failed so is sent once more: when whether it was handled is
// not known, or nobody was there to handle it. The request id keeps it from being handled twice.
func again(err error) bool {
	e := (*Error)(nil)
	if !errors.As(err, &e) {
		return false
	}
	switch e.Kind {
	case errkind.NotLeader, errkind.Unavailable:
		return true
	case errkind.Deadline:
		return e.Cause != nil // ours, not the platform's answer
	}
	return errors.Is(err, errSealUnread)
}

// errSealUnread: identity could not open the envelope, perhaps because its
// key was rotated.
var errSealUnread = errors.New("identity could not open the sealed request")

func (c *Client) forgetKey(err error) bool {
	if !errors.Is(err, errSealUnread) {
		return false
	}
	c.mu.Lock()
	c.key = ""
	c.mu.Unlock()
	return true
}

// pause waits a little longer after each attempt.
func pause(ctx context.Context, n int) error {
	d := min(50*time.Millisecond<<min(n, 6), 2*time.Second)
	t := time.NewTimer(d/2 + rand.N(d/2+1))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

func (c *Client) attempt(ctx context.Context, a ask, reply seal.XKey) (*identityv1.Reply, error) {
	body, err := c.sealAsk(ctx, a, reply)
	if err != nil {
		return nil, err
	}
	var msg *nats.Msg
	if a.durable {
		msg, err = c.knockDurable(ctx, a, body)
	} else {
		msg, err = c.request(ctx, subjects.RPC("identity", a.verb, c.me), body)
	}
	if err != nil {
		return nil, wrap(a.op, err)
	}
	return openAnswer(a.op, msg, reply)
}

// sealAsk makes the encoded SealedRequest of a; the answer is for reply.
func (c *Client) sealAsk(ctx context.Context, a ask, reply seal.XKey) ([]byte, error) {
	req, err := c.sealedRequest(ctx, a, reply)
	if err != nil {
		return nil, err
	}
	raw, err := proto.Marshal(req)
	return raw, wrap(a.op, err)
}

func (c *Client) sealedRequest(ctx context.Context, a ask, reply seal.XKey) (*identityv1.SealedRequest, error) {
	if a.user == nil {
		a.user = c.cfg.User
	}
	if a.user == nil {
		return nil, invalid(a.op, "no user: neither the call nor the Config has a token source")
	}
	if c.me.Role != subjects.RoleFrontend {
		return nil, invalid(a.op, "%s is no frontend; only a frontend can ask for sessions", c.me.Name())
	}
	token, err := a.user(ctx)
	if err != nil && !a.optional {
		return nil, &Error{Op: a.op, Kind: errkind.Unauthenticated, Reason: "get the user's token: " + err.Error(), Cause: err}
	}
	key, err := c.curveKey(ctx)
	if err != nil {
		return nil, err
	}
	env, err := envelope(a, token, reply)
	if err != nil {
		return nil, wrap(a.op, err)
	}
	sealed, sender, err := sealTo(c.sender, env, key)
	if err != nil {
		return nil, wrap(a.op, err)
	}
	return &identityv1.SealedRequest{Sealed: sealed, Sender: sender}, nil
}

// envelope is everything that a request says, still in the clear.
func envelope(a ask, token string, reply seal.XKey) (*identityv1.Envelope, error) {
	at := time.Now()
	raw, kind, err := a.encode(at)
	if err != nil {
		return nil, err
	}
	hash := sha256.Sum256(raw)
	return &identityv1.Envelope{
		Token: token, RequestId: string(a.id), Verb: a.verb, BodyHash: hash[:], Time: timestamppb.New(at),
		ReplyKey: string(reply.Public()), ProofKey: a.proof, Body: raw, ContentType: kind,
	}, nil
}

// knockDurable publishes on the durable door and waits for the outcome.
func (c *Client) knockDurable(ctx context.Context, a ask, body []byte) (*nats.Msg, error) {
	inbox := c.nc.NewInbox()
	sub, err := c.nc.SubscribeSync(inbox)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sub.Unsubscribe() }()
	ctx, done := c.underWay(ctx, inbox) // an outcome that came during a reconnect is asked for again
	defer done()
	if err := c.store(ctx, a.verb, body, inbox); err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, 3*c.cfg.Timeout)
	defer cancel()
	m, err := sub.NextMsgWithContext(wait)
	return m, causeOf(ctx, err)
}

// store publishes a sealed request into BERTH_REQUESTS; nil means that it is
// stored and synced.
func (c *Client) store(ctx context.Context, verb string, body []byte, reply string) error {
	js, err := jetstream.New(c.nc)
	if err != nil {
		return err
	}
	subject := subjects.Request(c.me.Tenant, c.me.Frontend, verb)
	msg := &nats.Msg{Subject: subject, Data: body, Header: nats.Header{}}
	msg.Header.Set(headerContentType, contentProto)
	if reply != "" {
		msg.Header.Set(headerReply, reply)
	}
	inject(ctx, msg.Header)
	ctx, done := c.underWay(ctx, subject)
	defer done()
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	_, err = js.PublishMsg(ctx, msg)
	return causeOf(ctx, err)
}

// request is one attempt of a call of a micro endpoint.
func (c *Client) request(ctx context.Context, subject string, body []byte) (*nats.Msg, error) {
	msg := &nats.Msg{Subject: subject, Data: body, Header: nats.Header{}}
	msg.Header.Set(headerContentType, contentProto)
	inject(ctx, msg.Header)
	ctx, done := c.underWay(ctx, subject)
	defer done()
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	resp, err := c.nc.RequestMsgWithContext(ctx, msg)
	if errors.Is(err, nats.ErrConnectionClosed) && !c.nc.IsClosed() {
		return nil, interrupted()
	}
	if err != nil {
		return nil, causeOf(ctx, err)
	}
	return resp, nil
}

// interrupted: whether the request was handled is unknown.
func interrupted() error {
	return &Error{Kind: errkind.Deadline, Reason: errReconnected.Error(), Cause: errReconnected}
}

// causeOf prefers why a context was cancelled to the fact that it was.
func causeOf(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) {
		return cause
	}
	return err
}

// Call is a plain call of a micro endpoint, for operators' tools. Every method of scheduler may be
// repeated without harm: while its leader is replaced, or the connection is, the call is sent again
// for as long as one attempt may take, and once more.
func (c *Client) Call(ctx context.Context, service, method string, in, out proto.Message) error {
	op := service + " " + method
	if _, ok := subjects.FindMethod(service, method); !ok {
		return invalid(op, "there is no such method")
	}
	repeat := nobody
	if subjects.Leader(service) {
		repeat = again
	}
	return c.call(ctx, op, subjects.RPC(service, method, c.me), in, out, repeat)
}

// nobody reports whether a call reached nobody.
func nobody(err error) bool { return errors.Is(err, nats.ErrNoResponders) }

// CallHost is a plain call of a micro endpoint of one host, for operators' tools.
func (c *Client) CallHost(ctx context.Context, host, method string, in, out proto.Message) error {
	op := "host " + method
	h, err := ids.ParseHost(host)
	if err != nil {
		return wrap(op, err)
	}
	if _, ok := subjects.FindMethod("host", method); !ok {
		return invalid(op, "there is no such method")
	}
	return c.call(ctx, op, subjects.HostRPC(h, method, c.me), in, out, nobody)
}

func (c *Client) call(ctx context.Context, op, subject string, in, out proto.Message, repeat func(error) bool) error {
	body, err := proto.Marshal(in)
	if err != nil {
		return wrap(op, err)
	}
	started := time.Now()
	for n := 0; ; n++ {
		err := c.callOnce(ctx, op, subject, body, out)
		if err == nil || ctx.Err() != nil || !repeat(err) || time.Since(started) > c.cfg.Timeout {
			return err
		}
		if err := pause(ctx, n); err != nil {
			return wrap(op, err)
		}
	}
}

func (c *Client) callOnce(ctx context.Context, op, subject string, body []byte, out proto.Message) error {
	msg, err := c.request(ctx, subject, body)
	if err != nil {
		return wrap(op, err)
	}
	if err := headerError(op, msg.Header); err != nil {
		return err
	}
	return wrap(op, decode(msg, out))
}

// decode reads a message as its content type says; protobuf is the default.
func decode(msg *nats.Msg, out proto.Message) error {
	ct := or(msg.Header.Get(headerContentType), msg.Header.Get("ce-datacontenttype"))
	if strings.HasPrefix(ct, contentJSON) {
		return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(msg.Data, out)
	}
	return proto.Unmarshal(msg.Data, out)
}

// curveKey returns identity's public curve key; it is fetched once.
func (c *Client) curveKey(ctx context.Context) (string, error) {
	c.mu.Lock()
	key := c.key
	c.mu.Unlock()
	if key != "" {
		return key, nil
	}
	const op = "get identity's key"
	msg, err := c.request(ctx, subjects.RPC("identity", "keys", c.me), nil)
	if err != nil {
		return "", wrap(op, err)
	}
	if err := headerError(op, msg.Header); err != nil {
		return "", err
	}
	r := &identityv1.KeysReply{}
	if err := decode(msg, r); err != nil {
		return "", wrap(op, err)
	}
	if _, err := seal.ParsePublic(r.GetCurveKey()); err != nil {
		return "", &Error{Op: op, Kind: errkind.Internal, Reason: "the answer holds no curve key"}
	}
	c.mu.Lock()
	c.key = r.GetCurveKey()
	c.mu.Unlock()
	return r.GetCurveKey(), nil
}

// openAnswer opens a sealed answer and returns it unless it is a failure.
func openAnswer(op string, msg *nats.Msg, key seal.XKey) (*identityv1.Reply, error) {
	if err := headerError(op, msg.Header); err != nil {
		return nil, err
	}
	s := &identityv1.SealedReply{}
	if err := decode(msg, s); err != nil {
		return nil, wrap(op, err)
	}
	if len(s.GetSealed()) == 0 {
		f := s.GetFailure()
		return nil, &Error{Op: op, Kind: kindByName(f.GetKind()), Reason: f.GetReason(), Cause: errSealUnread}
	}
	r := &identityv1.Reply{}
	if err := openSealed(s.GetSealed(), s.GetSender(), key.Open, r); err != nil {
		return nil, wrap(op, err)
	}
	if f := r.GetFailure(); f != nil {
		return nil, failed(op, f)
	}
	return r, nil
}
