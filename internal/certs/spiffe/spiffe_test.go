package spiffe

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"

	"github.com/berth-dev/berth/internal/certs"
)

// agent is a workload API on a socket, which gives out what it is told to.
type agent struct {
	workload.UnimplementedSpiffeWorkloadAPIServer
	updates chan *workload.X509SVIDResponse
}

func (a *agent) FetchX509SVID(_ *workload.X509SVIDRequest, s grpc.ServerStreamingServer[workload.X509SVIDResponse]) error {
	for {
		select {
		case u := <-a.updates:
			if err := s.Send(u); err != nil {
				return err
			}
		case <-s.Context().Done():
			return nil
		}
	}
}

func startAgent(t *testing.T) (*agent, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{updates: make(chan *workload.X509SVIDResponse, 4)}
	srv := grpc.NewServer()
	workload.RegisterSpiffeWorkloadAPIServer(srv, a)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(srv.Stop)
	return a, "unix://" + path
}

// give issues a certificate and gives it out with the roots.
func (a *agent) give(t *testing.T, ca *certs.CA, l certs.Leaf) {
	t.Helper()
	raw, err := ca.Issue(l, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := ca.Bundle(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	cert, key := certs.Split(raw)
	block, _ := pem.Decode([]byte(key))
	a.updates <- &workload.X509SVIDResponse{Svids: []*workload.X509SVID{{
		SpiffeId: certs.Peer{Domain: certs.Domain, Role: l.Role, Name: l.Name}.URI().String(),
		X509Svid: der([]byte(cert)), X509SvidKey: block.Bytes, Bundle: der(bundle)}}}
}

func der(raw []byte) (out []byte) {
	for b, rest := pem.Decode(raw); b != nil; b, rest = pem.Decode(rest) {
		out = append(out, b.Bytes...)
	}
	return out
}

func open(t *testing.T, addr string) *Source {
	t.Helper()
	s, err := Open(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// shake connects once and returns the serial number that the client saw.
func shake(t *testing.T, server, client *tls.Config) (string, error) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = c.Write([]byte("x"))
	}()
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: 20 * time.Second}, "tcp", l.Addr().String(), client)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_, err = io.ReadFull(c, make([]byte, 1))
	return c.ConnectionState().PeerCertificates[0].SerialNumber.String(), err
}

// An agent renews certificates every hour or so, and roots now and then.
func TestWhatTheAgentRenewsIsUsedAtTheNextHandshake(t *testing.T) {
	ca, err := certs.OpenCA(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	nodeAgent, nodeAddr := startAgent(t)
	hostAgent, hostAddr := startAgent(t)
	node, host := certs.Leaf{Role: certs.RoleBus, Name: "nats-1"}, certs.Leaf{Role: certs.RoleHost, Name: "h1", ClientOnly: true}
	nodeAgent.give(t, ca, node)
	hostAgent.give(t, ca, host)
	server := certs.Server(open(t, nodeAddr), tls.RequireAndVerifyClientCert, certs.Only(certs.RoleHost, ""))
	client := certs.Client(open(t, hostAddr), certs.Only(certs.RoleBus, ""))
	first, err := shake(t, server, client)
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.Rotate(time.Now()); err != nil {
		t.Fatal(err)
	}
	hostAgent.give(t, ca, host)
	nodeAgent.give(t, ca, node)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		next, err := shake(t, server, client)
		if err == nil && next != first {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the renewed certificate is not shown: %v", err)
		}
	}
}

func TestAnotherTrustDomainIsRefused(t *testing.T) {
	ours, err := certs.OpenCA(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := certs.OpenCA(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	a, addr := startAgent(t)
	b, other := startAgent(t)
	a.give(t, ours, certs.Leaf{Role: certs.RoleBus, Name: "nats-1"})
	b.give(t, theirs, certs.Leaf{Role: certs.RoleBus, Name: "nats-2"})
	if _, err := shake(t, certs.Mutual(open(t, addr), certs.Only(certs.RoleBus, "")), certs.Client(open(t, other), certs.Only(certs.RoleBus, ""))); err == nil {
		t.Error("a stranger's certificate was accepted")
	}
}

func TestAnAgentThatIsNotThereIsSaid(t *testing.T) {
	if _, err := Open(t.Context(), "/run/agent.sock"); err == nil {
		t.Error("a path was taken for an address")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := Open(ctx, "unix://"+filepath.Join(t.TempDir(), "none.sock")); err == nil {
		t.Error("nobody gave a certificate")
	}
}
