package bus

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/trace"
)

// A call of a service outlives a failover of that service, or of a node of
// the bus: the same bytes are sent again when the service says that it has
// begun to serve, when the connection came back, and when nobody took them.
// That is safe because every method of a service is idempotent (by request
// id, exact epoch or compare-and-swap). The first answer to any attempt that
// is an outcome is the call's.

const (
	firstPause = 10 * time.Millisecond
	mostPause  = 500 * time.Millisecond
	// young is the age below which a request is not sent again at once: it was
	// most likely sent to the very replica whose word is heard.
	young = 100 * time.Millisecond
	// settle is how long a service of which any replica answers may be
	// unknown to the bus, from when a call began or was last asked to be sent
	// again: longer than a reconnect to another node, shorter than the
	// patience of somebody whose service is not there at all.
	settle = 2 * time.Second
)

// repeats is what all repeated calls of a Conn share: one subscription for
// answers and one for the word that a service serves, made at the first call.
type repeats struct {
	mu    sync.Mutex
	inbox string // prefix of the reply subjects; empty before the first call
	last  uint64
	calls map[string]*repeated
}

// repeated is one call under way.
type repeated struct {
	id      string
	service string // of a host: host.<id>
	leader  bool
	answer  chan *nats.Msg // the outcome, once
	again   chan struct{}  // send at once
	turned  chan struct{}  // an attempt was taken by nobody

	mu   sync.Mutex
	open map[string]bool // attempts that may still be answered
	why  error           // why the last attempt was not taken
	sent int
}

// invoke calls a method of a service until it has an outcome or ctx ends.
func (c *Conn) invoke(ctx context.Context, service, subject string, body []byte) (*nats.Msg, error) {
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	ctx, span := obs.Start(ctx, "call "+spanName(subject), trace.WithSpanKind(trace.SpanKindClient))
	msg, err := c.repeat(ctx, service, subject, body)
	obs.End(span, err)
	return msg, err
}

func (c *Conn) repeat(ctx context.Context, service, subject string, body []byte) (*nats.Msg, error) {
	r, err := c.beginRepeated(service)
	if err != nil {
		return nil, c.failed("call "+subject, subject, err)
	}
	defer c.endRepeated(r)
	ctx, done := c.failFast(ctx, subject)
	defer done()
	began, pause := time.Now(), firstPause
	for {
		if err := c.attempt(ctx, r, subject, body); err != nil {
			return nil, err
		}
		sent := time.Now()
		var due <-chan time.Time
		for waiting := true; waiting; {
			select {
			case msg := <-r.answer:
				return outcome(subject, msg)
			case <-r.turned:
				if !r.leader && time.Since(began) > settle {
					return nil, r.reason()
				}
				if due == nil {
					due = time.After(pause)
					pause = min(2*pause, mostPause)
				}
			case <-due:
				waiting = false
			case <-r.again:
				began, pause = time.Now(), firstPause
				if age := time.Since(sent); age >= young {
					waiting = false
				} else if due == nil {
					due = time.After(young - age)
				}
			case <-ctx.Done():
				return c.unanswered(ctx, r, subject)
			}
		}
	}
}

// attempt sends the request once. That it could not be sent, because the
// connection is away, is like being taken by nobody.
func (c *Conn) attempt(ctx context.Context, r *repeated, subject string, body []byte) error {
	h := nats.Header{HeaderContentType: {Protobuf}}
	if d, ok := ctx.Deadline(); ok {
		left := time.Until(d)
		if left <= 0 {
			return errs.E("call "+subject, errkind.Deadline, "", context.DeadlineExceeded)
		}
		h[HeaderTimeout] = []string{strconv.FormatInt(max(left.Milliseconds(), 1), 10)}
	}
	obs.Inject(ctx, h)
	reply := r.next()
	err := c.nc.PublishMsg(&nats.Msg{Subject: subject, Reply: c.again.inbox + reply, Header: h, Data: body})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrBadSubject):
		return c.failed("call "+subject, subject, err)
	}
	r.turnedAway(reply, c.failed("call "+subject, subject, err))
	return nil
}

func outcome(subject string, msg *nats.Msg) (*nats.Msg, error) {
	if len(msg.Header[errs.HeaderCode]) > 0 {
		return nil, errs.FromHeader("call "+spanName(subject), msg.Header)
	}
	return msg, nil
}

// unanswered is the end of a call without an outcome. While an attempt may
// have been taken the effect is unknown, and the kind is Deadline; else it is
// why nobody took it.
func (c *Conn) unanswered(ctx context.Context, r *repeated, subject string) (*nats.Msg, error) {
	select {
	case msg := <-r.answer: // at the last moment
		return outcome(subject, msg)
	default:
	}
	if why := r.reason(); why != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, why
	}
	return nil, c.failed("call "+subject, subject, ctx.Err())
}

// next names an attempt; the name begins with that of the call.
func (r *repeated) next() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent++
	reply := r.id + "-" + strconv.Itoa(r.sent)
	r.open[reply] = true
	return reply
}

func (r *repeated) turnedAway(reply string, why error) {
	r.mu.Lock()
	delete(r.open, reply)
	r.why = why
	r.mu.Unlock()
	poke(r.turned)
}

// reason is why nobody took the call; nil while somebody may have.
func (r *repeated) reason() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.open) > 0 {
		return nil
	}
	return r.why
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (c *Conn) beginRepeated(service string) (*repeated, error) {
	c.again.mu.Lock()
	defer c.again.mu.Unlock()
	if c.again.inbox == "" {
		if err := c.startRepeats(); err != nil {
			return nil, err
		}
	}
	c.again.last++
	r := &repeated{
		id: strconv.FormatUint(c.again.last, 36), service: service, leader: subjects.Leader(service),
		answer: make(chan *nats.Msg, 1), again: make(chan struct{}, 1), turned: make(chan struct{}, 1),
		open: map[string]bool{},
	}
	c.again.calls[r.id] = r
	return r, nil
}

func (c *Conn) endRepeated(r *repeated) {
	c.again.mu.Lock()
	defer c.again.mu.Unlock()
	delete(c.again.calls, r.id)
}

// startRepeats subscribes; the lock is held. The word of a service is heard
// before the first request is sent, so none is missed in between.
func (c *Conn) startRepeats() error {
	inbox := c.nc.NewInbox() + "."
	answers, err := c.nc.Subscribe(inbox+"*", func(m *nats.Msg) { c.again.take(m, len(inbox)) })
	if err != nil {
		return err
	}
	_ = answers.SetPendingLimits(-1, -1) // as nats.go does for its own requests: take never blocks
	if hearsServing(c.self) {
		prefix := subjects.Serving("")
		hear := func(m *nats.Msg) { c.again.sendAgain(strings.TrimPrefix(m.Subject, prefix)) }
		if _, err := c.nc.Subscribe(subjects.Serving("*"), hear); err != nil {
			return err
		}
		if callsHosts(c.self) {
			if _, err := c.nc.Subscribe(subjects.ServingHost("*"), hear); err != nil {
				return err
			}
		}
	}
	c.onReconnect(func() { c.again.sendAgain("") })
	c.again.inbox, c.again.calls = inbox, map[string]*repeated{}
	return nil
}

// hearsServing tells who may hear that a service serves.
func hearsServing(c subjects.Caller) bool {
	return c.Role == subjects.RoleService || c.Role == subjects.RoleHost || c.Role == subjects.RoleGate || c.Role == subjects.RoleOperator
}

// callsHosts tells who may hear that a host serves: who may call one.
func callsHosts(c subjects.Caller) bool {
	return slices.ContainsFunc(subjects.Methods, func(m subjects.Method) bool { return m.Service == "host" && m.Allows(c) })
}

// take gives an answer to its call, unless it is none of the call's concern.
func (a *repeats) take(m *nats.Msg, prefix int) {
	reply := m.Subject[prefix:]
	id, _, _ := strings.Cut(reply, "-")
	a.mu.Lock()
	r := a.calls[id]
	a.mu.Unlock()
	if r == nil {
		return // it has an outcome, or nobody waits any more
	}
	if why := notTaken(m, r); why != nil {
		r.turnedAway(reply, why)
		return
	}
	select {
	case r.answer <- m:
	default: // an earlier attempt's was first
	}
}

// notTaken is why an answer is none: nobody serves, or not this replica.
func notTaken(m *nats.Msg, r *repeated) error {
	if m.Header.Get("Status") == "503" && len(m.Data) == 0 {
		return errs.E("call "+r.service, errkind.Unavailable, "", errors.Join(errors.New("nobody serves it now"), nats.ErrNoResponders))
	}
	if !r.leader || len(m.Header[errs.HeaderCode]) == 0 {
		return nil
	}
	if err := errs.FromHeader("call "+r.service, m.Header); errs.Is(err, errkind.NotLeader) {
		return err
	}
	return nil
}

// sendAgain has the calls of a service (empty: all) sent again.
func (a *repeats) sendAgain(service string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range a.calls {
		if service == "" || r.service == service {
			poke(r.again)
		}
	}
}
