package ca

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"
)

var addr = netip.MustParseAddr("127.0.0.1")

func member(t *testing.T, dir, name string, now time.Time, addrs ...netip.Addr) (Pair, string) {
	t.Helper()
	a, err := Open(dir, now)
	if err != nil {
		t.Fatal(err)
	}
	p, err := a.Member(name, now, addrs...)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(p.Cert)
	if err != nil {
		t.Fatal(err)
	}
	return p, string(raw)
}

// A certificate that ran out stops a cluster a year after nobody remembers it.
func TestACertificateIsKeptUntilItEndsSoon(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	_, first := member(t, dir, "nats-1", now, addr)
	if _, again := member(t, dir, "nats-1", now.Add(24*time.Hour), addr); again != first {
		t.Error("it was made again for no reason")
	}
	if _, moved := member(t, dir, "nats-1", now, netip.MustParseAddr("127.0.0.2")); moved == first {
		t.Error("it names an address that the member does not have any more")
	}
	_, second := member(t, dir, "nats-1", now, addr)
	if _, late := member(t, dir, "nats-1", now.Add(memberLife-24*time.Hour), addr); late == second {
		t.Error("it was not renewed a day before its end")
	}
}

func TestKeysAreTheOwnersOnly(t *testing.T) {
	dir := t.TempDir()
	member(t, dir, "scheduler-1", time.Now(), addr)
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 4 {
		t.Fatalf("the folder has %v: %v", files, err)
	}
	for _, f := range files {
		if st, err := os.Stat(f); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", f, st.Mode(), err)
		}
	}
}

// A member of another cluster must not be let in.
func TestOnlyMembersOfOneAuthorityTalk(t *testing.T) {
	now := time.Now()
	dir := t.TempDir()
	server, _ := member(t, dir, "scheduler-1", now, addr)
	friend, _ := member(t, dir, "scheduler-2", now, addr)
	stranger, _ := member(t, t.TempDir(), "scheduler-2", now, addr)
	stranger.CA = server.CA // it would even trust the server
	for _, c := range []struct {
		who  Pair
		name string
		ok   bool
	}{{friend, "scheduler-1", true}, {friend, "scheduler-3", false}, {stranger, "scheduler-1", false}} {
		if err := shake(t, config(t, server), config(t, c.who), c.name); (err == nil) != c.ok {
			t.Errorf("%s: %v, want it to work: %v", c.name, err, c.ok)
		}
	}
}

func config(t *testing.T, p Pair) *tls.Config {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(p.Cert, p.Key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(p.CA)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(raw)
	return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool, ClientCAs: pool,
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13}
}

func shake(t *testing.T, server, client *tls.Config, name string) error {
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
	client.ServerName = name
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", l.Addr().String(), client)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Read(make([]byte, 1)) // the server's verdict on the client comes only now
	return err
}
