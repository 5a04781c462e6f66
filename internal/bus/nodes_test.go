package bus_test

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/testport"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// routeWith connects as another node would, with a certificate or none, and
// tells whether the node hung up.
func routeWith(t *testing.T, addr string, certs ...tls.Certificate) error {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(3 * time.Second))
	up := tls.Client(conn, &tls.Config{Certificates: certs, InsecureSkipVerify: true}) //nolint:gosec // it is the other side that must verify
	if err := up.Handshake(); err != nil {
		return err
	}
	_, err = up.Read(make([]byte, 1))
	return err
}

func certOf(t *testing.T, ca *bustest.CA) tls.Certificate {
	t.Helper()
	cert, key := ca.Issue(t, "stranger")
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

func nodeConfig(t *testing.T, ca *bustest.CA) bus.ServerConfig {
	t.Helper()
	cert, key := ca.Issue(t, "n1")
	conf, err := bus.MutualTLS(cert, key, ca.Path)
	if err != nil {
		t.Fatal(err)
	}
	files, err := certs.OpenFiles(cert, key, ca.Path, nil)
	if err != nil {
		t.Fatal(err)
	}
	port := testport.Reserve(t, 1)[0]
	users, err := bus.EnsureKeys(t.TempDir(), "", []subjects.Caller{subjects.Keeper()})
	if err != nil {
		t.Fatal(err)
	}
	return bus.ServerConfig{StoreDir: t.TempDir(), Port: -1, Name: "n1", Users: users, TLS: bus.ServerTLS(files),
		Cluster: &bus.ClusterConfig{Port: port, TLS: conf, Routes: []string{net.JoinHostPort("127.0.0.1", portOf(port))}}}
}

func TestARouteNeedsACertificateOfOurCA(t *testing.T) {
	ours, foreign := bustest.NewCA(t), bustest.NewCA(t)
	cfg := nodeConfig(t, ours)
	s, err := bus.StartServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Shutdown()
	addr := net.JoinHostPort("127.0.0.1", portOf(cfg.Cluster.Port))
	if err := routeWith(t, addr, certOf(t, ours)); err != nil { // it says INFO
		t.Errorf("a certificate of our CA: %v", err)
	}
	for what, certs := range map[string][]tls.Certificate{"none": nil, "of another CA": {certOf(t, foreign)}} {
		if err := routeWith(t, addr, certs...); err == nil || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("certificate %s: %v", what, err)
		}
	}
}

func TestAClusterIsRefusedWithoutWhatItNeeds(t *testing.T) {
	ca := bustest.NewCA(t)
	for want, change := range map[string]func(*bus.ServerConfig){
		"a name of its own":            func(c *bus.ServerConfig) { c.Name = "" },
		"a port for the other nodes":   func(c *bus.ServerConfig) { c.Cluster.Port = 0 },
		"the routes to the nodes":      func(c *bus.ServerConfig) { c.Cluster.Routes = nil },
		"there is no certificate":      func(c *bus.ServerConfig) { c.TLS = nil },
		"mutual TLS only":              func(c *bus.ServerConfig) { c.Cluster.TLS = nil },
		"RequireAndVerifyClientCert":   func(c *bus.ServerConfig) { c.Cluster.TLS.ClientAuth = tls.VerifyClientCertIfGiven },
		`route "here" is no host:port`: func(c *bus.ServerConfig) { c.Cluster.Routes = []string{"here"} },
	} {
		cfg := nodeConfig(t, ca)
		change(&cfg)
		if s, err := bus.StartServer(cfg); !errs.Is(err, errkind.Invalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
			if err == nil {
				s.Shutdown()
			}
		}
	}
}

// nats-server deletes streams that its cluster does not know.
func TestFilesOfASingleServerAreNotGivenToACluster(t *testing.T) {
	e, err := bus.StartEmbedded(bustest.Context(t), bus.EmbeddedConfig{Dir: t.TempDir(), Log: bustest.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	e.Close()
	cfg := nodeConfig(t, bustest.NewCA(t))
	dir := e.Dir()
	cfg.StoreDir = filepath.Join(dir, "bus")
	if s, err := bus.StartServer(cfg); !errs.Is(err, errkind.Conflict) {
		t.Errorf("got %v", err)
		if err == nil {
			s.Shutdown()
		}
	}
	if left, err := os.ReadDir(filepath.Join(cfg.StoreDir, "jetstream", "APP", "streams")); err != nil || len(left) == 0 {
		t.Errorf("%d streams left, %v", len(left), err)
	}
}

func portOf(n int) string { return (&net.TCPAddr{Port: n}).String()[1:] }

// A node dies, or hangs without ending its connections: connects, calls and
// services go on at the others. A hang is noticed after two to three seconds.
func TestCallsOutliveANode(t *testing.T) {
	t.Parallel() // most of it is waiting for elections
	c := bustest.StartCluster(t, hostH1)
	ctx := bustest.Context(t)
	serve := func(first ...int) *bus.Service {
		conn := c.Connect(subjects.Service("lifecycle"), first...)
		svc, err := conn.Serve(ctx, bus.ServiceConfig{Name: "lifecycle"})
		if err == nil {
			err = svc.HandleRaw("open", says("ok"))
		}
		if err == nil {
			err = svc.Announce()
		}
		if err != nil {
			t.Fatal(err)
		}
		return svc
	}
	serve(0, 1)
	idn := c.Connect(subjects.Service("identity"), 2, 0) // the service is at node 0
	open := func(what string) {
		t.Helper()
		began := time.Now()
		v, err := bus.Invoke[*wrapperspb.StringValue](ctx, idn, "lifecycle", "open", wrapperspb.String("x"))
		if err != nil || v.GetValue() != "ok" {
			t.Fatalf("%s: %q, %v", what, v.GetValue(), err)
		}
		t.Logf("%s: answered after %s", what, time.Since(began).Round(time.Millisecond))
	}
	open("all nodes")
	c.Kill(0)
	open("the service's node was killed")
	began := time.Now()
	c.Connect(subjects.Service("scheduler"))
	t.Logf("connected with a dead node in the list after %s", time.Since(began).Round(time.Millisecond))
	c.Restart(0)
	c.Pause(2)
	open("the caller's node hangs")
	c.Resume(2)
	c.Pause(1)
	open("the service's node hangs")
	c.Resume(1)
	c.Kill(2)
	open("the caller's node was killed")
	c.Restart(2)
	open("all nodes")
}

// With two of three nodes gone nothing can be stored; calls go on.
func TestCallsDoNotNeedJetStream(t *testing.T) {
	t.Parallel() // most of it is waiting for elections
	c := bustest.StartCluster(t)
	ctx := bustest.Context(t)
	sched, life := c.Connect(subjects.Service("scheduler")), c.Connect(subjects.Service("lifecycle"))
	svc, err := sched.Serve(ctx, bus.ServiceConfig{Name: "scheduler"})
	if err == nil {
		err = svc.HandleRaw("wake", says("ok"))
	}
	if err != nil {
		t.Fatal(err)
	}
	told(t, svc)
	c.Kill(1, 2)
	wantAnswer(t, wake(ctx, life, "x"), "ok")
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if _, err := life.Publish(short, subjects.Session("acme", session, "idle"), wrapperspb.String("x")); err == nil {
		t.Error("something was stored by one node of three")
	}
	wantAnswer(t, wake(ctx, life, "y"), "ok")
}
