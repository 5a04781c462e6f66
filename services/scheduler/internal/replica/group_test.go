package replica

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"maps"
	"math/big"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/testport"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// authority makes certificates.
type authority struct {
	t    testing.TB
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{t, k, cert}
}

// conf is the configuration of a replica whose certificate names id.
func (a *authority) conf(id string, change ...func(*x509.Certificate)) *tls.Config {
	a.t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: id}, DNSNames: []string{id},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, f := range change {
		f(tmpl)
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &k.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: k}}, RootCAs: pool, ClientCAs: pool,
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13}
}

// group is a group of replicas in this process, over TCP and TLS.
type group struct {
	t    *testing.T
	ca   *authority
	cfg  map[string]Config
	live map[string]*Replica
}

func newGroup(t *testing.T, n int, change ...func(*Config)) *group {
	t.Helper()
	g := &group{t: t, ca: newAuthority(t), cfg: map[string]Config{}, live: map[string]*Replica{}}
	var peers []Peer
	for i := range n {
		peers = append(peers, Peer{ID: fmt.Sprint("n", i+1), Addr: testport.Addr(t)})
	}
	for _, p := range peers {
		c := Config{Dir: filepath.Join(t.TempDir(), p.ID), Log: quiet(), ID: p.ID, Bind: p.Addr, TLS: g.ca.conf(p.ID), Peers: peers,
			Fatal: func(err error) { t.Error(err) }}
		for _, f := range change {
			f(&c)
		}
		g.cfg[p.ID] = c
	}
	t.Cleanup(func() {
		for _, r := range g.live {
			_ = r.Close()
		}
	})
	g.start(slices.Sorted(maps.Keys(g.cfg))...)
	return g
}

// start starts replicas together.
func (g *group) start(ids ...string) {
	g.t.Helper()
	var wg sync.WaitGroup
	var mu sync.Mutex
	ctx := within(g.t, 30*time.Second)
	for _, id := range ids {
		cfg := g.cfg[id]
		wg.Go(func() {
			r, err := OpenContext(ctx, cfg)
			if err != nil {
				g.t.Errorf("start %s: %v", id, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			g.live[id] = r
		})
	}
	wg.Wait()
	if g.t.Failed() {
		g.t.FailNow()
	}
}

// stop closes a replica.
func (g *group) stop(id string) {
	g.t.Helper()
	if err := g.live[id].Close(); err != nil {
		g.t.Error(err)
	}
	delete(g.live, id)
}

// join starts a replica that waits to be added.
func (g *group) join(id string) Config {
	g.t.Helper()
	g.cfg[id] = Config{Dir: filepath.Join(g.t.TempDir(), id), Log: quiet(), ID: id, Bind: testport.Addr(g.t), TLS: g.ca.conf(id), Join: true,
		Fatal: func(err error) { g.t.Error(err) }}
	g.start(id)
	return g.cfg[id]
}

// leader waits for a leader that has applied everything.
func (g *group) leader() *Replica {
	g.t.Helper()
	var lead *Replica
	eventually(g.t, "there is a leader", func() bool {
		for _, r := range g.live {
			if r.IsLeader() && r.Verify(within(g.t, time.Second)) == nil {
				lead = r
				return true
			}
		}
		return false
	})
	return lead
}

// follower is one that does not lead.
func (g *group) follower(lead *Replica) string {
	for _, id := range slices.Sorted(maps.Keys(g.live)) {
		if g.live[id] != lead {
			return id
		}
	}
	g.t.Fatal("there is no follower")
	return ""
}

// same waits until all replicas show what the leader shows.
func (g *group) same() {
	g.t.Helper()
	want := text(g.t, g.leader())
	for id, r := range g.live {
		eventually(g.t, id+" has what the leader has", func() bool { return text(g.t, r) == want })
	}
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatal("not in 30 s: " + what)
}

func sessions(r *Replica) (n int) {
	r.View(func(s *core.State) { n = len(s.Sessions()) })
	return n
}

// TestLeaderHandsOverAndNothingIsLost in groups of each size.
func TestLeaderHandsOverAndNothingIsLost(t *testing.T) {
	for _, size := range []int{1, 3, 5} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			g := newGroup(t, size)
			lead := g.leader()
			apply(t, lead, joinEntry())
			for n := range 20 {
				apply(t, lead, openEntry(n))
			}
			g.stop(lead.cfg.ID) // hands over first
			if size == 1 {
				g.start(lead.cfg.ID)
			}
			next := g.leader()
			if n := sessions(next); n != 20 {
				t.Errorf("the new leader has %d sessions, want 20", n)
			}
			if out := apply(t, next, openEntry(99)); out.Refused != nil {
				t.Errorf("open at the new leader: %+v", out.Refused)
			}
			g.same()
		})
	}
}

func TestTransferGoesToTheOneThatWasNamed(t *testing.T) {
	g := newGroup(t, 3)
	lead := g.leader()
	to := g.follower(lead)
	if err := lead.Transfer(within(t, 10*time.Second), to); err != nil {
		t.Fatal(err)
	}
	if now := g.leader().cfg.ID; now != to {
		t.Errorf("%s leads, want %s", now, to)
	}
	if err := lead.Transfer(within(t, time.Second), ""); !errs.Is(err, errkind.NotLeader) {
		t.Errorf("a follower handed over: %v", err)
	}
	if err := g.leader().Transfer(within(t, time.Second), "nobody"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("handed over to nobody: %v", err)
	}
	peers, err := g.leader().Peers()
	if err != nil || len(peers) != 3 {
		t.Fatal(peers, err)
	}
	for _, p := range peers {
		if !p.Voter || p.Leader != (p.ID == to) {
			t.Errorf("%+v, when %s leads", p, to)
		}
	}
}

// TestGroupGrowsAndShrinks moves a group from one machine to three others.
func TestGroupGrowsAndShrinks(t *testing.T) {
	g := newGroup(t, 1)
	lead := g.leader()
	apply(t, lead, joinEntry())
	apply(t, lead, openEntry(1))
	for _, id := range []string{"m1", "m2", "m3"} {
		c := g.join(id)
		for range 2 { // twice is no error
			if err := g.leader().AddPeer(within(t, 20*time.Second), id, c.Bind); err != nil {
				t.Fatal(err)
			}
		}
	}
	g.same()
	// The leader itself leaves: it hands over, and the next one removes it.
	if err := lead.RemovePeer(within(t, 10*time.Second), "n1"); !errs.Is(err, errkind.NotLeader) {
		t.Fatalf("the leader removed itself: %v", err)
	}
	eventually(t, "another leads", func() bool { return !lead.IsLeader() })
	for range 2 {
		if err := g.leader().RemovePeer(within(t, 10*time.Second), "n1"); err != nil {
			t.Fatal(err)
		}
	}
	g.stop("n1")
	if peers, err := g.leader().Peers(); err != nil || len(peers) != 3 {
		t.Fatal(peers, err)
	}
	apply(t, g.leader(), openEntry(2))
	g.same()
}

func TestReplicaThatDoesNotAnswerGetsNoVote(t *testing.T) {
	g := newGroup(t, 1)
	lead := g.leader()
	before := lead.raft.LastIndex()
	err := lead.AddPeer(within(t, time.Second), "m1", testport.Addr(t))
	if !errs.Is(err, errkind.Unavailable) || !strings.Contains(err.Error(), "so it was not added") {
		t.Fatalf("added a replica that is not there: %v", err)
	}
	if after := lead.raft.LastIndex(); after != before {
		t.Errorf("the group was changed for it: the log went from %d to %d", before, after)
	}
	if peers, err := lead.Peers(); err != nil || len(peers) != 1 {
		t.Errorf("it is still a member: %v %v", peers, err)
	}
	apply(t, lead, joinEntry())
	for _, bad := range [][2]string{{"A b", "127.0.0.1:1"}, {"m1", "here"}, {"m1", ":1"}} {
		if err := lead.AddPeer(within(t, time.Second), bad[0], bad[1]); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if err := lead.AddPeer(within(t, time.Second), "m1", lead.cfg.Bind); !errs.Is(err, errkind.Conflict) {
		t.Errorf("two replicas at one address: %v", err)
	}
	if err := lead.RemovePeer(within(t, time.Second), "n1"); !errs.Is(err, errkind.Refused) {
		t.Errorf("the last replica was removed: %v", err)
	}
}

func TestRemovalThatLeavesNoMajorityIsRefused(t *testing.T) {
	g := newGroup(t, 3)
	lead := g.leader()
	dead := g.follower(lead)
	g.stop(dead)
	alive := g.follower(lead)
	if err := lead.RemovePeer(within(t, 10*time.Second), alive); !errs.Is(err, errkind.Refused) {
		t.Fatalf("removed one of the two that live: %v", err)
	}
	if err := lead.RemovePeer(within(t, 10*time.Second), dead); err != nil {
		t.Fatalf("remove the dead one: %v", err)
	}
	apply(t, lead, joinEntry())
}

// TestRemovedReplicaThatComesBackDisturbsNobody: it does not know that it was removed.
func TestRemovedReplicaThatComesBackDisturbsNobody(t *testing.T) {
	g := newGroup(t, 3)
	lead := g.leader()
	gone := g.follower(lead)
	g.stop(gone)
	if err := lead.RemovePeer(within(t, 10*time.Second), gone); err != nil {
		t.Fatal(err)
	}
	term := lead.raft.CurrentTerm()
	g.start(gone)
	back := g.live[gone]
	delete(g.live, gone)
	defer back.Close()
	// It asks for votes again and again, unless the leader's last try to reach
	// it told it.
	eventually(t, "it tried, or knows", func() bool { return lead.link.refusals.Load() >= 3 || len(back.members()) == 2 })
	apply(t, lead, joinEntry())
	for n := range 20 {
		apply(t, lead, openEntry(n))
	}
	if err := lead.Verify(within(t, 5*time.Second)); err != nil || lead.raft.CurrentTerm() != term {
		t.Errorf("the leader of term %d is in term %d: %v", term, lead.raft.CurrentTerm(), err)
	}
	if n := sessions(back); n != 0 {
		t.Errorf("it was told of %d sessions", n)
	}
}

// TestWipedReplicaIsNotTakenForWhatItWas: hashicorp/raft 502.
func TestWipedReplicaIsNotTakenForWhatItWas(t *testing.T) {
	g := newGroup(t, 3)
	lead := g.leader()
	apply(t, lead, joinEntry())
	id := g.follower(lead)
	g.stop(id)
	wiped := g.cfg[id]
	wiped.Dir = t.TempDir()
	r, err := OpenContext(within(t, 20*time.Second), wiped)
	if err == nil {
		_ = r.Close()
		t.Fatal("it started under its old id with an empty folder")
	}
	if want := "replica " + id + " is known to its group with another folder"; !strings.Contains(err.Error(), want) {
		t.Errorf("unclear: %v", err)
	}
	// With join it starts and is not spoken with until the group removed it.
	wiped.Join = true
	g.cfg[id] = wiped
	g.start(id)
	apply(t, lead, openEntry(1))
	if err := lead.RemovePeer(within(t, 10*time.Second), id); err != nil {
		t.Fatal(err)
	}
	if n := g.live[id].Applied(); n != 0 {
		t.Errorf("the wiped replica was given %d entries under its old id", n)
	}
	if err := lead.AddPeer(within(t, 20*time.Second), id, wiped.Bind); err != nil {
		t.Fatal(err)
	}
	g.same()
}

// TestNewGroupWaitsForAllOfItsReplicas, which must agree on who they are.
func TestNewGroupWaitsForAllOfItsReplicas(t *testing.T) {
	ca := newAuthority(t)
	peers := []Peer{{ID: "n1", Addr: testport.Addr(t)}, {ID: "n2", Addr: testport.Addr(t)}}
	cfg := Config{Dir: t.TempDir(), Log: quiet(), ID: "n1", Bind: peers[0].Addr, TLS: ca.conf("n1"), Peers: peers}
	if r, err := OpenContext(within(t, 600*time.Millisecond), cfg); err == nil {
		_ = r.Close()
		t.Fatal("one of two began a group")
	} else if !strings.Contains(err.Error(), "n2 did not answer") {
		t.Errorf("unclear: %v", err)
	}
	other := Config{Dir: t.TempDir(), Log: quiet(), ID: "n2", Bind: peers[1].Addr, TLS: ca.conf("n2"), Peers: append(peers, Peer{ID: "n3", Addr: "127.0.0.1:1"})}
	// The one that is asked first says so; the other then finds nobody.
	ctx, cancel := context.WithCancel(within(t, 20*time.Second))
	said := make(chan error, 2)
	for _, c := range []Config{cfg, other} {
		go func() {
			r, err := OpenContext(ctx, c)
			if err == nil {
				_ = r.Close()
			}
			said <- err
		}()
	}
	first := <-said
	if first == nil || !strings.Contains(first.Error(), "was given other peers") {
		t.Errorf("two replicas with different peers: %v", first)
	}
	cancel()
	if err := <-said; err == nil {
		t.Error("it began although the other has different peers")
	}
}

// TestReplicaThatWasAloneGrowsIntoAGroup: its group knows it by an address that
// nobody can reach, until it leads.
func TestReplicaThatWasAloneGrowsIntoAGroup(t *testing.T) {
	dir := t.TempDir()
	alone := openLeader(t, Config{Dir: dir})
	apply(t, alone, joinEntry())
	id := alone.cfg.ID
	if err := alone.AddPeer(within(t, time.Second), "m1", "127.0.0.1:1"); !errs.Is(err, errkind.Invalid) {
		t.Errorf("a replica without an address took another in: %v", err)
	}
	if err := alone.Close(); err != nil {
		t.Fatal(err)
	}
	g := &group{t: t, ca: newAuthority(t), cfg: map[string]Config{}, live: map[string]*Replica{}}
	t.Cleanup(func() {
		for _, r := range g.live {
			_ = r.Close()
		}
	})
	g.cfg[id] = Config{Dir: dir, Log: quiet(), ID: id, Bind: testport.Addr(t), TLS: g.ca.conf(id)}
	other := g.cfg[id]
	other.ID, other.TLS = "n9", g.ca.conf("n9")
	if _, err := Open(other); err == nil || !strings.Contains(err.Error(), "the folder is that of replica "+id) {
		t.Errorf("a folder was taken over by another id: %v", err)
	}
	g.start(id)
	c := g.join("m1")
	lead := g.leader()
	eventually(t, "its address is corrected", func() bool {
		p, err := lead.Peers()
		return err == nil && len(p) == 1 && p[0].Addr == lead.cfg.Bind
	})
	if err := lead.AddPeer(within(t, 20*time.Second), "m1", c.Bind); err != nil {
		t.Fatal(err)
	}
	g.same()
}
