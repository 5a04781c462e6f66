package names

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	perSecond   = 200 // questions of one sandbox
	burst       = 400
	maxPeers    = 8192 // whose rates are remembered
	workers     = 64   // packets at once
	maxStreams  = 256  // TCP connections at once
	perTenant   = 64   // of them, of one tenant's sandboxes
	perSandbox  = 4    // of them, of one sandbox
	streamIdle  = 10 * time.Second
	maxQuestion = 1024 // bytes of one
)

// Server answers. It is safe for concurrent use.
type Server struct {
	find    Finder
	log     *slog.Logger
	counted func(verdict string)

	mu      sync.Mutex
	rates   map[netip.Addr]*rate.Limiter
	streams map[owner]int
	open    int
}

// New makes a server. counted, if not nil, is told of each question: "answered", "denied" or "dropped".
func New(find Finder, log *slog.Logger, counted func(string)) *Server {
	if counted == nil {
		counted = func(string) {}
	}
	return &Server{find: find, log: log, counted: counted, rates: map[netip.Addr]*rate.Limiter{}, streams: map[owner]int{}}
}

// admits reports whether a sandbox may ask now.
func (s *Server) admits(from netip.Addr) bool {
	s.mu.Lock()
	l := s.rates[from]
	if l == nil {
		if len(s.rates) >= maxPeers {
			clear(s.rates)
		}
		l = rate.NewLimiter(perSecond, burst)
		s.rates[from] = l
	}
	s.mu.Unlock()
	if l.Allow() {
		return true
	}
	s.counted("dropped")
	return false
}

// ServePacket answers packets until the socket is closed.
func (s *Server) ServePacket(ctx context.Context, c net.PacketConn) error {
	defer context.AfterFunc(ctx, func() { c.Close() })()
	slots := make(chan struct{}, workers)
	buffers := sync.Pool{New: func() any { return new([maxQuestion + 1]byte) }}
	for {
		buf := buffers.Get().(*[maxQuestion + 1]byte)
		n, peer, err := c.ReadFrom(buf[:])
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			if temporary(err) {
				continue
			}
			return err
		}
		from, ok := source(peer)
		if !ok || n > maxQuestion || !s.admits(from) {
			buffers.Put(buf)
			continue
		}
		slots <- struct{}{}
		go func() {
			defer func() { <-slots; buffers.Put(buf) }()
			if out := s.Answer(from, buf[:n], maxUDP); out != nil {
				_, _ = c.WriteTo(out, peer) // who asked asks again
			}
		}()
	}
}

// temporary reports whether a read of a socket may go well again: an earlier answer that was refused shows
// as an error of the next read.
func temporary(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.EOF)
}

func source(a net.Addr) (netip.Addr, bool) {
	switch x := a.(type) {
	case *net.UDPAddr:
		return x.AddrPort().Addr().Unmap().WithZone(""), true
	case *net.TCPAddr:
		return x.AddrPort().Addr().Unmap().WithZone(""), true
	}
	return netip.Addr{}, false
}

// Serve answers over TCP until the listener is closed.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			s.log.Warn("a connection of the resolver cannot be taken", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		from, ok := source(c.RemoteAddr())
		var b Session
		if ok {
			b, ok = s.find(from)
		}
		if !ok {
			c.Close()
			continue
		}
		sandbox, tenant := owner{sandbox: b.Binding().GetSandbox()}, owner{tenant: b.Binding().GetSession().GetTenant()}
		if !s.enter(sandbox, tenant) {
			c.Close()
			continue
		}
		wg.Go(func() {
			defer s.leave(sandbox, tenant)
			defer c.Close()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			s.stream(from, c)
		})
	}
}

// owner of streams: a sandbox, by whichever of its addresses, or a tenant.
type owner struct{ sandbox, tenant string }

func (s *Server) enter(sandbox, tenant owner) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open >= maxStreams || s.streams[sandbox] >= perSandbox || s.streams[tenant] >= perTenant {
		return false
	}
	s.open++
	s.streams[sandbox]++
	s.streams[tenant]++
	return true
}

func (s *Server) leave(of ...owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
	for _, o := range of {
		if s.streams[o]--; s.streams[o] == 0 {
			delete(s.streams, o)
		}
	}
}

// stream answers the questions of one connection, one after the other.
func (s *Server) stream(from netip.Addr, c net.Conn) {
	var head [2]byte
	for {
		if c.SetDeadline(time.Now().Add(streamIdle)) != nil {
			return
		}
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return
		}
		n := binary.BigEndian.Uint16(head[:])
		if n == 0 || n > maxQuestion {
			return
		}
		raw := make([]byte, n)
		if _, err := io.ReadFull(c, raw); err != nil || !s.admits(from) {
			return
		}
		out := s.Answer(from, raw, 4096)
		if out == nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...)); err != nil {
			return
		}
	}
}
