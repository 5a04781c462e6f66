package proxy

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/internal/web"
	"github.com/berth-dev/berth/services/egress/policy"
)

// sandbox is a session in memory.
type sandbox struct {
	binding *egressv1.Binding
	policy  atomic.Pointer[policy.Policy]
	asked   chan struct{} // gets one for each time that the policy was asked for
	most    int64         // bytes that may move; 0: all

	mu      sync.Mutex
	names   map[netip.Addr]authority.Name
	lives   map[*live]bool
	records []*egressv1.Record
	changed chan struct{} // closed and made anew with every record
	refuse  error
	away    error // of Note
	kept    int   // told Unrecorded
	atNote  int   // open when the last record came
}

type live struct {
	s     *sandbox
	req   policy.Request
	reset func()
	moved atomic.Int64
	over  atomic.Bool
}

func (s *sandbox) Binding() *egressv1.Binding { return s.binding }

func (s *sandbox) Policy() *policy.Policy {
	now := s.policy.Load()
	select {
	case s.asked <- struct{}{}: // a policy that is set from here on is in the next answer only
	default:
	}
	return now
}

func (s *sandbox) NameOf(a netip.Addr) (authority.Name, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.names[a]
	return n, ok
}

func (s *sandbox) Open(r policy.Request, _ policy.Decision, reset func()) (session.Live, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse != nil {
		return nil, s.refuse
	}
	if d := s.Policy().Judge(r); !d.Allowed {
		return nil, &session.Refusal{Reason: d.Reason, Text: "not allowed"}
	}
	l := &live{s: s, req: r, reset: reset}
	s.lives[l] = true
	return l, nil
}

func (s *sandbox) Note(r *egressv1.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.atNote = len(s.lives)
	s.records = append(s.records, proto.CloneOf(r))
	close(s.changed)
	s.changed = make(chan struct{})
	return s.away
}

// set puts a policy in force and resets what it does not allow.
func (s *sandbox) set(p *policy.Policy) {
	s.mu.Lock()
	s.policy.Store(p)
	var out []*live
	for l := range s.lives {
		if !p.Judge(l.req).Allowed {
			out = append(out, l)
		}
	}
	s.mu.Unlock()
	for _, l := range out {
		l.over.Store(true)
		l.reset()
	}
}

// last waits for the n-th record.
func (s *sandbox) last(t testing.TB, n int) *egressv1.Record {
	t.Helper()
	late := time.After(10 * time.Second)
	for {
		s.mu.Lock()
		have, changed := len(s.records), s.changed
		if have >= n {
			defer s.mu.Unlock()
			return s.records[n-1]
		}
		s.mu.Unlock()
		select {
		case <-changed:
		case <-late:
			t.Fatalf("%d records, want %d", have, n)
		}
	}
}

func (l *live) Bytes(out, in int) error {
	n := l.moved.Add(int64(out + in))
	switch {
	case l.over.Load():
		return &session.Refusal{Reason: policy.Revoked, Text: "revoked"}
	case l.s.most > 0 && n > l.s.most:
		return &session.Refusal{Reason: policy.Bytes, Text: "used up"}
	}
	return nil
}

func (l *live) Unrecorded() {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	l.s.kept++
}

func (l *live) Close() {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	delete(l.s.lives, l)
}

// house finds sessions by address.
type house struct {
	mu sync.Mutex
	in map[netip.Addr]*sandbox
}

func (h *house) ByAddress(a netip.Addr) (session.Session, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, ok := h.in[a]
	return s, ok
}

// world is what names lead to.
type world struct {
	mu    sync.Mutex
	hosts map[authority.Name]string
	dials []string
	wait  chan struct{} // not nil: dials wait for it
}

func (w *world) Dial(ctx context.Context, n authority.Name, port uint16, _ []netip.Prefix) (net.Conn, netip.Addr, error) {
	w.mu.Lock()
	w.dials = append(w.dials, fmt.Sprintf("%s:%d", n, port))
	at, ok := w.hosts[n]
	wait := w.wait
	w.mu.Unlock()
	if !ok {
		return nil, netip.Addr{}, &session.Refusal{Reason: policy.Unresolved, Text: "the name leads nowhere"}
	}
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, netip.Addr{}, &session.Refusal{Reason: policy.Unreachable, Text: "nobody answers"}
		}
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", at)
	if err != nil {
		return nil, netip.Addr{}, &session.Refusal{Reason: policy.Unreachable, Text: "nobody answers"}
	}
	to, _ := address(c.RemoteAddr())
	return c, to.Addr(), nil
}

func (w *world) dialled() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.dials)
}

// pages is an engine of few words: it judges each request and says what it got.
type pages struct {
	served chan web.Conn
	faulty atomic.Bool
}

func (e *pages) Serve(_ context.Context, c web.Conn) {
	if e.faulty.Load() {
		panic("what a sandbox sent")
	}
	select {
	case e.served <- c:
	default:
	}
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		name, port := c.Name, c.Port
		if name == "" {
			if name, port, err = authority.SplitHost(req.URL.Host, 80); err != nil {
				return
			}
		}
		protocol := policy.HTTP
		if c.Secure {
			protocol = policy.HTTPS
		}
		d := c.Session.Policy().Judge(policy.Request{Name: name, Port: port, Protocol: protocol, Method: req.Method, Path: req.URL.Path})
		status := http.StatusOK
		if !d.Allowed {
			status = http.StatusForbidden
		}
		body := fmt.Sprintf("%s %s %s:%d %s", c.Door, protocol, name, port, d.Reason)
		_, _ = fmt.Fprintf(c, "HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body)
	}
}

// ca issues certificates.
type ca struct {
	mu   sync.Mutex
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
	away error
}

func newCA(t testing.TB, name string) *ca {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	c := &ca{key: key, pool: x509.NewCertPool()}
	if c.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	c.pool.AddCert(c.cert)
	return c
}

func (c *ca) Leaf(n authority.Name) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away != nil {
		return nil, c.away
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: []string{string(n)}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, c.cert, &c.key.PublicKey, c.key)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: c.key}, err
}

// gate is a proxy with its doors open on loopback and one sandbox, whose traffic comes from there.
type gate struct {
	*Proxy
	t       testing.TB
	box     *sandbox
	home    *house
	world   *world
	pages   *pages
	minted  *ca
	public  *ca
	stop    func()
	connect string
	socks   string
	at      map[authority.Name]netip.AddrPort // of the transparent door
}

// The names of the tests: each with an address on loopback that stands for it.
var told = map[authority.Name]string{
	"open.example.com": "127.9.0.1", "shut.example.com": "127.9.0.2", "read.example.com": "127.9.0.3",
	"bytes.example.com": "127.9.0.4", "away.example.com": "127.9.0.5", "six.example.com": "::1",
}

const standard = `
contact: it@acme.example
rules:
  - name: open
    allow: {hosts: [open.example.com, six.example.com, away.example.com], ports: [PORT], protocol: tls}
  - name: read
    allow: {hosts: [read.example.com], ports: [PORT], protocol: https, methods: [GET], paths: [/v1/]}
  - name: plain
    allow: {hosts: [read.example.com], ports: [PORT], protocol: http}
  - name: bytes
    allow: {hosts: [bytes.example.com], ports: [PORT], protocol: tcp}
`

func parse(t testing.TB, doc string) *policy.Policy {
	t.Helper()
	d, err := policy.Parse([]byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	return policy.Merge([]policy.Layered{{Scope: &egressv1.Scope{Layer: egressv1.Layer_LAYER_CELL}, Generation: 7, Document: d}})
}

// open opens a gate; limits may change what holds.
func open(t testing.TB, doc string, limits Limits) *gate {
	t.Helper()
	g := &gate{t: t, world: &world{hosts: map[authority.Name]string{}}, pages: &pages{served: make(chan web.Conn, 100)},
		minted: newCA(t, "minted"), public: newCA(t, "public"), at: map[authority.Name]netip.AddrPort{}}
	g.box = &sandbox{asked: make(chan struct{}, 100), binding: &egressv1.Binding{Sandbox: "box"}, names: map[netip.Addr]authority.Name{}, lives: map[*live]bool{}, changed: make(chan struct{})}
	g.home = &house{in: map[netip.Addr]*sandbox{netip.MustParseAddr("127.0.0.1"): g.box, netip.MustParseAddr("::1"): g.box}}
	g.Proxy = New(Config{Sessions: g.home, Dialer: g.world, Minter: g.minted, Web: g.pages, Limits: limits,
		Denial: func(r policy.Request, d policy.Decision, text, _ string) (int, string, []byte) {
			return 403, "text/plain", fmt.Appendf(nil, "%s %s %s", r.Name, d.Reason, text)
		}})
	ctx, cancel := context.WithCancel(context.Background())
	var doors sync.WaitGroup
	g.stop = func() { cancel(); doors.Wait() }
	t.Cleanup(g.stop)
	serve := func(at string, door func(context.Context, net.Listener) error) netip.AddrPort {
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		doors.Go(func() {
			if err := door(ctx, l); err != nil {
				t.Error(err)
			}
		})
		return netip.MustParseAddrPort(l.Addr().String())
	}
	g.connect, g.socks = serve("127.0.0.1:0", g.ServeConnect).String(), serve("127.0.0.1:0", g.ServeSOCKS).String()
	port := uint16(0)
	for name, at := range told {
		a := netip.MustParseAddr(at)
		g.at[name] = serve(netip.AddrPortFrom(a, port).String(), g.ServeTransparent)
		port = g.at[name].Port()
		g.box.mu.Lock()
		g.box.names[a] = name
		g.box.mu.Unlock()
	}
	g.box.policy.Store(parse(t, g.doc(doc)))
	return g
}

// change changes what the parts of the gate read.
func (g *gate) change(do func()) {
	for _, mu := range []*sync.Mutex{&g.box.mu, &g.home.mu, &g.world.mu, &g.minted.mu} {
		mu.Lock()
		defer mu.Unlock()
	}
	do()
}

// port of all names at the transparent door.
func (g *gate) port() int { return int(g.at["open.example.com"].Port()) }

func (g *gate) doc(d string) string { return strings.ReplaceAll(d, "PORT", fmt.Sprint(g.port())) }

// dial connects, and closes in the end.
func dial(t testing.TB, at string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.TCPConn)
}

// direct connects to a name at the transparent door.
func (g *gate) direct(n authority.Name) *net.TCPConn { return dial(g.t, g.at[n].String()) }

// host makes names lead to a server that does with each connection what is said.
func (g *gate) host(do func(net.Conn), names ...authority.Name) {
	g.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		g.t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { defer c.Close(); do(c) })
		}
	})
	g.t.Cleanup(func() { _ = l.Close(); g.stop(); all.Wait() })
	g.world.mu.Lock()
	defer g.world.mu.Unlock()
	for _, n := range names {
		g.world.hosts[n] = l.Addr().String()
	}
}

// secure is a host that speaks TLS and echoes.
func (g *gate) secure(n authority.Name, cfg *tls.Config, do func(net.Conn)) {
	leaf, err := g.public.Leaf(n)
	if err != nil {
		g.t.Fatal(err)
	}
	cfg.Certificates = []tls.Certificate{*leaf}
	g.host(func(c net.Conn) {
		s := tls.Server(c, cfg)
		do(s)
		_ = s.Close()
	}, n)
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

// refused checks that nothing was dialled, that the connection ends without a word and what the record says.
func (g *gate) refused(c net.Conn, records int, reason policy.Reason) {
	g.t.Helper()
	if b, err := io.ReadAll(c); len(b) > 0 {
		g.t.Errorf("got %q, %v", b, err)
	}
	g.recorded(records, egressv1.Verdict_VERDICT_DENIED, reason)
	if d := g.world.dialled(); len(d) > 0 {
		g.t.Errorf("dialled %v", d)
	}
}

func (g *gate) recorded(n int, v egressv1.Verdict, reason policy.Reason) *egressv1.Record {
	g.t.Helper()
	r := g.box.last(g.t, n)
	if r.GetVerdict() != v || r.GetReason() != string(reason) {
		g.t.Errorf("recorded %v", r)
	}
	return r
}
