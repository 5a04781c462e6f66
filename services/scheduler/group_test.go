package scheduler

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/testport"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"google.golang.org/protobuf/proto"
)

// group is a world whose scheduler has several replicas.
type group struct {
	*world
	members []*member
	ready   chan string // who began to serve
}

type member struct {
	cfg  Config
	stop func()
}

func newGroup(t *testing.T, n int, change func(*Config)) *group {
	g := &group{world: newWorld(t, change), ready: make(chan string, 64)}
	g.stop() // the world's own, alone
	cert := testCertificate(t)
	var peers []Peer
	for i := range n {
		peers = append(peers, Peer{ID: fmt.Sprint("r", i+1), Addr: testport.Addr(t)})
	}
	for _, p := range peers {
		cfg := g.cfg
		cfg.Dir, cfg.ReplicaID, cfg.Bind, cfg.Peers = t.TempDir(), p.ID, p.Addr, peers
		cfg.TLSCert, cfg.TLSKey, cfg.TLSCA = cert, cert, cert
		m := &member{cfg: cfg}
		g.members = append(g.members, m)
		g.run(m)
	}
	t.Cleanup(func() {
		for _, m := range g.members {
			m.stop()
		}
	})
	g.serving("")
	return g
}

// run starts a replica on its folder.
func (g *group) run(m *member) { g.t.Helper(); g.runWith(m) }

func (g *group) runWith(m *member, opts ...bus.Option) {
	g.t.Helper()
	conn, err := g.bus.Connect(bustest.Context(g.t), subjects.Service("scheduler"), opts...)
	if err != nil {
		g.t.Fatal(err)
	}
	cfg := m.cfg
	cfg.Ready = func() { g.ready <- cfg.ReplicaID }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg, conn) }()
	var once sync.Once
	m.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				g.t.Errorf("replica %s ended: %v", cfg.ReplicaID, err)
			}
			conn.Close()
		})
	}
}

// serving waits until another replica than the named one begins to serve.
func (g *group) serving(not string) string {
	g.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case id := <-g.ready:
			if id != not {
				return id
			}
		case <-timeout:
			g.t.Fatal("no replica serves")
		}
	}
}

func (g *group) peers() *schedulerv1.PeersReply {
	g.t.Helper()
	r, err := bus.Invoke[*schedulerv1.PeersReply](bustest.Context(g.t), g.op, "scheduler", "peers", &schedulerv1.PeersRequest{})
	if err != nil {
		g.t.Fatal(err)
	}
	return r
}

func (g *group) leader() string {
	all := g.peers().GetPeers()
	i := slices.IndexFunc(all, func(p *schedulerv1.Peer) bool { return p.GetLeader() })
	if i < 0 {
		g.t.Fatalf("no leader among %v", all)
	}
	return all[i].GetId()
}

// A change of leader costs no host its lease and no session its place, and the
// events of every session are all told, in order.
func TestChangeOfLeaderKeepsLeasesAndEvents(t *testing.T) {
	g := newGroup(t, 3, func(c *Config) { c.Lease, c.LeaseDrift = 9*time.Second, time.Second })
	g.withHost(t, testHost, 0)
	g.withHost(t, "h2", 0)
	if p := g.peers(); p.GetFormat() != core.EntryVersion || p.GetNewestFormat() != core.EntryVersion {
		t.Errorf("a group of one version writes format %d of %d", p.GetFormat(), p.GetNewestFormat())
	}
	steady := must[wakeReply](t)(g.open(0, "r1"))
	var stop atomic.Bool
	var work sync.WaitGroup
	end := func() { stop.Store(true); work.Wait() }
	defer end()
	for n := 1; n <= 4; n++ {
		work.Go(func() { // a user who comes and goes
			for i := 0; !stop.Load(); i++ {
				if _, err := g.open(n, fmt.Sprint("o", i)); err != nil {
					t.Errorf("open %d of %d: %v", i, n, err)
					return
				}
				if _, err := g.close(n, fmt.Sprint("c", i)); err != nil {
					t.Errorf("close %d of %d: %v; the session is %v", i, n, err, g.show(n))
					return
				}
				time.Sleep(20 * time.Millisecond) // so that there are not too many events to read
			}
		})
	}
	for i := range 4 {
		was := g.leader()
		if i%2 == 0 {
			to := map[string]string{"r1": "r2", "r2": "r3", "r3": "r1"}[was]
			g.until("it leads", func() bool {
				// A replica that is behind for a moment does not take it.
				_, err := bus.Invoke[*schedulerv1.PeersReply](bustest.Context(t), g.op, "scheduler", "transfer", &schedulerv1.TransferRequest{Id: to})
				return err == nil && g.leader() == to
			})
			continue
		}
		m := g.members[slices.IndexFunc(g.members, func(m *member) bool { return m.cfg.ReplicaID == was })]
		m.stop()
		g.until("another leads", func() bool { return g.leader() != was })
		g.run(m)
	}
	end()
	if rec := g.show(0); rec.GetState() != corev1.State_STATE_ACTIVE || !proto.Equal(rec.GetSession(), steady.GetSession()) {
		t.Errorf("the session that was left alone: %v", rec)
	}
	g.fleet("h1", "lost", 0)
	g.fleet("h2", "lost", 0)
	for n := range 5 {
		g.eventsOf(n)
		var last uint64
		for _, e := range g.told(n) {
			if e.GetRevision() != last+1 {
				t.Errorf("session %d: revision %d after %d", n, e.GetRevision(), last)
			}
			last = e.GetRevision()
		}
	}
}

// A replica that is added takes part, and one that is removed does not.
func TestReplicasComeAndGo(t *testing.T) {
	g := newGroup(t, 3, nil)
	cfg := g.members[0].cfg
	cfg.Dir, cfg.ReplicaID, cfg.Bind, cfg.Peers, cfg.Join = t.TempDir(), "r4", testport.Addr(t), nil, true
	m := &member{cfg: cfg}
	g.members = append(g.members, m)
	g.run(m)
	r, err := bus.Invoke[*schedulerv1.PeersReply](bustest.Context(t), g.op, "scheduler", "add_peer", &schedulerv1.AddPeerRequest{Id: "r4", Addr: cfg.Bind})
	if err != nil || len(r.GetPeers()) != 4 {
		t.Fatalf("add: %v, %v", r, err)
	}
	was := g.leader()
	r, err = bus.Invoke[*schedulerv1.PeersReply](bustest.Context(t), g.op, "scheduler", "remove_peer", &schedulerv1.RemovePeerRequest{Id: was})
	if err != nil || len(r.GetPeers()) != 3 {
		t.Fatalf("remove: %v, %v", r, err)
	}
	if now := g.leader(); now == was {
		t.Errorf("%s still leads", was)
	}
	g.withHost(t, testHost, 0)
	must[wakeReply](t)(g.open(1, "r1"))
}

// testCertificate is one PEM file with a certificate for the replicas of a test,
// its key, and itself to be trusted.
func testCertificate(t *testing.T) string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "scheduler"}, DNSNames: []string{"r1", "r2", "r3", "r4"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "replica.pem")
	file := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})...)
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
