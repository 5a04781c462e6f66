// Package proxy is the doors of a gate through which sandboxes go out: the transparent one, HTTP CONNECT and
// SOCKS5. It guarantees that whose a connection is follows from where it came from and from nothing that was
// said on it; that nothing is dialled before the name, the port and, with TLS, the SNI were judged as one and
// the connection is registered; that the name which was judged is the name which is dialled; that every
// connection by which something was asked for leaves one record, here or of each request in the engine; and
// that each is bounded in time, and all of them in number. What is refused is reset, or told why where the
// door has words for it. The bytes of a connection that is passed through are moved by the kernel and never
// looked at, but for a second TLS hello; while nothing moves it holds no buffer.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/services/egress/internal/mint"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/internal/upstream"
	"github.com/berth-dev/berth/services/egress/internal/web"
	"github.com/berth-dev/berth/services/egress/policy"
)

// Engine carries HTTP.
type Engine interface {
	// Serve judges, registers and records each request by itself and returns when the connection has ended or
	// ctx has. The connection under c is a *net.TCPConn that NetConn leads to, step by step.
	Serve(ctx context.Context, c web.Conn)
}

// Config of the doors. What is nil or 0 in Limits gets a default; the rest is needed.
type Config struct {
	Sessions session.Finder
	Dialer   upstream.Dialer
	Minter   mint.Minter
	Web      Engine
	// Denial is what a client of CONNECT is told of a refusal: web.Denial.
	Denial func(r policy.Request, d policy.Decision, text, accept string) (status int, contentType string, body []byte)
	Log    *slog.Logger
	Limits Limits
}

// Limits of connections.
type Limits struct {
	// All connections, those of one tenant's sandboxes, by default a quarter of All, and those of one sandbox:
	// also such that are not registered with their session, because they wait for a request.
	All        int
	PerTenant  int
	PerSandbox int
	// First bounds the time until a TLS hello, the head of a CONNECT or a SOCKS5 request is complete, and until
	// the first byte of anything.
	First time.Duration
	// Explain is how long a connection that is refused anyway may take to say that it is HTTP, which can be told
	// why.
	Explain time.Duration
	// Handshake bounds TLS that is opened here, and the first answer to TLS that is passed through.
	Handshake time.Duration
	Dial      time.Duration
	// Idle is how long a connection that is passed through may move nothing.
	Idle time.Duration
}

// Stats are totals since the start, but for Open.
type Stats struct {
	Accepted   uint64
	Open       int64
	NoIdentity uint64 // came from an address that is nobody's
	TooMany    uint64
	Denied     uint64
	Unrecorded uint64 // ended, and could not be recorded
	Panics     uint64
}

// Proxy is the doors of one gate.
type Proxy struct {
	Config
	pipes pipes

	mu      sync.Mutex
	open    int
	per     map[owner]int
	serving int

	accepted, noIdentity, tooMany, denied, unrecorded, panics atomic.Uint64
}

// New makes the doors; they are opened by the Serve methods.
func New(c Config) *Proxy {
	l := &c.Limits
	for _, d := range []struct {
		at *int
		or int
	}{{&l.All, 32768}, {&l.PerSandbox, 512}} {
		if *d.at <= 0 {
			*d.at = d.or
		}
	}
	if l.PerTenant <= 0 {
		l.PerTenant = max(l.All/4, min(l.PerSandbox, l.All))
	}
	for _, d := range []struct {
		at *time.Duration
		or time.Duration
	}{{&l.First, 30 * time.Second}, {&l.Explain, 2 * time.Second}, {&l.Handshake, 20 * time.Second}, {&l.Dial, 15 * time.Second}, {&l.Idle, time.Hour}} {
		if *d.at <= 0 {
			*d.at = d.or
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Proxy{Config: c, per: map[owner]int{}}
}

// Stats of all doors together.
func (p *Proxy) Stats() Stats {
	p.mu.Lock()
	open := p.open
	p.mu.Unlock()
	return Stats{Accepted: p.accepted.Load(), Open: int64(open), NoIdentity: p.noIdentity.Load(), TooMany: p.tooMany.Load(),
		Denied: p.denied.Load(), Unrecorded: p.unrecorded.Load(), Panics: p.panics.Load()}
}

// The doors, as records name them.
const (
	transparent = "transparent"
	connect     = "connect"
	socks5      = "socks5"
)

// ServeTransparent takes connections whose local address is where the sandbox wanted to go. It serves until ctx
// ends, then resets what is open, waits for it and returns nil; an error means that the listener is broken.
func (p *Proxy) ServeTransparent(ctx context.Context, l net.Listener) error {
	return p.serve(ctx, l, transparent, (*flow).transparent)
}

// ServeConnect takes those of clients that know an HTTP proxy; otherwise like ServeTransparent.
func (p *Proxy) ServeConnect(ctx context.Context, l net.Listener) error {
	return p.serve(ctx, l, connect, (*flow).connect)
}

// ServeSOCKS takes those of clients that know a SOCKS5 proxy; otherwise like ServeTransparent.
func (p *Proxy) ServeSOCKS(ctx context.Context, l net.Listener) error {
	return p.serve(ctx, l, socks5, (*flow).socks)
}

func (p *Proxy) serve(ctx context.Context, l net.Listener, door string, come func(*flow, context.Context)) error {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	p.begin()
	var all sync.WaitGroup
	defer p.end()
	defer all.Wait()
	defer stop()
	defer cancel()
	for {
		c, err := accept(ctx, l, p.Log)
		if ctx.Err() != nil {
			if err == nil {
				reset(c)
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept at the %s door: %w", door, err)
		}
		p.accepted.Add(1)
		all.Go(func() { p.one(ctx, c, door, come) })
	}
}

// accept waits out what passes: no file left, or a client that is gone already.
func accept(ctx context.Context, l net.Listener, log *slog.Logger) (net.Conn, error) {
	const most = time.Second
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, most) {
		c, err := l.Accept()
		var passing interface{ Temporary() bool }
		if err == nil || errors.Is(err, net.ErrClosed) || !errors.As(err, &passing) || !passing.Temporary() {
			return c, err
		}
		log.Warn("a connection could not be accepted", "error", err, "again_in", wait)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// one is the life of a connection: it is somebody's, there is room for it, it goes through the door.
func (p *Proxy) one(ctx context.Context, c net.Conn, door string, come func(*flow, context.Context)) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f := &flow{Proxy: p, client: c, door: door, began: time.Now(), cut: cut{cancel: cancel, conns: []net.Conn{c}}}
	defer f.cut.now()
	stop := context.AfterFunc(ctx, f.cut.now)
	defer stop()
	defer p.survive(door)
	from, _ := address(c.RemoteAddr())
	s, ok := p.Sessions.ByAddress(from.Addr())
	if !ok {
		p.noIdentity.Add(1)
		p.Log.Warn("a connection came from an address that is nobody's", "door", door, "reason", policy.NoIdentity)
		return
	}
	f.session = s
	sandbox, tenant := owner{sandbox: s.Binding().GetSandbox()}, owner{tenant: s.Binding().GetSession().GetTenant()}
	if !p.enter(sandbox, tenant) {
		p.tooMany.Add(1)
		at, _ := address(c.LocalAddr())
		f.port, f.asked = at.Port(), at.Addr().String()
		f.deny(refusal{protocol: policy.TCP, decision: f.own(policy.Rate), text: "the sandbox, or its tenant, has too many connections open"})
		return
	}
	defer p.leave(sandbox, tenant)
	come(f, ctx)
}

// survive keeps a fault in one connection from ending the others. What was passed to panic may hold what a
// sandbox sent, so it is not logged.
func (p *Proxy) survive(door string) {
	if v := recover(); v != nil {
		p.panics.Add(1)
		p.Log.Error("a connection met a fault in the gate", "door", door, "kind", fmt.Sprintf("%T", v), "stack", string(debug.Stack()))
	}
}

// owner of connections: a sandbox or a tenant.
type owner struct{ sandbox, tenant string }

func (p *Proxy) enter(sandbox, tenant owner) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open >= p.Limits.All || p.per[sandbox] >= p.Limits.PerSandbox || p.per[tenant] >= p.Limits.PerTenant {
		return false
	}
	p.open++
	p.per[sandbox]++
	p.per[tenant]++
	return true
}

func (p *Proxy) leave(of ...owner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open--
	for _, o := range of {
		if p.per[o]--; p.per[o] == 0 {
			delete(p.per, o)
		}
	}
}

func (p *Proxy) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.serving++
}

// end gives the pipes back with the last door.
func (p *Proxy) end() {
	p.mu.Lock()
	p.serving--
	last := p.serving == 0
	p.mu.Unlock()
	if last {
		p.pipes.drop()
	}
}

// address of a TCP connection's end, as IPv4 where it is that.
func address(a net.Addr) (netip.AddrPort, bool) {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}, false
	}
	at := t.AddrPort()
	return netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port()), true
}

// reset ends a connection so that its client sees it at once.
func reset(c net.Conn) {
	for under := c; ; {
		if t, ok := under.(interface{ SetLinger(int) error }); ok {
			_ = t.SetLinger(0)
			_ = under.Close()
			return
		}
		inner, ok := under.(interface{ NetConn() net.Conn })
		if !ok {
			_ = under.Close()
			return
		}
		under = inner.NetConn()
	}
}

// cut ends what belongs to one connection at once, from any goroutine.
type cut struct {
	mu     sync.Mutex
	done   bool
	cancel context.CancelFunc
	conns  []net.Conn
}

// add has one more connection end with the others; false: they have ended, and so has it.
func (c *cut) add(conn net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		reset(conn)
		return false
	}
	c.conns = append(c.conns, conn)
	return true
}

// now resets all. What was closed before is not concerned.
func (c *cut) now() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		return
	}
	c.done = true
	c.cancel()
	for _, conn := range c.conns {
		reset(conn)
	}
}
