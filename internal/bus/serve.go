package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
)

// ServiceConfig describes a NATS micro service.
type ServiceConfig struct {
	Name        string // as in the catalogue: a service, or "host"
	Version     string // semantic version, default 0.1.0
	Description string
	Metadata    map[string]string
	Limit       int // most requests of one method at once, default 256
}

// Service serves methods of the catalogue until Stop.
type Service struct {
	conn  *Conn
	cfg   ServiceConfig
	micro micro.Service
	base  context.Context
	stop  context.CancelFunc
	work  sync.WaitGroup
	// workers answer requests.
	workers *workers
	fails   atomic.Int64
	log     *slog.Logger

	mu       sync.Mutex
	stopped  bool
	announce *announcer           // nil without any
	retries  map[string]*Consumer // by durable name
}

// Request is one call as its handler sees it. The caller comes from the
// subject, which bus permissions bind to the login, and from nowhere else.
type Request struct {
	subjects.Call
	Subject     string
	Header      nats.Header
	ContentType string
}

// Serve registers a service; Handle adds its methods.
func (c *Conn) Serve(ctx context.Context, cfg ServiceConfig) (*Service, error) {
	cfg.Version = orDefault(cfg.Version, "0.1.0")
	if cfg.Limit <= 0 {
		cfg.Limit = 256
	}
	s := &Service{conn: c, cfg: cfg, log: c.log.With("service", cfg.Name), retries: map[string]*Consumer{}}
	s.base, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	s.workers = newWorkers(s.base.Done())
	m, err := micro.AddService(c.nc, micro.Config{
		Name: cfg.Name, Version: cfg.Version, Description: cfg.Description, Metadata: cfg.Metadata,
		StatsHandler: func(*micro.Endpoint) any { return map[string]int64{"failed": s.fails.Load()} },
	})
	if err != nil {
		s.stop()
		return nil, errs.E("serve", errkind.Internal, cfg.Name, err)
	}
	s.micro = m
	return s, errs.Wrap("serve", cfg.Name, c.nc.Flush())
}

// Handle serves one method with typed messages. The answer has the content
// type of the request. An error becomes a failed answer with its kind.
func Handle[Req, Resp proto.Message](s *Service, method string, h func(context.Context, Request, Req) (Resp, error)) error {
	return s.HandleRaw(method, func(ctx context.Context, r Request, body []byte) ([]byte, error) {
		req := newMessage[Req]()
		if err := Decode(body, r.ContentType, req); err != nil {
			return nil, err
		}
		resp, err := h(ctx, r, req)
		if err != nil {
			return nil, err
		}
		return Encode(resp, r.ContentType)
	})
}

// HandleRaw serves one method with bodies as they are. At most Limit requests
// of a method run at once; more wait in order.
func (s *Service) HandleRaw(method string, h func(context.Context, Request, []byte) ([]byte, error)) error {
	m, ok := subjects.FindMethod(s.cfg.Name, method)
	if !ok {
		return errs.E("serve", errkind.Invalid, s.cfg.Name+"."+method, "the catalogue has no such method")
	}
	slots := make(chan struct{}, s.cfg.Limit)
	name := s.cfg.Name + "." + method
	for i, subject := range m.Endpoints(s.conn.self.Host) {
		endpoint := method
		if i > 0 {
			endpoint += "-frontend"
		}
		opts := []micro.EndpointOpt{micro.WithEndpointSubject(subject), micro.WithEndpointMetadata(map[string]string{"doc": m.Doc})}
		if subjects.Leader(s.cfg.Name) {
			// No queue group: a leader that was paused is still subscribed, and
			// would be given half of its successor's requests. Whoever does not
			// lead says so, and its answer does not count.
			opts = append(opts, micro.WithEndpointQueueGroupDisabled())
		}
		err := s.micro.AddEndpoint(endpoint, micro.HandlerFunc(func(r micro.Request) {
			slots <- struct{}{}
			if !s.begin() {
				s.answer(r, name, func(context.Context, Request, []byte) ([]byte, error) {
					return nil, errs.E("serve "+name, errkind.Unavailable, "", "the service is stopping")
				})
				<-slots
				return
			}
			s.workers.run(func() {
				defer s.work.Done()
				defer func() { <-slots }()
				s.answer(r, name, h)
			})
		}), opts...)
		if err != nil {
			return errs.E("serve", errkind.Internal, s.cfg.Name+"."+method, err)
		}
	}
	// Calls are answered from here on: the server has seen the subscriptions.
	return errs.Wrap("serve", s.cfg.Name+"."+method, s.conn.nc.Flush())
}

// answer runs a handler and sends what it returned.
func (s *Service) answer(r micro.Request, name string, h func(context.Context, Request, []byte) ([]byte, error)) {
	header := nats.Header(r.Headers())
	call, err := subjects.ParseRPC(r.Subject())
	if err != nil || !call.Caller.InInbox(r.Reply()) {
		// No answer: the reply subject is not the caller's own, and an answer
		// sent there would speak in this service's name.
		s.log.Warn("dropped a call with a foreign subject or reply", "subject", r.Subject(), "reply", r.Reply())
		return
	}
	req := Request{Call: call, Subject: r.Subject(), Header: header, ContentType: contentTypeOf(header)}
	ctx, cancel := context.WithTimeout(s.base, timeoutOf(header))
	defer cancel()
	ctx, span := obs.Start(obs.Extract(ctx, header), "serve "+name, trace.WithSpanKind(trace.SpanKindServer))
	began := time.Now()
	body, err := s.run(ctx, req, r.Data(), h)
	if err != nil && subjects.Leader(s.cfg.Name) && s.stops() {
		err = errs.E(name, errkind.NotLeader, "", err) // the next leader answers
	}
	obs.End(span, err)
	recordServed(ctx, name, began, err)
	msg := &nats.Msg{Subject: r.Reply(), Data: body}
	if err == nil && len(body) > MaxPayload-subjects.KiB {
		err = errs.Errorf(name, errkind.TooLarge, "the answer is %d bytes long", len(body))
	}
	if err != nil {
		s.fails.Add(1)
		msg.Data, msg.Header = nil, nats.Header{}
		errs.ToHeader(err, msg.Header)
	} else if req.ContentType != "" {
		msg.Header = nats.Header{HeaderContentType: {req.ContentType}}
	}
	if err := s.conn.nc.PublishMsg(msg); err != nil {
		s.log.Warn("cannot answer", "subject", r.Subject(), "error", err)
	}
}

// run calls the handler and turns a panic into an error.
func (s *Service) run(ctx context.Context, r Request, body []byte, h func(context.Context, Request, []byte) ([]byte, error)) (out []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("handler panicked", "subject", r.Subject, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			out, err = nil, errs.E("handle "+r.Method, errkind.Internal, "", "the handler failed unexpectedly")
		}
	}()
	return h(ctx, r, body)
}

// maxTimeout bounds what a caller can ask for.
const maxTimeout = 10 * time.Minute

func timeoutOf(h nats.Header) time.Duration {
	ms, err := strconv.ParseInt(h.Get(HeaderTimeout), 10, 64)
	if err != nil || ms <= 0 {
		return defaultTimeout
	}
	return min(time.Duration(ms)*time.Millisecond, maxTimeout)
}

// begin counts a request in, unless the service has stopped.
func (s *Service) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	s.work.Add(1)
	return true
}

func (s *Service) stops() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopped
}

// Stop takes no new requests, waits for those that run until ctx ends, and
// then cancels them.
func (s *Service) Stop(ctx context.Context) error {
	err := errors.Join(s.micro.Stop(), s.conn.nc.FlushTimeout(5*time.Second))
	s.mu.Lock()
	s.stopped = true
	quiet := s.announce
	s.announce = nil
	s.mu.Unlock()
	if quiet != nil {
		quiet.end()
	}
	done := make(chan struct{})
	go func() { s.work.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		s.stop()
		<-done
	}
	s.stop()
	return errs.Wrap("stop service", s.cfg.Name, err)
}
