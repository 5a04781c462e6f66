package proxy

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// flood sends, once it was asked to, until it cannot.
func flood(c net.Conn) {
	b := make([]byte, 64<<10)
	_, _ = c.Read(b[:1])
	for {
		if _, err := c.Write(b); err != nil {
			return
		}
	}
}

// TestRow28PolicyRevokedDuringADownload: passed through or raw, read or not read by the client.
func TestRow28PolicyRevokedDuringADownload(t *testing.T) {
	for _, reads := range []bool{true, false} {
		g := open(t, standard, Limits{})
		g.host(flood, "bytes.example.com")
		c := g.direct("bytes.example.com")
		_, _ = c.Write([]byte{1})
		b := make([]byte, 32<<10)
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		g.box.set(parse(t, "rules: []"))
		var err error
		for err == nil {
			_, err = c.Read(b)
			if !reads {
				g.box.last(t, 1) // it ends though nobody reads
			}
		}
		if took := time.Since(began); !errors.Is(err, syscall.ECONNRESET) || took > time.Second {
			t.Errorf("%v after %s, want a reset within 1s", err, took)
		}
		if r := g.recorded(1, egressv1.Verdict_VERDICT_RESET, policy.Revoked); r.GetBytesIn() < uint64(len(b)) || r.GetRule() != "bytes" {
			t.Errorf("recorded %v", r)
		}
	}
}

func TestRow28PolicyRevokedWhileDialling(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(echo, "bytes.example.com")
	wait := make(chan struct{})
	g.change(func() { g.world.wait = wait })
	defer close(wait)
	c := g.direct("bytes.example.com")
	for len(g.world.dialled()) == 0 {
		time.Sleep(time.Millisecond)
	}
	g.box.set(parse(t, "rules: []"))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	g.recorded(1, egressv1.Verdict_VERDICT_RESET, policy.Revoked)
}

func TestBytesUsedUpResets(t *testing.T) {
	g := open(t, standard, Limits{})
	g.change(func() { g.box.most = 1 << 20 })
	g.host(flood, "bytes.example.com")
	c := g.direct("bytes.example.com")
	_, _ = c.Write([]byte{1})
	n, err := io.Copy(io.Discard, c)
	if !errors.Is(err, syscall.ECONNRESET) || n > 2<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if r := g.recorded(1, egressv1.Verdict_VERDICT_RESET, policy.Bytes); r.GetBytesIn() < 1<<20 || r.GetBytesIn() > 2<<20 {
		t.Errorf("recorded %v", r)
	}
}

func TestServerThatSpeaksFirst(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(func(c net.Conn) {
		_, _ = io.WriteString(c, "220 hello\r\n")
		echo(c)
	}, "bytes.example.com")
	tunnel, status, _ := g.through(t, connectTo(g.target("bytes.example.com")))
	socks, reply := g.ask(t, "bytes.example.com", g.port())
	if status != 200 || reply != replyOK {
		t.Fatal(status, reply)
	}
	for _, c := range []net.Conn{g.direct("bytes.example.com"), tunnel, socks} {
		b := make([]byte, 11)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "220 hello\r\n" {
			t.Errorf("%q, %v", b, err)
		}
		hi(t, c)
	}
}

func TestRawBytesAreNotLookedAt(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(echo, "bytes.example.com")
	for _, what := range []string{"\x16\x03\x01\x00\x05hello", "GET / HTTP/1.1\r\n\r\n", "\x00\xff"} {
		c := g.direct("bytes.example.com")
		_, _ = io.WriteString(c, what)
		_ = c.CloseWrite()
		if b, err := io.ReadAll(c); err != nil || string(b) != what {
			t.Errorf("%q, %v", b, err)
		}
	}
}

func TestBytesThatCameWithConnectAreNotLost(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(echo, "bytes.example.com")
	c := dial(t, g.connect)
	_, _ = io.WriteString(c, connectTo(g.target("bytes.example.com"))+"early")
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "HTTP/1.1 200 Connection established\r\n\r\nearly" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestHalfCloseOfEitherSide(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(func(c net.Conn) { // the client ends first, and hears the whole answer
		b, _ := io.ReadAll(c)
		_, _ = io.WriteString(c, strings.Repeat(string(b), 1000))
	}, "bytes.example.com")
	c := g.direct("bytes.example.com")
	_, _ = io.WriteString(c, "abc")
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || len(b) != 3000 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if r := g.recorded(1, egressv1.Verdict_VERDICT_ALLOWED, policy.Allowed); r.GetBytesOut() != 3 || r.GetBytesIn() != 3000 {
		t.Errorf("recorded %v", r)
	}
	got := make(chan string, 1)
	g.host(func(c net.Conn) { // the server ends first, and hears the rest
		_ = c.(*net.TCPConn).CloseWrite()
		b, _ := io.ReadAll(c)
		got <- string(b)
	}, "bytes.example.com")
	c = g.direct("bytes.example.com")
	if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
		t.Errorf("%q, %v", b, err)
	}
	_, _ = io.WriteString(c, "rest")
	_ = c.Close()
	if b := <-got; b != "rest" {
		t.Errorf("the server heard %q", b)
	}
}

func TestResetOfTheServerIsAResetHere(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(func(c net.Conn) {
		_, _ = io.ReadFull(c, make([]byte, 1))
		reset(c)
	}, "bytes.example.com")
	c := g.direct("bytes.example.com")
	_, _ = c.Write([]byte{1})
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	g.recorded(1, egressv1.Verdict_VERDICT_ALLOWED, policy.Allowed)
}

// TestSlowLoris: a client that never finishes, or never begins, is ended in time at every door and stage,
// also when it sends a byte now and then.
func TestSlowLoris(t *testing.T) {
	const first = 300 * time.Millisecond
	g := open(t, standard, Limits{First: first, Explain: first, Handshake: first})
	g.host(func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }, "away.example.com") // never answers
	whole := hiddenHello(t, "open.example.com")
	plain := helloOf(t, "away.example.com")
	var all sync.WaitGroup
	defer all.Wait()
	for name, c := range map[string]struct {
		at   string
		said []byte
		drip byte
	}{
		"nothing":          {g.at["open.example.com"].String(), nil, 0},
		"nothing, refused": {g.at["shut.example.com"].String(), nil, 0},
		"half a hello":     {g.at["open.example.com"].String(), whole[:100], 1},
		"no handshake":     {g.at["read.example.com"].String(), helloOf(t, "read.example.com"), 0},
		"no answer":        {g.at["away.example.com"].String(), plain, 0},
		"connect, nothing": {g.connect, nil, 0},
		"connect, half":    {g.connect, []byte("CONNECT a.example.com:1 HTTP/1.1\r\nA: "), 'a'},
		"after connect":    {g.connect, []byte(connectTo(g.target("open.example.com"))), 0},
		"socks, nothing":   {g.socks, nil, 0},
		"socks, half":      {g.socks, []byte{5, 255}, 1},
		"socks, no ask":    {g.socks, []byte{5, 1, 0, 5, 1}, 0},
	} {
		conn := dial(t, c.at)
		began := time.Now()
		_, _ = conn.Write(c.said)
		if c.drip != 0 {
			go func() {
				for tick := time.NewTicker(20 * time.Millisecond); ; <-tick.C {
					if _, err := conn.Write([]byte{c.drip}); err != nil {
						return
					}
				}
			}()
		}
		all.Go(func() {
			if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) > 10*time.Second {
				t.Errorf("%s: %v after %s", name, err, time.Since(began))
			}
		})
	}
}

func helloOf(t *testing.T, name string) []byte {
	t.Helper()
	client, server := net.Pipe()
	go func() { _ = tls.Client(client, &tls.Config{ServerName: name}).Handshake() }()
	defer client.Close()
	b := make([]byte, 16<<10)
	n, err := server.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

func TestIdleConnectionEnds(t *testing.T) {
	g := open(t, standard, Limits{Idle: 200 * time.Millisecond})
	g.host(func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }, "bytes.example.com")
	c := g.direct("bytes.example.com")
	for range 10 { // one way alone keeps it
		if _, err := c.Write([]byte{1}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(40 * time.Millisecond) // what is tested is time passing
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	if r := g.recorded(1, egressv1.Verdict_VERDICT_ALLOWED, policy.Allowed); r.GetBytesOut() != 10 {
		t.Errorf("recorded %v", r)
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	g := open(t, standard, Limits{All: 5, PerTenant: 5, PerSandbox: 3})
	other := &sandbox{binding: &egressv1.Binding{Sandbox: "other"}, names: g.box.names, lives: map[*live]bool{}, changed: make(chan struct{})}
	other.policy.Store(g.box.Policy())
	g.change(func() { g.home.in[netip.MustParseAddr("127.9.1.1")] = other })
	g.host(echo, "bytes.example.com")
	var held []net.Conn
	from := func(a string) (net.Conn, bool) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(a)}}
		c, err := d.Dial("tcp", g.at["bytes.example.com"].String())
		if err != nil {
			return nil, false
		}
		t.Cleanup(func() { _ = c.Close() })
		_, _ = c.Write([]byte{1})
		_, err = io.ReadFull(c, make([]byte, 1))
		return c, err == nil
	}
	for i, c := range []struct {
		from string
		want bool
	}{{"127.0.0.1", true}, {"127.0.0.1", true}, {"127.0.0.1", true}, {"127.0.0.1", false}, {"127.9.1.1", true}, {"127.9.1.1", true}, {"127.9.1.1", false}} {
		conn, ok := from(c.from)
		if ok != c.want {
			t.Errorf("connection %d of %s: %v", i, c.from, ok)
		}
		if ok {
			held = append(held, conn)
		}
	}
	g.recorded(1, egressv1.Verdict_VERDICT_DENIED, policy.Rate)
	_ = held[0].Close()
	g.box.last(t, 2)
	if s := g.Stats(); s.TooMany != 2 {
		t.Errorf("%+v", s)
	}
}

// TestOneTenantDoesNotHoldTheGate: its sandboxes together have a share of all connections.
func TestOneTenantDoesNotHoldTheGate(t *testing.T) {
	p := New(Config{Limits: Limits{All: 40, PerSandbox: 4}})
	of := func(tenant string, i int) (owner, owner) {
		return owner{sandbox: tenant + strconv.Itoa(i)}, owner{tenant: tenant}
	}
	in := 0
	for i := range 32 {
		for range 4 {
			if s, t := of("a", i); p.enter(s, t) {
				in++
			}
		}
	}
	if in != 10 {
		t.Errorf("a tenant got %d of 40, want 10", in)
	}
	s, b := of("b", 0)
	if !p.enter(s, b) {
		t.Error("another tenant got none")
	}
	p.leave(s, b)
	s, a := of("a", 0)
	p.leave(s, a)
	if !p.enter(s, a) {
		t.Error("what was left is not free again")
	}
	if l := New(Config{}).Limits; l.PerSandbox != 512 || l.PerTenant != 8192 {
		t.Errorf("the defaults are %+v", l)
	}
}

func TestNobodysAddressIsReset(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(echo, "bytes.example.com")
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.9.1.2")}}
	if c, err := d.Dial("tcp", g.at["bytes.example.com"].String()); err == nil {
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%v, want a reset", err)
		}
		_ = c.Close()
	}
	if len(g.world.dialled()) > 0 {
		t.Error("dialled")
	}
	for g.Stats().NoIdentity != 1 {
		time.Sleep(time.Millisecond)
	}
}

func TestAThousandConnections(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(echo, "bytes.example.com")
	var all sync.WaitGroup
	var failed atomic.Int64
	for range 50 {
		all.Go(func() {
			for range 20 {
				c, err := net.Dial("tcp", g.at["bytes.example.com"].String())
				if err != nil {
					failed.Add(1)
					continue
				}
				_, _ = io.WriteString(c, strings.Repeat("x", 10_000))
				_ = c.(*net.TCPConn).CloseWrite()
				if b, err := io.ReadAll(c); err != nil || len(b) != 10_000 {
					failed.Add(1)
				}
				_ = c.Close()
			}
		})
	}
	all.Wait()
	g.box.last(t, 1000)
	if n := failed.Load(); n > 0 {
		t.Errorf("%d failed", n)
	}
	g.stop()
	if s := g.Stats(); s.Open != 0 || s.Accepted != 1000 || len(g.per) > 0 || g.pipes.bigs > 0 || len(g.box.lives) > 0 {
		t.Errorf("left over: %+v, %v, %d pipes, %d lives", s, g.per, g.pipes.bigs, len(g.box.lives))
	}
}

// TestTheEndOfTheGateResetsAll: at every stage, and waits for it.
func TestTheEndOfTheGateResetsAll(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(echo, "bytes.example.com")
	waiting, held := g.direct("open.example.com"), g.direct("bytes.example.com")
	hi(t, held)
	inside := tls.Client(g.direct("read.example.com"), &tls.Config{ServerName: "read.example.com", RootCAs: g.minted.pool})
	if err := inside.Handshake(); err != nil {
		t.Fatal(err)
	}
	<-g.pages.served
	g.stop()
	for _, c := range []net.Conn{waiting, held, inside} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%v, want a reset", err)
		}
	}
	if s := g.Stats(); s.Open != 0 {
		t.Errorf("%+v", s)
	}
}

func TestAFaultInOneConnectionEndsNoOther(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(echo, "bytes.example.com")
	held := g.direct("bytes.example.com")
	hi(t, held)
	g.pages.faulty.Store(true)
	c := g.direct("read.example.com")
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n")
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v, want a reset", err)
	}
	hi(t, held)
	if s := g.Stats(); s.Panics != 1 {
		t.Errorf("%+v", s)
	}
}

// noFiles is a listener that fails for a while.
type noFiles struct {
	fails int
	err   error
}

func (l *noFiles) Accept() (net.Conn, error) {
	if l.fails--; l.fails >= 0 {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return nil, l.err
}
func (l *noFiles) Close() error   { return nil }
func (l *noFiles) Addr() net.Addr { return &net.TCPAddr{} }

func TestNoFileLeftIsWaitedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		broken := errors.New("broken")
		err := New(Config{}).ServeTransparent(t.Context(), &noFiles{fails: 10, err: broken})
		if took := time.Since(began); !errors.Is(err, broken) || took < time.Second || took > 10*time.Second {
			t.Errorf("%v after %s", err, took)
		}
	})
}

func TestWhatCannotBeRecordedIsCounted(t *testing.T) {
	g := open(t, standard, Limits{})
	g.change(func() { g.box.away = errors.New("full") })
	c := g.direct("shut.example.com")
	_, _ = c.Write([]byte{0x16})
	_, _ = io.Copy(io.Discard, c)
	g.box.last(t, 1)
	g.stop()
	if s := g.Stats(); s.Unrecorded != 1 || s.Denied != 1 {
		t.Errorf("%+v", s)
	}
}

// TestPolicyThatChangesBetweenNeedAndOpen: what Open says counts.
func TestPolicyThatChangesBetweenNeedAndOpen(t *testing.T) {
	g := open(t, standard, Limits{})
	g.host(echo, "bytes.example.com")
	g.change(func() { g.box.refuse = &session.Refusal{Reason: policy.Revoked, Text: "the policy changed"} })
	if _, status, text := g.through(t, connectTo(g.target("bytes.example.com"))); status != 403 || !strings.Contains(text, "revoked") {
		t.Errorf("%d %s", status, text)
	}
	if d := g.world.dialled(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
}

// TestCopyWithoutSockets: what the kernel cannot move is copied with the same care.
func TestCopyWithoutSockets(t *testing.T) {
	near, client := net.Pipe()
	far, up := net.Pipe()
	s := &sandbox{lives: map[*live]bool{}, changed: make(chan struct{})}
	l := &link{flow: &flow{Proxy: New(Config{}), session: s, client: client, began: time.Now(), cut: cut{cancel: func() {}, conns: []net.Conn{client, up}}}, up: up, live: &live{s: s}}
	done := make(chan error)
	go func() { done <- l.relay() }()
	go func() { _, _ = near.Write([]byte("there")) }()
	b := make([]byte, 5)
	if _, err := io.ReadFull(far, b); err != nil || string(b) != "there" {
		t.Errorf("%q, %v", b, err)
	}
	go func() { _, _ = far.Write([]byte("again")) }()
	if _, err := io.ReadFull(near, b); err != nil || string(b) != "again" {
		t.Errorf("%q, %v", b, err)
	}
	_ = near.Close()
	<-done
	if l.out.Load() != 5 || l.in.Load() != 5 {
		t.Errorf("%d out, %d in", l.out.Load(), l.in.Load())
	}
}
