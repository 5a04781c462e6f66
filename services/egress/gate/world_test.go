package gate

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/egress"
)

const patience = 30 * time.Second

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until ok says so.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for until := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("never: %s", what)
		}
	}
}

// loopback puts the doors on this machine's loopback, at ports of its own.
type loopback struct {
	mu sync.Mutex
	at map[string]string // by family and port of the router
	id string
}

func (l *loopback) local(network, address string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if at, ok := l.at[network+address]; ok {
		return at // a gate that restarts has the same doors
	}
	if strings.HasSuffix(network, "6") {
		return "[::1]:0"
	}
	return "127.0.0.1:0"
}

func (l *loopback) keep(network, address, at string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.at[network+address] = at
}

func (l *loopback) Listen(network, address string, _ bool) (net.Listener, error) {
	x, err := net.Listen(network, l.local(network, address))
	if err == nil {
		l.keep(network, address, x.Addr().String())
	}
	return x, err
}

func (l *loopback) ListenPacket(network, address string) (net.PacketConn, error) {
	x, err := net.ListenPacket(network, l.local(network, address))
	if err == nil {
		l.keep(network, address, x.LocalAddr().String())
	}
	return x, err
}

func (l *loopback) Router() (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.id == "" {
		return "", os.ErrNotExist
	}
	return l.id, nil
}

func (l *loopback) become(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.id = id
}

// door is where a door is.
func (l *loopback) door(network, port string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	gateway := gateway4
	if strings.HasSuffix(network, "6") {
		gateway = gateway6
	}
	return l.at[network+net.JoinHostPort(gateway, port)]
}

// world is a bus with the service, the agent of the host h1, credentials, and a host on the internet.
type world struct {
	t    testing.TB
	bus  *bus.Embedded
	op   *bus.Conn
	host *bus.Conn
	at   *loopback
	cfg  Config
	stop func()

	mu      sync.Mutex
	notices [][]byte

	origin *httptest.Server
	port   int
	cell   *x509.CertPool // what sandboxes trust
}

func newWorld(t testing.TB, change ...func(*Config)) *world {
	w := makeWorld(t, change...)
	w.start()
	w.opened()
	return w
}

// newWorldAt is newWorld with doors in the router at path, once there is one.
func newWorldAt(t testing.TB, path string) *world {
	w := makeWorld(t, func(c *Config) { c.Listener, c.Router = nil, path })
	w.start()
	return w
}

func makeWorld(t testing.TB, change ...func(*Config)) *world {
	w := &world{t: t, at: &loopback{at: map[string]string{}, id: "1"}, cell: x509.NewCertPool()}
	w.bus = bustest.Start(t, subjects.Host("h1"), subjects.Host("h2"), subjects.Gate("h1"))
	w.op = bustest.Connect(t, w.bus, subjects.Operator())
	w.host = bustest.Connect(t, w.bus, subjects.Host("h1"))
	w.service()
	w.agent()
	w.credentials()
	w.internet()
	w.cfg = NewConfig()
	w.cfg.Host, w.cfg.Dir, w.cfg.Listener = "h1", t.TempDir(), w.at
	w.cfg.Hosts = map[string][]string{"api.example.com": {"127.0.0.1"}, "other.example.com": {"127.0.0.1"}}
	roots := filepath.Join(t.TempDir(), "roots.pem")
	must(t, os.WriteFile(roots, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.origin.Certificate().Raw}), 0o600))
	w.cfg.Roots = []string{roots}
	for _, f := range change {
		f(&w.cfg)
	}
	return w
}

// start starts a gate.
func (w *world) start() {
	w.t.Helper()
	conn := bustest.Connect(w.t, w.bus, subjects.Gate("h1"))
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- Run(ctx, w.cfg, conn, bustest.Log(w.t), func() { close(ready) }) }()
	once := sync.Once{}
	w.stop = func() {
		once.Do(func() { cancel(); must(w.t, <-done); conn.Close() })
	}
	w.t.Cleanup(w.stop)
	select {
	case <-ready:
	case err := <-done:
		w.t.Fatalf("the gate ended: %v", err)
	case <-time.After(patience):
		w.t.Fatal("the gate is not ready")
	}
}

// opened waits for the doors on loopback.
func (w *world) opened() {
	w.t.Helper()
	eventually(w.t, "the doors are open", func() bool {
		for _, f := range []string{door4, door6} {
			c, err := net.Dial(f, w.at.door(f, portDNS))
			if err != nil {
				return false
			}
			c.Close()
		}
		return true
	})
}

func (w *world) service() {
	conn := bustest.Connect(w.t, w.bus, subjects.Service("egress"))
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- egress.Run(ctx, egress.NewConfig(), conn, bustest.Log(w.t), func() { close(ready) }) }()
	w.t.Cleanup(func() { cancel(); must(w.t, <-done) })
	<-ready
}

// agent is what the host's agent does with a gate's words.
func (w *world) agent() {
	svc, err := w.host.Serve(w.t.Context(), bus.ServiceConfig{Name: "host"})
	must(w.t, err)
	must(w.t, bus.Handle(svc, "notice", func(_ context.Context, _ bus.Request, r *egressv1.NoticeRequest) (*egressv1.NoticeReply, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.notices = append(w.notices, r.GetNotice())
		return &egressv1.NoticeReply{}, nil
	}))
}

func (w *world) noticed(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.notices) > 0 && strings.Contains(string(w.notices[len(w.notices)-1]), text)
}

const secretValue = "sk-only-the-gate-knows"

// credentials issues authorities and reveals one secret.
func (w *world) credentials() {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(w.t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "cell"}, IsCA: true, BasicConstraintsValid: true,
		MaxPathLen: 1, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(48 * time.Hour), KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(w.t, err)
	root, err := x509.ParseCertificate(der)
	must(w.t, err)
	w.cell.AddCert(root)
	svc, err := bustest.Connect(w.t, w.bus, subjects.Service("credentials")).Serve(w.t.Context(), bus.ServiceConfig{Name: "credentials"})
	must(w.t, err)
	must(w.t, bus.Handle(svc, "egress_ca", func(_ context.Context, _ bus.Request, r *credentialsv1.EgressCARequest) (*credentialsv1.EgressCAReply, error) {
		public, err := x509.ParsePKIXPublicKey(r.GetPublicKey())
		if err != nil {
			return nil, err
		}
		cert, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "h1"}, IsCA: true,
			BasicConstraintsValid: true, MaxPathLenZero: true, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
			KeyUsage: x509.KeyUsageCertSign}, root, public, key)
		return &credentialsv1.EgressCAReply{Certificate: cert, Roots: [][]byte{der}}, err
	}))
	must(w.t, bus.Handle(svc, "reveal", func(_ context.Context, _ bus.Request, r *credentialsv1.RevealRequest) (*credentialsv1.RevealReply, error) {
		sealed, err := seal.SealTo(seal.Public(r.GetGateKey()), []byte(secretValue), rand.Reader)
		return &credentialsv1.RevealReply{Sealed: sealed, Hosts: []string{"api.example.com"}}, err
	}))
}

// internet is a host of two names with a certificate of its own. /slow answers without an end, /auth what
// kind of authorization came.
func (w *world) internet() {
	mux := http.NewServeMux()
	mux.HandleFunc("/slow", func(rw http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := rw.Write(make([]byte, 1024)); err != nil {
				return
			}
			_ = http.NewResponseController(rw).Flush()
			time.Sleep(2 * time.Millisecond)
		}
	})
	mux.HandleFunc("/auth", func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprint(rw, r.Header.Get("Authorization") == "Bearer "+secretValue)
	})
	mux.HandleFunc("/", func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "hello") })
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(w.t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(3), DNSNames: []string{"api.example.com", "other.example.com"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(48 * time.Hour), KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(w.t, err)
	w.origin = httptest.NewUnstartedServer(mux)
	w.origin.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	w.origin.StartTLS()
	w.t.Cleanup(func() { w.origin.CloseClientConnections(); w.origin.Close() })
	w.port = w.origin.Listener.Addr().(*net.TCPAddr).Port
	w.cell.AddCert(w.origin.Certificate())
}

var acme = &egressv1.Scope{Layer: egressv1.Layer_LAYER_TENANT, Name: "acme"}

// apply puts a policy of the tenant in force.
func (w *world) apply(doc string, replaces uint64) uint64 {
	w.t.Helper()
	r, err := bus.Invoke[*egressv1.ApplyReply](bustest.Context(w.t), w.op, "egress", "apply", &egressv1.ApplyRequest{Scope: acme, Document: []byte(doc), Replaces: replaces, By: "op"})
	must(w.t, err)
	return r.GetGeneration()
}

// rule lets one host out, over TLS that is passed through; more adds to it.
func (w *world) rule(host, more string) string {
	return fmt.Sprintf("contact: it@acme.example\nrules:\n  - name: %s\n    allow: {hosts: [%s], ports: [%d], protocol: https}\n    addresses: [127.0.0.0/8]\n%s",
		strings.Split(host, ".")[0], host, w.port, more)
}

func key(n int) string {
	return string(ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", fmt.Sprint("user", n), "default"))
}

// binding is that of a sandbox at 127.0.0.(1+n).
func binding(n int) *egressv1.Binding {
	b := &egressv1.Binding{Session: &corev1.SessionRef{Tenant: "acme", Session: key(n), Generation: &corev1.Stamp{Index: 1}, Epoch: &corev1.Stamp{Index: uint64(n)}},
		Sandbox: fmt.Sprint("b", n), SessionName: "default", Plan: "free", Template: "default", Actor: &corev1.Actor{Tenant: "acme", Subject: "ann"},
		Address4: netip.AddrFrom4([4]byte{127, 0, 0, byte(1 + n)}).String()}
	if n == 1 {
		b.Address6 = "::1"
	}
	return b
}

func (w *world) bind(n int) *egressv1.BindReply {
	w.t.Helper()
	r, err := bus.InvokeGate[*egressv1.BindReply](bustest.Context(w.t), w.host, "h1", "bind",
		&egressv1.BindRequest{Binding: binding(n), LeaseUntil: int64(boot() + time.Hour)})
	must(w.t, err)
	return r
}

func (w *world) sync(lease time.Duration, list ...*egressv1.Binding) *egressv1.SyncReply {
	w.t.Helper()
	r, err := bus.InvokeGate[*egressv1.SyncReply](bustest.Context(w.t), w.host, "h1", "sync",
		&egressv1.SyncRequest{Boot: "boot", Bindings: list, LeaseUntil: int64(boot() + lease)})
	must(w.t, err)
	return r
}

// connect is a CONNECT of the sandbox n: the connection, or the status of the refusal.
func (w *world) connect(n int, host string) (net.Conn, int, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(1+n))}, Timeout: patience}
	c, err := d.Dial(door4, w.at.door(door4, portConnect))
	if err != nil {
		return nil, 0, err
	}
	c, err = tunnel(c, fmt.Sprintf("%s:%d", host, w.port))
	var refused status
	if errors.As(err, &refused) {
		return nil, int(refused), nil
	}
	return c, 200, err
}

// status of an answer to CONNECT that is a refusal.
type status int

func (s status) Error() string { return fmt.Sprintf("CONNECT is answered with %d", int(s)) }

// tunnel asks a CONNECT door for a connection.
func tunnel(c net.Conn, to string) (net.Conn, error) {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", to, to)
	resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
	if err == nil && resp.StatusCode != 200 {
		err = status(resp.StatusCode)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// get asks the host for a path through CONNECT and TLS.
func (w *world) get(n int, host, path string) (*http.Response, error) {
	tr := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: w.cell},
		DialContext: func(_ context.Context, _, _ string) (net.Conn, error) {
			c, status, err := w.connect(n, host)
			if err == nil && c == nil {
				err = fmt.Errorf("CONNECT is answered with %d", status)
			}
			return c, err
		}}
	return (&http.Client{Transport: tr}).Get(fmt.Sprintf("https://%s:%d%s", host, w.port, path))
}

// reaches reports whether the sandbox gets an answer of the host.
func (w *world) reaches(n int, host string) bool {
	resp, err := w.get(n, host, "/")
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	return err == nil && resp.StatusCode == 200 && string(raw) == "hello"
}

// audit reads the records on the bus until ok has seen enough.
func (w *world) audit(e *bus.Embedded, ok func([]*egressv1.Record) bool) []*egressv1.Record {
	w.t.Helper()
	return read[*egressv1.Record](w.t, e, "BERTH_AUDIT", "berth.v1.audit.egress.>", ok)
}

func read[M proto.Message](t testing.TB, e *bus.Embedded, stream, subject string, ok func([]M) bool) []M {
	t.Helper()
	c, err := bustest.Connect(t, e, subjects.Operator()).JetStream().OrderedConsumer(bustest.Context(t), stream, jetstream.OrderedConsumerConfig{FilterSubjects: []string{subject}})
	must(t, err)
	var out []M
	for until := time.Now().Add(patience); !ok(out); {
		m, err := c.Next(jetstream.FetchMaxWait(time.Second))
		if err != nil {
			if time.Now().After(until) {
				t.Fatalf("%d messages of %s came: %v", len(out), subject, err)
			}
			continue
		}
		var zero M
		x := zero.ProtoReflect().New().Interface().(M)
		must(t, proto.Unmarshal(m.Data(), x))
		out = append(out, x)
	}
	return out
}

// download begins a download without an end, and says when it was reset.
func (w *world) download(n int, host string) <-chan error {
	w.t.Helper()
	resp, err := w.get(n, host, "/slow")
	must(w.t, err)
	_, err = io.ReadFull(resp.Body, make([]byte, 4096))
	must(w.t, err)
	ended := make(chan error, 1)
	go func() {
		defer resp.Body.Close()
		_, err := io.Copy(io.Discard, resp.Body)
		if err == nil {
			err = errors.New("it ended as if it were whole")
		}
		ended <- err
	}()
	return ended
}
