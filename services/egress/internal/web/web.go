// Package web carries HTTP between a sandbox and a host that it may reach: HTTP/1.1, HTTP/2 and WebSocket,
// plain or within TLS that the gate opened. It guarantees that every request is judged by itself, that what
// could be read in two ways is refused, that requests are written anew, that a refusal explains itself to the
// person it hits, and that a secret which is put in leaves neither in an answer nor in a log.
package web

import (
	"bytes"
	"context"
	"crypto/x509"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// Conn is a connection of a sandbox on which HTTP comes.
type Conn struct {
	net.Conn
	Session session.Session
	Door    string // transparent, connect or socks5
	// Name and Port that the connection is for, which every request's Host or :authority must name. An empty
	// Name: an explicit proxy's requests in absolute form, each for its own.
	Name authority.Name
	Port uint16
	// Secure: TLS was opened by the gate; ALPN is what it agreed on: h2, or anything else for HTTP/1.1.
	Secure bool
	ALPN   string
}

// Secrets finds what rules put in. It is safe for concurrent use.
type Secrets interface {
	// Reveal is the tenant's secret of the session, with the hosts that it may be sent to.
	Reveal(ctx context.Context, s session.Session, name string) (Secret, error)
}

// Secret is one. It prints as nothing.
type Secret struct {
	Value []byte
	Hosts []authority.Name
}

// String implements fmt.Stringer.
func (Secret) String() string { return "secret" }

// GoString implements fmt.GoStringer.
func (Secret) GoString() string { return "secret" }

// Upstream dials. It is safe for concurrent use; errors are *session.Refusal where the destination is why.
type Upstream interface {
	Dial(ctx context.Context, name authority.Name, port uint16, allowed []netip.Prefix) (net.Conn, netip.Addr, error)
}

// Config of an engine.
type Config struct {
	Upstream Upstream
	// Secrets may be nil: rules that put something in then fail.
	Secrets Secrets
	// Roots that certificates of hosts are verified against; nil: those of the system.
	Roots *x509.CertPool
	// Judge and Injections ask the session's policy as it is now: for a decision, and for all that any of its
	// rules puts in. By default they ask Session.Policy.
	Judge      func(session.Session, policy.Request) policy.Decision
	Injections func(session.Session) []policy.Injection
	// MaxRequests is how many requests of one session may be under way, refused ones too; twice as many
	// connections to hosts may be dialled or open. 0: 512.
	MaxRequests int
	Log         *slog.Logger
	Now         func() time.Time
}

// The times that a client may take for a head, and be idle.
const (
	headTime = 30 * time.Second
	idleTime = 2 * time.Minute
)

// What one connection of HTTP/2 may hold here. Times bound what a client may make a refusal, and any write,
// wait.
const (
	maxHead2   = 16 << 10
	maxUpload  = 256 << 10
	maxStreams = 100
	denyTime   = 2 * time.Second
	writeTime  = 5 * time.Minute
)

// Engine serves connections. It is safe for concurrent use.
type Engine struct {
	Config
	h1        *http.Server
	accept    *handedOver
	h2        *http2.Server
	pools     pools
	scrubbers scrubbers
}

// quietLog is the output of package log without what net/http says of a host that speaks unasked: it quotes
// the host, which may know a secret.
type quietLog struct{ io.Writer }

// Write implements io.Writer.
func (q quietLog) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("Unsolicited response received on idle HTTP channel")) {
		return len(p), nil
	}
	return q.Writer.Write(p)
}

// New starts an engine; Close ends it. From then on package log keeps to itself what hosts say unasked: set
// its output before.
func New(c Config) *Engine {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.MaxRequests <= 0 {
		c.MaxRequests = 512
	}
	c.defaults()
	if _, quiet := log.Writer().(quietLog); !quiet {
		log.SetOutput(quietLog{log.Writer()})
	}
	e := &Engine{Config: c, accept: &handedOver{conns: make(chan net.Conn), closed: make(chan struct{})}}
	e.pools.engine = e
	quiet := log.New(io.Discard, "", 0) // net/http quotes what clients sent
	e.h1 = &http.Server{
		Handler: http.HandlerFunc(e.serveH1), ErrorLog: quiet, DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout: headTime, IdleTimeout: idleTime, MaxHeaderBytes: 2 * maxHead,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, linkKey{}, c.(*handed).link)
		},
	}
	e.h1.Protocols = new(http.Protocols)
	e.h1.Protocols.SetHTTP1(true)
	e.h2 = &http2.Server{MaxConcurrentStreams: maxStreams, IdleTimeout: idleTime, MaxReadFrameSize: 16 << 10,
		MaxUploadBufferPerConnection: maxUpload, MaxUploadBufferPerStream: maxUpload / 2, WriteByteTimeout: writeTime}
	go func() { _ = e.h1.Serve(e.accept) }()
	return e
}

// Close ends what is open and lets nothing begin.
func (e *Engine) Close() {
	e.accept.Close()
	_ = e.h1.Close()
	e.pools.close()
}

// Serve speaks HTTP on a connection until it ends, and closes it. When ctx ends, it is reset.
func (e *Engine) Serve(ctx context.Context, c Conn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := &link{Conn: c, ctx: ctx, pool: e.pools.open(c.Session)}
	defer l.pool.release()
	stop := context.AfterFunc(ctx, l.abort)
	defer stop()
	if c.ALPN == "h2" {
		defer c.Conn.Close()
		e.h2.ServeConn(plain{c.Conn}, &http2.ServeConnOpts{
			Context: ctx, BaseConfig: &http.Server{ErrorLog: e.h1.ErrorLog, MaxHeaderBytes: maxHead2},
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { e.handle(l, w, r) }),
		})
		cancel()
		l.requests.wait()
		return
	}
	l.strict = newStrict(plain{c.Conn})
	h := &handed{strict: l.strict, link: l}
	if !e.accept.hand(h) {
		l.abort()
		return
	}
	<-l.strict.gone
	cancel()
	l.requests.wait()
}

func (e *Engine) serveH1(w http.ResponseWriter, r *http.Request) {
	e.handle(r.Context().Value(linkKey{}).(*link), w, r)
}

// link is a connection that is served.
type link struct {
	Conn
	ctx      context.Context
	pool     *pool
	strict   *strict // of HTTP/1
	served   int     // requests of HTTP/1, one after the other
	requests requests
	marked   atomic.Pointer[marked]
}

// requests that are being served; none begins once they are waited for.
type requests struct {
	mu   sync.Mutex
	n    int
	shut chan struct{} // not nil: it is waited for, and closed when none is left
}

func (r *requests) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shut != nil {
		return false
	}
	r.n++
	return true
}

func (r *requests) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n--; r.n == 0 && r.shut != nil {
		close(r.shut)
	}
}

func (r *requests) wait() {
	r.mu.Lock()
	r.shut = make(chan struct{})
	if r.n == 0 {
		close(r.shut)
	}
	r.mu.Unlock()
	<-r.shut
}

type linkKey struct{}

// abort resets the connection, without a word of TLS or HTTP that could block.
func (l *link) abort() { hardClose(l.Conn.Conn) }

func hardClose(c net.Conn) {
	for {
		inner, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = inner.NetConn()
	}
	if t, ok := c.(interface{ SetLinger(int) error }); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

// plain hides that a connection is one of TLS: what it agreed on is in Conn.
type plain struct{ net.Conn }

// handed is a connection on its way to the HTTP/1 server.
type handed struct {
	*strict
	link *link
}

// handedOver is a listener for connections that were accepted elsewhere.
type handedOver struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (h *handedOver) hand(c net.Conn) bool {
	select {
	case h.conns <- c:
		return true
	case <-h.closed:
		return false
	}
}

// Accept implements net.Listener.
func (h *handedOver) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *handedOver) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

// Addr implements net.Listener.
func (h *handedOver) Addr() net.Addr { return &net.TCPAddr{} }
