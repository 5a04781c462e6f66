package box

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// Bus is the part of a NATS connection that the data plane needs; *nats.Conn is one.
type Bus interface {
	Publish(subject string, data []byte) error
	Subscribe(subject string, handler nats.MsgHandler) (*nats.Subscription, error)
}

// Config of a server. All fields but Log and Ended are needed.
type Config struct {
	Bus  Bus
	Host ids.Host
	// Key is the host's curve key: openings are sealed to it.
	Key seal.XKey
	// Grants knows what grants are checked with and which are revoked. It is run from the first session
	// that is served until Close.
	Grants *grant.Feed
	Log    *slog.Logger
	// Ended is told of every operation that was admitted, for metrics.
	Ended func(op string, took time.Duration, err error)
}

// Server serves the data plane of all sessions that are awake on the host.
type Server struct {
	cfg Config
	// key opens openings. answers seals the answers to them: made at the start and stored nowhere,
	// so that the host's key, should it leak, opens no answer of the past.
	key, answers *seal.Box
	replay       *grant.Replay

	mu    sync.Mutex
	boxes map[ids.SessionKey]*Box
	stop  chan struct{}
	once  sync.Once
	feed  sync.Once
	open  atomic.Int64
	// quick is how long a checkpoint may take to be answered without a stream, longest how long at all.
	quick, longest time.Duration
}

// Bounds of the memory of nonces: openings of the last minutes on this host, and of one session.
const (
	maxNonces        = 2 << 20
	maxNoncesSession = 200_000
)

// New makes a server; Close ends it.
func New(cfg Config) (*Server, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Ended == nil {
		cfg.Ended = func(string, time.Duration, error) {}
	}
	key, err := seal.NewBox(cfg.Key)
	if err != nil {
		return nil, errs.E("serve data plane", errkind.Invalid, cfg.Host.String(), err)
	}
	answers, err := seal.RandomBox()
	if err != nil {
		return nil, errs.E("serve data plane", errkind.Internal, cfg.Host.String(), err)
	}
	s := &Server{
		cfg: cfg, key: key, answers: answers, replay: grant.NewReplay(maxNonces, maxNoncesSession),
		boxes: map[ids.SessionKey]*Box{}, stop: make(chan struct{}),
		quick: quickCheckpoint, longest: longestCheckpoint,
	}
	go s.watch()
	return s, nil
}

// Close ends every stream.
func (s *Server) Close() {
	s.once.Do(func() { close(s.stop) })
	for _, b := range s.all() {
		b.Close("the host is stopping; attach again soon")
	}
}

// Streams counts the open streams.
func (s *Server) Streams() int { return int(s.open.Load()) }

func (s *Server) all() []*Box {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*Box, 0, len(s.boxes))
	for _, b := range s.boxes {
		out = append(out, b)
	}
	return out
}

// watch pings, gives silent clients up, and asks for the end of execs that nobody is attached to.
func (s *Server) watch() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-s.stop:
			return
		case <-tick.C:
		}
		for _, b := range s.all() {
			b.tend(time.Now(), n%int(PingEvery/time.Second) == 0)
		}
	}
}

// Box is the data plane of one session in one epoch.
type Box struct {
	srv   *Server
	want  grant.Binding
	guest *hostend.Conn
	gate  Gate
	log   *slog.Logger
	ctx   context.Context
	stop  context.CancelCauseFunc
	subs  []*nats.Subscription

	openings atomic.Int32
	exports  atomic.Int32
	work     sync.WaitGroup
	mu       sync.Mutex
	streams  map[ids.StreamID]*stream
	saves    map[string]*saving // checkpoints under way, by the client's key
	killed   map[string]bool    // execs that ended by SIGKILL: was it for memory?
	closed   bool
	execs    tracker
	seen     grants
	holders  holders
}

// Serve begins to answer openings for a session that is awake. running are the keys of execs that
// the guest runs already; each holds a piece of work of gate until it ends.
func (s *Server) Serve(want grant.Binding, guest *hostend.Conn, gate Gate, running []string) (*Box, error) {
	b := &Box{srv: s, want: want, guest: guest, gate: gate, streams: map[ids.StreamID]*stream{}, saves: map[string]*saving{}, killed: map[string]bool{}}
	b.log = s.cfg.Log.With("session", want.Session, "epoch", want.Epoch)
	b.ctx, b.stop = context.WithCancelCause(context.Background())
	b.execs.init(b)
	s.feed.Do(s.listen)
	for _, key := range running {
		if err := b.execs.adopt(b.ctx, key); err != nil {
			b.Close("")
			return nil, err
		}
	}
	for method, handler := range map[string]nats.MsgHandler{"open": b.opening, "in": b.frame} {
		sub, err := s.cfg.Bus.Subscribe(subjects.BoxSubject(want.Session, want.Epoch, method), handler)
		if err != nil {
			b.Close("")
			return nil, errs.E("serve data plane", errkind.Unavailable, want.Session.String(), err)
		}
		b.subs = append(b.subs, sub)
	}
	s.mu.Lock()
	s.boxes[want.Session] = b
	s.mu.Unlock()
	return b, nil
}

// Close ends every stream with why, and waits for what is under way. Execs go on.
func (b *Box) Close(why string) {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return
	}
	b.closed = true
	b.mu.Unlock()
	open := b.open()
	for _, sub := range b.subs {
		_ = sub.Drain() // what has come already is answered, with a refusal
	}
	err := errs.E("stream", errkind.Unavailable, "", why)
	for _, st := range open {
		st.fail(err)
	}
	b.stop(err)
	b.work.Wait()
	b.execs.close()
	b.srv.mu.Lock()
	if b.srv.boxes[b.want.Session] == b {
		delete(b.srv.boxes, b.want.Session)
	}
	b.srv.mu.Unlock()
}

// open lists the streams.
func (b *Box) open() []*stream {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]*stream, 0, len(b.streams))
	for _, st := range b.streams {
		out = append(out, st)
	}
	return out
}

// frame takes a frame of a client; it does not block.
func (b *Box) frame(m *nats.Msg) {
	b.mu.Lock()
	st := b.streams[ids.StreamID(m.Header.Get(streamHeader))]
	b.mu.Unlock()
	if st == nil {
		return // it ended, or never was; there is nobody to tell
	}
	f, err := decodeFrame(m.Data)
	if err == nil {
		err = st.take(f)
	}
	if err != nil {
		st.fail(err)
	}
}

// opening begins to handle a request; it does not block.
func (b *Box) opening(m *nats.Msg) {
	if !mayAnswer(m.Reply) {
		return
	}
	if b.openings.Add(1) > maxOpenings {
		b.openings.Add(-1)
		b.refuse(m.Reply, errs.E(opOpen, errkind.Exhausted, "", "too many openings of this session at once"))
		return
	}
	b.mu.Lock()
	closed := b.closed
	if !closed {
		b.work.Add(1)
	}
	b.mu.Unlock()
	if closed {
		b.openings.Add(-1)
		b.refuse(m.Reply, errs.E(opOpen, errkind.Unavailable, "", "the session is not served here at this moment"))
		return
	}
	go func() {
		defer b.work.Done()
		b.handle(m)
	}()
}

// refuse answers in the clear somebody whose reply key is not known; it names nobody.
func (b *Box) refuse(reply string, err error) {
	raw, merr := proto.Marshal(&boxv1.SealedOpenReply{Failure: failure(err)})
	if merr == nil {
		merr = b.srv.cfg.Bus.Publish(reply, raw)
	}
	if merr != nil {
		b.log.Debug("could not answer an opening", "error", merr)
	}
}

// tend looks after the streams and execs once a second.
func (b *Box) tend(now time.Time, ping bool) {
	b.holders.forget(now)
	for _, st := range b.open() {
		if st.silent(now) > GoneAfter {
			st.mute(errGone)
		} else if err := b.holders.expired(st.claims, now); err != nil {
			st.fail(err)
		} else if ping {
			st.ping()
		}
	}
	for _, key := range b.execs.overdue(now) {
		go b.detach(key)
	}
	b.execs.poll()
}
