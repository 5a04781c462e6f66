// Package bus is Berth's bus: an embedded or external NATS server, logins and
// permissions generated from the subject catalogue, declared streams and
// consumers, publishing, consuming and RPC.
//
// Ordering: messages of one subject are stored in the order of their
// acknowledgements; a consumer with more than one worker handles them in any
// order. Redelivery: a message is handled at least once, again after a
// back-off if its handler failed, and goes to BERTH_DEAD after its ceiling;
// nothing is dropped silently. Backpressure: a consumer holds at most as many
// messages as it has workers; an RPC method runs at most its limit at once.
package bus

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// MaxPayload is the largest message on the bus in bytes.
const MaxPayload = 1 << 20

// Conn is one identity's connection. It is safe for concurrent use, reconnects
// for ever, and buffers nothing that was not acknowledged.
type Conn struct {
	nc   *nats.Conn
	js   jetstream.JetStream
	self subjects.Caller
	log  *slog.Logger

	mu      sync.Mutex
	refused map[string]time.Time // subjects that the server refused lately
	back    map[int]func()       // called after a reconnect
	backID  int
	waiting map[*waiter]struct{} // publishes that may yet be refused

	again repeats // calls that are sent again
}

// Option changes how Connect connects.
type Option func(*options)

type options struct {
	log    *slog.Logger
	extra  []nats.Option
	server *Server
	source certs.Source
	token  func() string
}

// WithLogger has the connection log to l.
func WithLogger(l *slog.Logger) Option { return func(o *options) { o.log = l } }

// WithNATS adds options of nats.go.
func WithNATS(opts ...nats.Option) Option {
	return func(o *options) { o.extra = append(o.extra, opts...) }
}

// InProcess connects through memory to a server of this process; the login is
// checked all the same.
func InProcess(s *Server) Option { return func(o *options) { o.server = s } }

// Connect logs in. It fails if the server cannot be reached, or refuses the
// login, within ctx; later losses of the connection are healed by itself.
func Connect(ctx context.Context, login Login, opts ...Option) (*Conn, error) {
	self, err := subjects.ParseName(login.Name)
	if err != nil {
		return nil, errs.E("connect to bus", errkind.Invalid, login.Name, err)
	}
	o := options{log: slog.Default()}
	for _, f := range opts {
		f(&o)
	}
	c := &Conn{self: self, log: o.log.With("bus", login.Name), refused: map[string]time.Time{}}
	nopts, err := c.natsOptions(login, o)
	if err != nil {
		return nil, errs.E("connect to bus", errkind.Invalid, login.Name, err)
	}
	if c.nc, err = dial(ctx, dialURL(login, o), nopts); err != nil {
		return nil, errs.E("connect to bus at "+login.URL, connectKind(err), login.Name, err)
	}
	c.js, err = jetstream.New(c.nc, jetstream.WithPublishAsyncMaxPending(4096),
		jetstream.WithPublishAsyncTimeout(ackWait), // else a publish that died with a stream's leader never ends
		jetstream.WithDefaultTimeout(10*time.Second))
	if err != nil {
		c.nc.Close()
		return nil, errs.E("connect to bus", errkind.Internal, login.Name, err)
	}
	return c, nil
}

func (c *Conn) natsOptions(login Login, o options) ([]nats.Option, error) {
	proof, err := login.proof(o)
	if err != nil {
		return nil, err
	}
	out := []nats.Option{
		nats.Name(login.Name),
		proof,
		nats.CustomInboxPrefix(c.self.Inbox()),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 200*time.Millisecond),
		nats.ReconnectBufSize(-1), // a publish while disconnected fails instead of pretending
		nats.Timeout(time.Second), // for one node; the next one is tried after it
		nats.PingInterval(10 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.IgnoreAuthErrorAbort(),
		nats.PermissionErrOnSubscribe(true),
		nats.ErrorHandler(c.onError),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				c.log.Warn("bus connection lost", "error", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) { c.reconnected() }),
	}
	if strings.Contains(login.URL, ",") {
		// With somewhere else to go, a node that is cut off and resets nothing
		// is left after two to three seconds.
		out = append(out, nats.PingInterval(time.Second))
	}
	if o.server != nil {
		out = append(out, nats.InProcessServer(o.server.ns), nats.PingInterval(10*time.Second))
	}
	return slices.Concat(out, login.transport(o), o.extra), nil
}

// dial tries until ctx ends, so that services may start before the server.
func dial(ctx context.Context, url string, opts []nats.Option) (*nats.Conn, error) {
	for {
		nc, err := nats.Connect(url, opts...)
		if err == nil || errors.Is(err, nats.ErrAuthorization) {
			return nc, err
		}
		if _, ok := ctx.Deadline(); !ok {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func connectKind(err error) errkind.Kind {
	// In process a refused login shows as a closed pipe.
	if errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrNkeysNotSupported) || errors.Is(err, io.ErrClosedPipe) {
		return errkind.Unauthenticated
	}
	return errkind.Unavailable
}

// NATS returns the connection below.
func (c *Conn) NATS() *nats.Conn { return c.nc }

// JetStream returns the JetStream context below.
func (c *Conn) JetStream() jetstream.JetStream { return c.js }

// Self is the identity that is logged in.
func (c *Conn) Self() subjects.Caller { return c.self }

// Close ends the connection; what was published and not acknowledged may be
// lost.
func (c *Conn) Close() { c.nc.Close() }

// Connected reports whether the connection is there now, as far as is known: a
// cut that resets nothing is noticed after two to three seconds.
func (c *Conn) Connected() bool { return c.nc.IsConnected() }

func (c *Conn) reconnected() {
	c.log.Info("bus connection is back")
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.back {
		f()
	}
}

// onReconnect has f, which must not block, called after each reconnect until
// the function that it returns is called.
func (c *Conn) onReconnect(f func()) (remove func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.backID++
	id := c.backID
	if c.back == nil {
		c.back = map[int]func(){}
	}
	c.back[id] = f
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.back, id)
	}
}

func (c *Conn) onError(_ *nats.Conn, sub *nats.Subscription, err error) {
	if errors.Is(err, nats.ErrPermissionViolation) {
		c.noteRefused(err.Error())
	}
	if sub != nil {
		c.log.Warn("bus error", "subject", sub.Subject, "error", err)
		return
	}
	c.log.Warn("bus error", "error", err)
}

const publishViolation = "permissions violation for publish to \""

// noteRefused remembers the subject of a refused publish, because its caller
// sees nothing but a time-out.
func (c *Conn) noteRefused(text string) {
	i := strings.Index(strings.ToLower(text), publishViolation)
	if i < 0 {
		return
	}
	subject, _, _ := strings.Cut(text[i+len(publishViolation):], "\"")
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.refused) > 256 {
		clear(c.refused)
	}
	c.refused[subject] = time.Now()
	for w := range c.waiting {
		if w.subject == subject {
			w.cancel()
		}
	}
}

// waiter waits for an answer to what it published.
type waiter struct {
	subject string
	cancel  context.CancelFunc
}

// failFast returns a context that ends when the server refuses a publish to
// subject, which otherwise nobody is told.
func (c *Conn) failFast(ctx context.Context, subject string) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	w := &waiter{subject, cancel}
	c.mu.Lock()
	if c.waiting == nil {
		c.waiting = map[*waiter]struct{}{}
	}
	c.waiting[w] = struct{}{}
	c.mu.Unlock()
	return ctx, func() {
		cancel()
		c.mu.Lock()
		delete(c.waiting, w)
		c.mu.Unlock()
	}
}

// wasRefused reports whether the server refused a publish to subject lately.
func (c *Conn) wasRefused(subject string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, ok := c.refused[subject]
	return ok && time.Since(t) < time.Minute
}

// failed gives an error of the bus its kind.
func (c *Conn) failed(op, subject string, err error) error {
	kind := errkind.Unavailable
	var api *jetstream.APIError
	switch {
	case errors.Is(err, nats.ErrNoResponders), errors.Is(err, jetstream.ErrNoStreamResponse):
		err = fmt.Errorf("nobody serves %s now: %w", subject, err)
	case c.wasRefused(subject):
		kind = errkind.Denied
		err = fmt.Errorf("%s may not publish to %s: %w", c.self, subject, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
		kind = errkind.Deadline
	case errors.Is(err, context.Canceled):
		kind = errkind.Canceled
	case errors.Is(err, nats.ErrMaxPayload):
		kind = errkind.TooLarge
	case errors.As(err, &api):
		kind = apiKind(api)
	}
	return errs.E(op, kind, "", err)
}

func apiKind(api *jetstream.APIError) errkind.Kind {
	switch {
	case api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence:
		return errkind.Conflict
	case api.ErrorCode == 10054: // message size exceeds the stream's maximum
		return errkind.TooLarge
	case api.Code == 404:
		return errkind.NotFound
	case strings.Contains(api.Description, "maximum"), strings.Contains(api.Description, "insufficient"):
		return errkind.Exhausted
	case api.ErrorCode == 10005: // no suitable peers: a node of the cluster is not there yet, or not any more
		return errkind.Unavailable
	case api.Code == 400:
		return errkind.Invalid
	}
	return errkind.Unavailable
}
