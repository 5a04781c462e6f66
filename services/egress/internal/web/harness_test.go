package web

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// theSecret has characters that every encoding writes differently.
const theSecret = `s3cr=t/Val+ue"<9&f>\xyz~Q`

// sandbox is a session in memory with a policy that can be changed.
type sandbox struct {
	binding *egressv1.Binding

	mu      sync.Mutex
	policy  *policy.Policy
	open    map[*opened]bool
	records []*egressv1.Record
	noted   chan struct{}
	most    int // bytes
	noAudit bool
	kept    int // told Unrecorded
	atNote  int // open when the last record came
}

type opened struct {
	s     *sandbox
	req   policy.Request
	reset func()
	used  int
}

func newSandbox(t testing.TB, name, doc string) *sandbox {
	s := &sandbox{open: map[*opened]bool{}, noted: make(chan struct{}, 10000), binding: &egressv1.Binding{
		Sandbox: name, Session: &corev1.SessionRef{Tenant: "t", Session: name}}}
	s.apply(t, doc)
	return s
}

func (s *sandbox) apply(t testing.TB, doc string) {
	t.Helper()
	d, err := policy.Parse([]byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.policy = policy.Merge([]policy.Layered{{Scope: &egressv1.Scope{Layer: egressv1.Layer_LAYER_TENANT}, Generation: 7, Document: d}})
	var resets []func()
	for o := range s.open {
		if !s.policy.Judge(o.req).Allowed {
			resets = append(resets, o.reset)
		}
	}
	s.mu.Unlock()
	for _, r := range resets {
		r()
	}
}

func (s *sandbox) Binding() *egressv1.Binding { return s.binding }
func (s *sandbox) Policy() *policy.Policy {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.policy
}
func (s *sandbox) NameOf(netip.Addr) (authority.Name, bool) { return "", false }

func (s *sandbox) Open(r policy.Request, _ policy.Decision, reset func()) (session.Live, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.policy.Judge(r); !d.Allowed {
		return nil, &session.Refusal{Reason: d.Reason}
	}
	o := &opened{s: s, req: r, reset: reset}
	s.open[o] = true
	return o, nil
}

func (o *opened) Bytes(out, in int) error {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	if o.used += out + in; o.s.most > 0 && o.used > o.s.most {
		return &session.Refusal{Reason: policy.Bytes, Text: "enough"}
	}
	return nil
}

func (o *opened) Unrecorded() {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	o.s.kept++
}

func (o *opened) Close() {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	delete(o.s.open, o)
}

func (s *sandbox) Note(r *egressv1.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.atNote = len(s.open)
	if s.noAudit {
		return errors.New("no room")
	}
	if len(s.noted) == cap(s.noted) { // a benchmark
		return nil
	}
	s.records = append(s.records, r)
	s.noted <- struct{}{}
	return nil
}

// last waits for the nth record.
func (s *sandbox) last(t testing.TB) *egressv1.Record {
	t.Helper()
	select {
	case <-s.noted:
	case <-time.After(10 * time.Second):
		t.Fatal("nothing was recorded")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.records[len(s.records)-1-len(s.noted)]
}

// world is an engine with hosts on loopback.
type world struct {
	t      testing.TB
	e      *Engine
	box    *sandbox
	log    *safeBuffer
	ca     *authorityCert
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	hosts   map[string]string // name:port to address
	dials   []string
	dialled int
	secrets map[string]Secret
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func newWorld(t testing.TB, doc string) *world {
	w := &world{t: t, box: newSandbox(t, "one", doc), log: &safeBuffer{}, ca: newAuthority(t), hosts: map[string]string{},
		secrets: map[string]Secret{"key": {Value: []byte(theSecret), Hosts: []authority.Name{"api.example.com"}}}}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.e = New(Config{Upstream: w, Secrets: w, Roots: w.ca.pool, Log: slog.New(slog.NewJSONHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	t.Cleanup(func() {
		w.cancel()
		w.e.Close()
		w.wg.Wait()
		w.noSecret(w.log.String())
		for _, r := range w.box.records {
			w.noSecret(r.String())
		}
	})
	return w
}

// noSecret fails where a text shows the secret in any spelling.
func (w *world) noSecret(text string) {
	w.t.Helper()
	if _, hit := newScrubber([]byte(theSecret)).text(text); hit {
		w.t.Errorf("the secret shows: %.300q", text)
	}
}

func (w *world) Dial(ctx context.Context, n authority.Name, port uint16, _ []netip.Prefix) (net.Conn, netip.Addr, error) {
	key := fmt.Sprintf("%s:%d", n, port)
	w.mu.Lock()
	w.dials = append(w.dials, key)
	addr, ok := w.hosts[key]
	w.mu.Unlock()
	if !ok {
		return nil, netip.Addr{}, &session.Refusal{Reason: policy.Unresolved}
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	return c, netip.MustParseAddr("192.0.2.1"), err
}

func (w *world) Reveal(_ context.Context, _ session.Session, name string) (Secret, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s, ok := w.secrets[name]
	if !ok {
		return Secret{}, errors.New("no such secret")
	}
	return s, nil
}

func (w *world) dialCount() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.dials)
}

// host serves h as a name; TLS on 443.
func (w *world) host(name string, port uint16, h http.Handler) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	if port == 443 {
		s.TLS = &tls.Config{Certificates: []tls.Certificate{w.ca.leaf(w.t, name)}}
		s.EnableHTTP2 = true
		s.StartTLS()
	} else {
		s.Start()
	}
	w.t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hosts[fmt.Sprintf("%s:%d", name, port)] = s.Listener.Addr().String()
	return s
}

// raw serves one connection after the other by hand.
func (w *world) raw(name string, port uint16, serve func(net.Conn)) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	if port == 443 {
		l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{w.ca.leaf(w.t, name)}, NextProtos: []string{"http/1.1"}})
	}
	w.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); serve(c) }()
		}
	}()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hosts[fmt.Sprintf("%s:%d", name, port)] = l.Addr().String()
}

// connect is a connection of the sandbox that the engine serves.
func (w *world) connect(c Conn) net.Conn {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Close()
	mine, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	theirs, err := l.Accept()
	if err != nil {
		w.t.Fatal(err)
	}
	c.Conn = theirs
	if c.Session == nil {
		c.Session = w.box
	}
	if c.Door == "" {
		c.Door = "transparent"
	}
	w.wg.Go(func() {
		if c.Secure {
			leaf := w.ca.leaf(w.t, string(c.Name))
			tc := tls.Server(theirs, &tls.Config{Certificates: []tls.Certificate{leaf}, NextProtos: []string{"h2", "http/1.1"}})
			if tc.HandshakeContext(w.ctx) != nil {
				theirs.Close()
				return
			}
			c.Conn, c.ALPN = tc, tc.ConnectionState().NegotiatedProtocol
		}
		w.e.Serve(w.ctx, c)
	})
	w.t.Cleanup(func() { mine.Close() })
	_ = mine.SetDeadline(time.Now().Add(20 * time.Second))
	return mine
}

// client speaks to one host through the engine.
func (w *world) client(name string, port uint16, h2 bool) *http.Client {
	tr := &http.Transport{DisableCompression: true, ForceAttemptHTTP2: h2, TLSClientConfig: &tls.Config{RootCAs: w.ca.pool, ServerName: name},
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			c := w.connect(Conn{Name: authority.Name(name), Port: port, Secure: port == 443})
			return c, c.SetDeadline(time.Time{})
		}}
	if !h2 {
		tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
	}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// say sends raw bytes and reads one answer.
func say(t testing.TB, c net.Conn, text string) (*http.Response, string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	return hear(t, bufio.NewReader(c))
}

func hear(t testing.TB, b *bufio.Reader) (*http.Response, string) {
	t.Helper()
	resp, err := http.ReadResponse(b, nil)
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("half an answer: %v", err)
	}
	return resp, string(body)
}

func do(t testing.TB, c *http.Client, r *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("half an answer: %v", err)
	}
	return resp, string(body)
}

func get(t testing.TB, url string, fields ...string) *http.Request {
	t.Helper()
	return request(t, "GET", url, nil, fields...)
}

func request(t testing.TB, method, url string, body io.Reader, fields ...string) *http.Request {
	t.Helper()
	r, err := http.NewRequest(method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fields {
		k, v, _ := strings.Cut(f, ": ")
		r.Header.Add(k, v)
	}
	return r
}

// want checks an answer for a denial.
func want(t testing.TB, resp *http.Response, status int, reason policy.Reason) {
	t.Helper()
	if resp.StatusCode != status || resp.Header.Get("Berth-Denied") != string(reason) {
		t.Fatalf("got %d %q, want %d %q", resp.StatusCode, resp.Header.Get("Berth-Denied"), status, reason)
	}
}

type authorityCert struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
	mu   sync.Mutex
	made map[string]tls.Certificate
}

func newAuthority(t testing.TB) *authorityCert {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	a := &authorityCert{key: key, pool: x509.NewCertPool(), made: map[string]tls.Certificate{}}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.pool.AddCert(a.cert)
	return a
}

func (a *authorityCert) leaf(t testing.TB, name string) tls.Certificate {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c, ok := a.made[name]; ok {
		return c
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(int64(len(a.made) + 2)), DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, a.key.Public(), a.key)
	if err != nil {
		t.Error(err)
	}
	c := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: a.key}
	a.made[name] = c
	return c
}
