package main

import (
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
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/egress"
	"github.com/berth-dev/berth/services/egress/gate/gatebench"
)

const (
	passHost  = "pass.bench.example"
	openHost  = "open.bench.example"
	bodyBytes = 100 << 20
	pageBytes = 1 << 10
	secret    = "sk-bench-0123456789abcdef"
)

// mode is a way to the host.
type mode struct {
	name string
	host string
	gate bool
}

var modes = []mode{{"direct", passHost, false}, {"passed through", passHost, true}, {"intercepted with injection", openHost, true}}

// world is a host, a gate before it, and a bus.
type world struct {
	dir   string
	bus   *bus.Embedded
	conns map[subjects.Caller]*bus.Conn
	owner context.CancelFunc // of the service that owns the policies
	owned chan error
	gate  *gatebench.Gate
	host  *http.Server
	at    netip.AddrPort
	pool  *x509.CertPool
	from  netip.Addr // of the first session
	keyed atomic.Int64
	gen   uint64 // of the policy in force
}

// Those who are on the bus.
var (
	aGate    = subjects.Gate("bench")
	owner    = subjects.Service("egress")
	operator = subjects.Operator()
)

func start(ctx context.Context) (*world, error) {
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return nil, err
	}
	w := &world{dir: dir, pool: x509.NewCertPool(), conns: map[subjects.Caller]*bus.Conn{}}
	err = w.serve()
	if err == nil {
		err = w.startBus(ctx)
	}
	if err == nil {
		hosts := map[string]netip.Addr{passHost: w.at.Addr(), openHost: w.at.Addr()}
		w.gate, err = gatebench.Start(ctx, gatebench.Config{Dir: dir, Bus: w.conns[aGate], Hosts: hosts, Port: w.at.Port(), Roots: w.pool, Secret: secret, Log: quiet})
	}
	if err == nil {
		w.from, err = w.gate.Bind()
	}
	if err == nil {
		err = w.apply(ctx, w.document(""))
	}
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	// A client trusts the host and the gate, as a sandbox does.
	w.pool.AppendCertsFromPEM(w.gate.Roots())
	return w, nil
}

var quiet = slog.New(slog.DiscardHandler)

// startBus starts the bus, and the service that owns the policies.
func (w *world) startBus(ctx context.Context) (err error) {
	w.bus, err = bus.StartEmbedded(ctx, bus.EmbeddedConfig{Dir: filepath.Join(w.dir, "bus"), Port: -1, Log: quiet, Callers: []subjects.Caller{aGate}})
	if err != nil {
		return err
	}
	for _, who := range []subjects.Caller{aGate, owner, operator} {
		login, err := bus.ReadLogin(bus.LoginPath(w.bus.Dir(), who))
		if err != nil {
			return err
		}
		if w.conns[who], err = bus.Connect(ctx, login); err != nil {
			return err
		}
	}
	life, stop := context.WithCancel(ctx)
	ready := make(chan struct{})
	w.owner, w.owned = stop, make(chan error, 1)
	go func() {
		w.owned <- egress.Run(life, egress.NewConfig(), w.conns[owner], quiet, func() { close(ready) })
	}()
	select {
	case <-ready:
		return nil
	case err := <-w.owned:
		w.owner = nil
		return err
	}
}

// ask has the cell's policy replaced, as an operator does.
func (w *world) ask(ctx context.Context, document []byte) error {
	reply, err := bus.Invoke[*egressv1.ApplyReply](ctx, w.conns[operator], "egress", "apply",
		&egressv1.ApplyRequest{Scope: &egressv1.Scope{Layer: egressv1.Layer_LAYER_CELL}, Document: document, Replaces: w.gen, By: "bench"})
	if err == nil {
		w.gen = reply.GetGeneration()
	}
	return err
}

// apply is ask, and returns once the gate has it.
func (w *world) apply(ctx context.Context, document []byte) error {
	if err := w.ask(ctx, document); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return w.gate.InForce(ctx, w.gen)
}

func (w *world) close() error {
	if w.gate != nil {
		w.gate.Close()
	}
	if w.owner != nil {
		w.owner()
		<-w.owned
	}
	for _, c := range w.conns {
		c.Close()
	}
	if w.bus != nil {
		w.bus.Close()
	}
	if w.host != nil {
		_ = w.host.Close()
	}
	return os.RemoveAll(w.dir)
}

// document is the policy that lets both names out, with more rules before them.
func (w *world) document(more string) []byte {
	return fmt.Appendf(nil, `rules:
%s  - name: pass
    allow: {hosts: [%s], ports: [%d], protocol: tls}
    addresses: [127.0.0.0/8]
  - name: open
    allow: {hosts: [%s], ports: [%d], protocol: https}
    addresses: [127.0.0.0/8]
    inject: {secret: api-key, header: Authorization}
`, more, passHost, w.at.Port(), openHost, w.at.Port())
}

// serve starts the host.
func (w *world) serve() error {
	cert, err := w.certificate()
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		return err
	}
	w.at = l.Addr().(*net.TCPAddr).AddrPort()
	chunk, page := make([]byte, 256<<10), make([]byte, pageBytes)
	mux := http.NewServeMux()
	mux.HandleFunc("/page", func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer "+secret {
			w.keyed.Add(1)
		}
		_, _ = rw.Write(page)
	})
	mux.HandleFunc("/body", func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Length", strconv.Itoa(bodyBytes))
		rw.Header().Set("Content-Type", "application/octet-stream")
		for sent := 0; sent < bodyBytes; sent += len(chunk) {
			if _, err := rw.Write(chunk); err != nil {
				return
			}
		}
	})
	mux.HandleFunc("/drip", func(rw http.ResponseWriter, r *http.Request) {
		for {
			if _, err := rw.Write(page[:1]); err != nil {
				return
			}
			rw.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	w.host = &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0)}
	tl := tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}})
	go func() { _ = w.host.Serve(tl) }()
	return nil
}

// certificate is the host's, signed by itself.
func (w *world) certificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	tmpl := &x509.Certificate{Subject: pkix.Name{CommonName: "bench host"}, DNSNames: []string{passHost, openHost}, NotBefore: time.Now().Add(-time.Minute),
		NotAfter: time.Now().Add(12 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, err
	}
	w.pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// client is one connection of a sandbox, kept open, in one mode.
func (w *world) client(m mode, from netip.Addr) *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConns: 1, MaxConnsPerHost: 1, DisableCompression: true, ReadBufferSize: 64 << 10,
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return w.dial(ctx, m, from) }}}
}

func (w *world) dial(ctx context.Context, m mode, from netip.Addr) (*tls.Conn, error) {
	to := w.at
	d := &net.Dialer{}
	if m.gate {
		to = w.gate.Door(m.host)
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	raw, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, &tls.Config{ServerName: m.host, RootCAs: w.pool, NextProtos: []string{"http/1.1"}})
	if err := c.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, fmt.Errorf("%s: %w", m.name, err)
	}
	return c, nil
}

func (w *world) url(m mode, path string) string {
	return "https://" + net.JoinHostPort(m.host, strconv.Itoa(int(w.at.Port()))) + path
}

// get reads an answer to its end and returns how long it is.
func get(ctx context.Context, c *http.Client, url string, buf []byte, count *atomic.Int64) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return fmt.Errorf("status %d: %.300s", resp.StatusCode, text)
	}
	for {
		n, err := resp.Body.Read(buf)
		count.Add(int64(n))
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
