package replica

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/hashicorp/raft"
)

func joinEntry() core.Entry {
	return core.Entry{Now: 1, Join: &core.Host{ID: "h1", Boot: "b", Tiers: []corev1.Tier{corev1.Tier_TIER_NULL},
		Capacity: core.Limits{CPUMillis: 1 << 30, MemoryBytes: 1 << 50}}}
}

func apply(t testing.TB, r *Replica, e core.Entry) core.Outcome {
	t.Helper()
	out, err := r.Apply(context.Background(), e)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func text(t testing.TB, r *Replica) string {
	t.Helper()
	var b bytes.Buffer
	r.View(func(s *core.State) {
		c := s.Clone()
		c.Index = 0 // a barrier moves it
		if _, err := c.WriteTo(&b); err != nil {
			t.Error(err)
		}
	})
	return b.String()
}

func TestStateSurvivesRestartAndSnapshot(t *testing.T) {
	dir := t.TempDir()
	r := openLeader(t, Config{Dir: dir})
	apply(t, r, joinEntry())
	for n := range 50 {
		apply(t, r, openEntry(n))
	}
	if err := r.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	for n := range 50 {
		apply(t, r, openEntry(100+n))
	}
	want := text(t, r)
	id, _ := os.ReadFile(filepath.Join(dir, "server-id"))
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = openLeader(t, Config{Dir: dir})
	if got := text(t, r); got != want {
		t.Error("the state after a restart differs")
	}
	again, _ := os.ReadFile(filepath.Join(dir, "server-id"))
	if string(id) != string(again) || len(id) == 0 {
		t.Errorf("server id changed from %q to %q", id, again)
	}
}

func TestSecondProcessIsRefused(t *testing.T) {
	dir := t.TempDir()
	openLeader(t, Config{Dir: dir})
	if r, err := Open(Config{Dir: dir, Log: quiet()}); err == nil {
		_ = r.Close()
		t.Error("two replicas use one folder")
	} else if !strings.Contains(err.Error(), "another process uses") {
		t.Errorf("unclear: %v", err)
	}
}

// hungStore is a disk that stops answering.
type hungStore struct {
	raft.LogStore
	hang chan struct{}
}

func (h hungStore) StoreLogs([]*raft.Log) error { <-h.hang; return nil }

func TestHungDiskEndsTheProcess(t *testing.T) {
	fatal := make(chan error, 1)
	h := hungStore{raft.NewInmemStore(), make(chan struct{})}
	w := newWatchdog(h, raft.NewInmemStore(), 50*time.Millisecond, func(err error) { fatal <- err })
	defer w.stop()
	done := make(chan struct{})
	go func() { defer close(done); _ = w.StoreLogs(nil) }()
	select {
	case err := <-fatal:
		if !strings.Contains(err.Error(), "the disk hangs") {
			t.Errorf("unclear: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("nobody noticed")
	}
	close(h.hang)
	<-done
}

// TestGroupOfThree checks the real transport: a leader is replaced and nothing
// that was acknowledged is lost.
func TestGroupOfThree(t *testing.T) {
	conf := testTLS(t)
	var peers []Peer
	for i := range 3 {
		peers = append(peers, Peer{ID: fmt.Sprint("n", i), Addr: freeAddr(t)})
	}
	var group []*Replica
	for _, p := range peers {
		r, err := Open(Config{Dir: t.TempDir(), Log: quiet(), ID: p.ID, Bind: p.Addr, TLS: conf, Peers: peers})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		group = append(group, r)
	}
	lead := leaderOf(t, group)
	apply(t, lead, joinEntry())
	for n := range 20 {
		apply(t, lead, openEntry(n))
	}
	if err := lead.Close(); err != nil { // hands over first
		t.Fatal(err)
	}
	var rest []*Replica
	for _, r := range group {
		if r != lead {
			rest = append(rest, r)
		}
	}
	next := leaderOf(t, rest)
	if err := next.Barrier(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	next.View(func(s *core.State) {
		if n := len(s.Sessions()); n != 20 {
			t.Errorf("the new leader has %d sessions, want 20", n)
		}
	})
	if out := apply(t, next, openEntry(99)); out.Refused != nil {
		t.Errorf("open at the new leader: %+v", out.Refused)
	}
}

func leaderOf(t *testing.T, group []*Replica) *Replica {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		for _, r := range group {
			if r.IsLeader() && r.Barrier(time.Second) == nil {
				return r
			}
		}
	}
	t.Fatal("no leader")
	return nil
}

func freeAddr(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func testTLS(t *testing.T) *tls.Config {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "scheduler"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: k}}, RootCAs: pool, ClientCAs: pool,
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13}
}

func TestDecodeOfNewerEntryIsRefused(t *testing.T) {
	if _, err := core.DecodeEntry([]byte(`{"v":99}`)); err == nil {
		t.Error("an entry of a newer format was read")
	}
}
