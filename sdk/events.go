package sdk

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// Event is something that happened to a session, a host or a pool.
type Event struct {
	Tenant  string
	Session string // key
	Host    string // of an event of a host; then there is no session
	Pool    string // template of an event of a pool; then there is neither
	Name    string // admitted, placed, active, asleep, ...; the catalogue is in schemas/subjects
	ID      string // ce-id: the same when an event is published again; may be empty
	Time    time.Time
	// Revision counts scheduler's events of one session; 0 for other services'.
	Revision uint64
	State    State // after it; empty where the event says none
	// Body is the event's own message: schedulerv1.Event, hostv1.Event, one of
	// lifecyclev1, identityv1.Attached, egressv1.Event, for a host schedulerv1.HostEvent or hostv1.Facts, or for a pool
	// poolv1.Event; nil when this version does not know it.
	Body proto.Message
	// Raw is the body as it came.
	Raw []byte
}

// RequestID is that of the request that caused the event, where it tells.
func (e Event) RequestID() string {
	switch b := e.Body.(type) {
	case *schedulerv1.Event:
		return or(or(b.GetAdmitted().GetRequestId(), b.GetActive().GetRequestId()),
			or(b.GetRenewed().GetRequestId(), b.GetDeleted().GetRequestId()))
	case *lifecyclev1.Resume:
		return b.GetRequestId()
	case *lifecyclev1.Refused:
		return b.GetRequestId()
	}
	return ""
}

// EventFilter selects events. The zero value selects all events of the
// caller's tenant from now on. A user with a login of its own names a Session,
// and hears that of the default name.
type EventFilter struct {
	Tenant  string // operators only; a frontend sees its own tenant's
	Session string // key
	Event   string // name
	// Hosts selects the events of hosts instead of those of sessions (operators only).
	Hosts bool
	// Pools selects the events of pools instead (operators only).
	Pools bool
	// Since also yields the stored events of so long ago (operators only).
	Since time.Duration
	// Stop ends after the stored events of Since.
	Stop bool
}

// Events yields events in the order of the bus until ctx ends or the loop is
// left. Without Since, what happens while the connection is down is not seen;
// with it nothing is lost. The subscription stands when Events returns.
//
// Errors: ErrInvalid, ErrDenied.
func (c *Client) Events(ctx context.Context, f EventFilter) (iter.Seq2[Event, error], error) {
	subject, err := c.eventSubject(f)
	if err != nil {
		return nil, err
	}
	if f.Since > 0 {
		return c.stored(ctx, subject, f)
	}
	sub, err := c.nc.SubscribeSync(subject)
	if err != nil {
		return nil, wrap("subscribe to events", err)
	}
	in, done := c.whileLetIn(ctx)
	if err := c.nc.FlushWithContext(deadline(in)); err != nil {
		err = causeOf(in, err)
		done()
		return nil, wrap("subscribe to events", err)
	}
	return func(yield func(Event, error) bool) {
		defer done()
		defer func() { _ = sub.Unsubscribe() }()
		for {
			msg, err := sub.NextMsgWithContext(in)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				yield(Event{}, wrap("read events", causeOf(in, err)))
				return
			}
			if e, ok := EventOf(msg.Subject, msg.Header, msg.Data); ok && !yield(e, nil) {
				return
			}
		}
	}, nil
}

// deadline gives Flush the deadline that it insists on.
func deadline(ctx context.Context) context.Context {
	if _, ok := ctx.Deadline(); ok {
		return ctx
	}
	d, cancel := context.WithTimeout(ctx, 10*time.Second)
	context.AfterFunc(d, cancel)
	return d
}

func (c *Client) eventSubject(f EventFilter) (string, error) {
	const op = "select events"
	tenant := f.Tenant
	if c.me.Role == subjects.RoleFrontend {
		if tenant != "" && tenant != string(c.me.Tenant) {
			return "", &Error{Op: op, Kind: errkind.Denied, Reason: "a frontend sees only the events of its own tenant, " + string(c.me.Tenant)}
		}
		if f.Since > 0 {
			return "", &Error{Op: op, Kind: errkind.Denied, Reason: "only an operator may read stored events"}
		}
		if f.Session == "" && subjects.IsUserFrontend(c.me.Frontend) && !f.Hosts && !f.Pools {
			return "", &Error{Op: op, Kind: errkind.Denied, Reason: "a user sees the events of its own sessions only; select one"}
		}
		tenant = string(c.me.Tenant)
	}
	for _, tok := range []string{tenant, f.Session, f.Event} {
		if tok != "" && !ids.IsToken(tok) {
			return "", invalid(op, "%q is no tenant, session key or event name", tok)
		}
	}
	switch {
	case (f.Hosts || f.Pools) && c.me.Role == subjects.RoleFrontend:
		return "", &Error{Op: op, Kind: errkind.Denied, Reason: "only an operator may read the events of hosts and pools"}
	case f.Hosts && f.Pools:
		return "", invalid(op, "events of hosts and those of pools are two selections")
	case (f.Hosts || f.Pools) && (tenant != "" || f.Session != ""):
		return "", invalid(op, "events of hosts and pools have no tenant and no session")
	case f.Pools:
		return subjects.Prefix + "pool.*." + or(f.Event, "*"), nil
	case f.Hosts:
		return subjects.Prefix + "host.*." + or(f.Event, "*"), nil
	}
	return subjects.Prefix + "session." + or(tenant, "*") + "." + or(f.Session, "*") + "." + or(f.Event, "*"), nil
}

// The streams of events.
const (
	sessionStream = "BERTH_SESSIONS"
	fleetStream   = "BERTH_FLEET"
)

// LastEvent is the newest stored event of a name of one session (operators only). ErrNotFound: none
// is stored.
func (c *Client) LastEvent(ctx context.Context, tenant, session, event string) (Event, error) {
	const op = "read the last event"
	for _, tok := range []string{tenant, session, event} {
		if !ids.IsToken(tok) {
			return Event{}, invalid(op, "%q is no tenant, session key or event name", tok)
		}
	}
	js, err := jetstream.New(c.nc)
	if err != nil {
		return Event{}, wrap(op, err)
	}
	in, done := c.whileLetIn(ctx)
	defer done()
	ctx, cancel := context.WithTimeout(in, c.cfg.Timeout)
	defer cancel()
	st, err := js.Stream(ctx, sessionStream)
	if err != nil {
		return Event{}, wrap(op, causeOf(in, err))
	}
	msg, err := st.GetLastMsgForSubject(ctx, subjects.Session(ids.Tenant(tenant), ids.SessionKey(session), event))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return Event{}, &Error{Op: op, Kind: errkind.NotFound, Reason: "no event " + event + " of this session is stored", Cause: err}
	}
	if err != nil {
		return Event{}, wrap(op, causeOf(in, err))
	}
	e, _ := EventOf(msg.Subject, msg.Header, msg.Data)
	return e, nil
}

// stored reads the stream itself.
func (c *Client) stored(ctx context.Context, subject string, f EventFilter) (iter.Seq2[Event, error], error) {
	stream := sessionStream
	if f.Hosts || f.Pools {
		stream = fleetStream
	}
	msgs, err := c.storedMessages(ctx, "read stored events", selection{stream: stream, subject: subject, since: f.Since, stop: f.Stop})
	if err != nil {
		return nil, err
	}
	return func(yield func(Event, error) bool) {
		for msg, err := range msgs {
			if err != nil {
				yield(Event{}, err)
				return
			}
			if e, ok := EventOf(msg.Subject(), msg.Headers(), msg.Data()); ok && !yield(e, nil) {
				return
			}
		}
	}, nil
}

// EventOf reads a message of the streams BERTH_SESSIONS and BERTH_FLEET; ok is
// false for a subject of another kind.
func EventOf(subject string, h nats.Header, data []byte) (e Event, ok bool) {
	var body proto.Message
	if s, err := subjects.ParseSession(subject); err == nil {
		e = Event{Tenant: string(s.Tenant), Session: string(s.Session), Name: s.Event, Raw: data}
		body = eventBody(sessionStream, s.Event)
	} else if s, err := subjects.ParseHostEvent(subject); err == nil {
		e = Event{Host: string(s.Host), Name: s.Event, Raw: data}
		body = eventBody(fleetStream, s.Event)
	} else if s, err := subjects.ParsePoolEvent(subject); err == nil {
		e = Event{Pool: string(s.Template), Name: s.Event, Raw: data}
		body = eventBody(fleetStream, s.Event)
	} else {
		return Event{}, false
	}
	e.ID = h.Get("ce-id")
	if t, err := time.Parse(time.RFC3339Nano, h.Get("ce-time")); err == nil {
		e.Time = t
	}
	if body == nil || decode(&nats.Msg{Header: h, Data: data}, body) != nil {
		return e, true
	}
	e.Body = body
	switch b := body.(type) {
	case *schedulerv1.Event:
		e.Revision, e.State = b.GetRevision(), stateWord(b.GetState())
		e.at(b.GetAt())
	case *hostv1.Event:
		e.at(b.GetAt())
	case *identityv1.Attached:
		e.at(b.GetAt())
	case *schedulerv1.HostEvent:
		e.at(b.GetAt())
	case *poolv1.Event:
		e.at(b.GetAt())
	case *egressv1.Event:
		e.at(b.GetAt())
	}
	return e, true
}

func (e *Event) at(t *timestamppb.Timestamp) {
	if t.IsValid() && t.GetSeconds() > 0 {
		e.Time = t.AsTime()
	}
}

func stateWord(s corev1.State) State { return stateOf(s) }

// eventBody makes an empty message for an event of the catalogue.
func eventBody(stream, name string) proto.Message {
	lifecycle := map[string]proto.Message{"resume": &lifecyclev1.Resume{}, "refused": &lifecyclev1.Refused{}, "idle": &lifecyclev1.Idle{},
		"expiring": &lifecyclev1.Expiring{}, "expire": &lifecyclev1.Expire{}}
	if m := lifecycle[name]; m != nil && stream == sessionStream {
		return m
	}
	for i := range subjects.Events {
		e := subjects.Events[i]
		switch {
		case e.Stream != stream || e.Name != name:
		case stream == fleetStream && e.Owner == "scheduler":
			return &schedulerv1.HostEvent{}
		case stream == fleetStream && e.Owner == "hostagent":
			return &hostv1.Facts{}
		case stream == fleetStream && e.Owner == "pool":
			return &poolv1.Event{}
		case e.Owner == "scheduler":
			return &schedulerv1.Event{}
		case e.Owner == "hostagent":
			return &hostv1.Event{}
		case e.Owner == "gate":
			return &egressv1.Event{}
		case e.Owner == "identity":
			return &identityv1.Attached{}
		}
	}
	return nil
}

// progress calls f with the events of the session that the request id names.
// The key is learned from the first event that tells the id; a user's own login
// hears nothing before it knows the key.
func (c *Client) progress(id ids.RequestID, f func(Event)) (stop func(), err error) {
	if subjects.IsUserFrontend(c.me.Frontend) {
		return func() {}, nil
	}
	subject, err := c.eventSubject(EventFilter{})
	if err != nil {
		return nil, err
	}
	var key string
	pending := map[string][]Event{} // of sessions that may turn out to be ours
	sub, err := c.nc.Subscribe(subject, func(msg *nats.Msg) {
		e, ok := EventOf(msg.Subject, msg.Header, msg.Data)
		switch {
		case !ok:
		case key == "" && e.RequestID() == string(id):
			key = e.Session
			for _, before := range pending[key] {
				f(before)
			}
			pending = nil
			f(e)
		case key == e.Session:
			f(e)
		case key == "" && len(pending[e.Session]) < 16 && len(pending) < 256:
			pending[e.Session] = append(pending[e.Session], e)
		}
	})
	if err != nil {
		return nil, err
	}
	drained := make(chan struct{})
	sub.SetClosedHandler(func(string) { close(drained) })
	return func() {
		if sub.Drain() == nil {
			select {
			case <-drained:
			case <-time.After(time.Second):
			}
		}
	}, nil
}
