package bus_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
)

func TestThePortForClientsIsTLS13Only(t *testing.T) {
	e := bustest.Start(t, acmeWeb)
	l, err := e.Login(acmeWeb)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(l.URL, "tls://") || l.CA == "" || l.Cert != "" {
		t.Errorf("a frontend's client file has the URL %s, roots: %v, a certificate: %v", l.URL, l.CA != "", l.Cert != "")
	}
	conn, err := bus.Connect(bustest.Context(t), l, bus.WithLogger(bustest.Log(t)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if state, err := conn.NATS().TLSConnectionState(); err != nil || state.Version != tls.VersionTLS13 {
		t.Errorf("the connection is %x, %v", state.Version, err)
	}
	old := nats.Secure(&tls.Config{MaxVersion: tls.VersionTLS12}) //nolint:gosec // it must be refused
	if nc, err := nats.Connect(l.URL, old, bustest.Trust(e)); err == nil || !strings.Contains(err.Error(), "protocol version") {
		if err == nil {
			nc.Close()
		}
		t.Errorf("TLS 1.2: %v", err)
	}
	other := bustest.Start(t, acmeWeb)
	strange, err := other.Login(acmeWeb)
	if err != nil {
		t.Fatal(err)
	}
	strange.URL = l.URL
	if _, err := bus.Connect(context.Background(), strange); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a bus of another authority was trusted: %v", err)
	}
}

// Services and hosts show who they are already in the handshake; a certificate
// that nobody we trust signed is refused even with a good nkey.
func TestACertificateThatIsShownMustBeOurs(t *testing.T) {
	e, other := bustest.Start(t, hostH1), bustest.Start(t, hostH1)
	l, err := e.Login(hostH1)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := certs.Pair([]byte(l.Cert), []byte(l.Key))
	if err != nil {
		t.Fatal(err)
	}
	if p, ok := certs.PeerOf(pair.Leaf); !ok || p != (certs.Peer{Domain: certs.Domain, Role: certs.RoleHost, Name: string(hostH1.Host)}) {
		t.Errorf("the host's certificate names %+v", p)
	}
	conn, err := bus.Connect(bustest.Context(t), l, bus.WithLogger(bustest.Log(t)))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	foreign, err := other.Login(hostH1)
	if err != nil {
		t.Fatal(err)
	}
	strange, err := certs.Pair([]byte(foreign.Cert), []byte(foreign.Key))
	if err != nil {
		t.Fatal(err)
	}
	insists := func(o *nats.Options) error {
		o.TLSCertCB = nil
		o.TLSConfig.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return strange, nil }
		return nil
	}
	if c, err := bus.Connect(context.Background(), l, bus.WithNATS(insists)); err == nil {
		c.Close()
		t.Error("a foreign certificate was accepted")
	}
}

// A root is replaced while clients are connected: they come back after a loss
// with what their file says then, and nobody restarts anything.
func TestClientsComeBackAfterTheRootWasReplaced(t *testing.T) {
	e := bustest.Start(t, acmeWeb)
	fe, svc := reconnecting(t, e, acmeWeb), reconnecting(t, e, subjects.Service("lifecycle"))
	ca, err := certs.OpenCA(certs.Folder(e.Dir()), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	before, err := e.Login(subjects.Service("lifecycle"))
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.Rotate(time.Now()); err != nil {
		t.Fatal(err)
	}
	fe.again(t) // its file still has only the root of before
	if err := e.Allow(acmeWeb); err != nil {
		t.Fatal(err)
	}
	after, err := e.Login(subjects.Service("lifecycle"))
	if err != nil {
		t.Fatal(err)
	}
	if after.Cert == before.Cert || strings.Count(after.CA, "BEGIN") != 2 || after.Seed != before.Seed {
		t.Error("the client file is not renewed, or more of it than its certificates is")
	}
	fe.again(t)
	svc.again(t)
	path := bus.LoginPath(e.Dir(), acmeWeb)
	one, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Allow(acmeWeb); err != nil {
		t.Fatal(err)
	}
	if two, err := os.ReadFile(path); err != nil || !bytes.Equal(one, two) {
		t.Errorf("a good client file was replaced: %v", err)
	}
}

type reconnects struct {
	conn *bus.Conn
	back chan struct{}
}

func reconnecting(t *testing.T, e *bus.Embedded, c subjects.Caller) *reconnects {
	t.Helper()
	l, err := e.Login(c)
	if err != nil {
		t.Fatal(err)
	}
	r := &reconnects{back: make(chan struct{}, 8)}
	r.conn, err = bus.Connect(bustest.Context(t), l, bus.WithLogger(bustest.Log(t)), bus.WithNATS(nats.ReconnectHandler(func(*nats.Conn) { r.back <- struct{}{} })))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.conn.Close)
	return r
}

// again loses the connection and waits until it is there again.
func (r *reconnects) again(t *testing.T) {
	t.Helper()
	if err := r.conn.NATS().ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-r.back:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s does not come back: %v", r.conn.Self(), r.conn.NATS().LastError())
	}
}
