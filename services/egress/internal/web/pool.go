package web

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// keepPool is how long connections to hosts outlive the last connection of their sandbox.
const keepPool = 10 * time.Second

// pools has the connections to hosts, parted by session: no two share one.
type pools struct {
	engine *Engine
	mu     sync.Mutex
	bySess map[string]*pool
	ended  bool
}

// pool is that of one session.
type pool struct {
	of    *pools
	key   string
	users int
	timer *time.Timer

	requests atomic.Int64 // under way
	conns    atomic.Int64 // to hosts, dialled or open
	ctx      context.Context
	end      context.CancelFunc

	mu         sync.Mutex
	transports map[string]*http.Transport
	ended      bool
}

// begin counts a request, or says that it is one too many.
func (e *pool) begin() bool {
	if e.requests.Add(1) > int64(e.of.engine.MaxRequests) {
		e.done()
		return false
	}
	return true
}

func (e *pool) done() { e.requests.Add(-1) }

// dial is counted from here to the end of the connection, and ends with the pool: net/http lets go on what was
// begun for a request that is over.
func (e *pool) dial(ctx context.Context, name authority.Name, port uint16, allowed []netip.Prefix) (net.Conn, error) {
	if e.conns.Add(1) > 2*int64(e.of.engine.MaxRequests) {
		e.conns.Add(-1)
		return nil, refuse(policy.Rate, "The session has as many connections to hosts as it may.")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	c, at, err := e.of.engine.Upstream.Dial(ctx, name, port, allowed)
	if err != nil {
		e.conns.Add(-1)
		return nil, err
	}
	d := &dialled{Conn: c, addr: at, of: e}
	d.stop = context.AfterFunc(e.ctx, func() { _ = d.Close() })
	return d, nil
}

func sessionKey(s session.Session) string {
	b := s.Binding()
	ref := b.GetSession()
	return fmt.Sprintf("%q %q %q %v %q", ref.GetTenant(), ref.GetSession(), b.GetSandbox(), ref.GetEpoch(), ref.String())
}

func (p *pools) open(s session.Session) *pool {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := sessionKey(s)
	e := p.bySess[key]
	if e == nil {
		e = &pool{of: p, key: key, transports: map[string]*http.Transport{}, ended: p.ended}
		e.ctx, e.end = context.WithCancel(context.Background())
		if p.ended {
			e.end()
		}
		if p.bySess == nil {
			p.bySess = map[string]*pool{}
		}
		p.bySess[key] = e
	}
	if e.timer != nil {
		e.timer.Stop()
		e.timer = nil
	}
	e.users++
	return e
}

// release of one user; the pool ends a while after the last.
func (e *pool) release() {
	p := e.of
	p.mu.Lock()
	defer p.mu.Unlock()
	if e.users--; e.users == 0 {
		e.timer = time.AfterFunc(keepPool, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if e.users == 0 && p.bySess[e.key] == e {
				delete(p.bySess, e.key)
				e.close()
			}
		})
	}
}

func (p *pools) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	for _, e := range p.bySess {
		if e.timer != nil {
			e.timer.Stop()
		}
		e.close()
	}
}

func (e *pool) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = true
	e.end()
	for _, t := range e.transports {
		t.CloseIdleConnections()
	}
}

// transport for requests by rules that allow the same addresses: net/http parts its connections by scheme,
// name and port.
func (e *pool) transport(h2 bool, allowed []netip.Prefix) (*http.Transport, error) {
	key := fmt.Sprint(h2, allowed)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended {
		return nil, net.ErrClosed
	}
	t := e.transports[key]
	if t == nil {
		t = e.newTransport(h2, append([]netip.Prefix(nil), allowed...))
		e.transports[key] = t
	}
	return t, nil
}

// dialled is a connection to a host that remembers the address.
type dialled struct {
	net.Conn
	addr netip.Addr
	of   *pool
	once sync.Once
	stop func() bool
}

// Close implements net.Conn.
func (d *dialled) Close() error {
	d.once.Do(func() {
		d.of.conns.Add(-1)
		if d.stop != nil {
			d.stop()
		}
	})
	return d.Conn.Close()
}

// addressOf finds it below TLS.
func addressOf(c net.Conn) string {
	for c != nil {
		if d, ok := c.(*dialled); ok {
			return d.addr.String()
		}
		inner, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return ""
		}
		c = inner.NetConn()
	}
	return ""
}

func (e *pool) newTransport(h2 bool, allowed []netip.Prefix) *http.Transport {
	next, protocols := []string{"http/1.1"}, new(http.Protocols)
	protocols.SetHTTP1(true)
	if h2 {
		next = []string{"h2", "http/1.1"}
		protocols.SetHTTP2(true)
	}
	return &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			name, port, err := authority.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			return e.dial(ctx, name, port, allowed)
		},
		TLSClientConfig: &tls.Config{
			RootCAs: e.of.engine.Roots, MinVersion: tls.VersionTLS12, NextProtos: next,
			ClientSessionCache: tls.NewLRUClientSessionCache(32),
		},
		Protocols: protocols, ForceAttemptHTTP2: h2, DisableCompression: true,
		TLSHandshakeTimeout: 15 * time.Second, ExpectContinueTimeout: time.Second, IdleConnTimeout: time.Minute,
		MaxIdleConnsPerHost: 16, MaxIdleConns: 64, MaxConnsPerHost: e.of.engine.MaxRequests, MaxResponseHeaderBytes: 256 << 10,
		ReadBufferSize: 16 << 10, WriteBufferSize: 16 << 10,
	}
}
