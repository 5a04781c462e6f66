package certs

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

var here = []netip.Addr{netip.MustParseAddr("127.0.0.1")}

func openCA(t *testing.T, dir string, now time.Time) *CA {
	t.Helper()
	c, err := OpenCA(dir, now)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// files is a source of a leaf in a file, as members of a cluster have it.
func files(t *testing.T, c *CA, l Leaf) (*Files, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), l.Name+".pem")
	if err := c.Keep(path, l, time.Now()); err != nil {
		t.Fatal(err)
	}
	f, err := OpenFiles(path, path, c.BundleFile(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return f, path
}

// shake connects once and returns the certificates that both sides saw.
func shake(t *testing.T, server, client *tls.Config) (atClient, atServer []*x509.Certificate, err error) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if c.(*tls.Conn).Handshake() == nil {
			atServer = c.(*tls.Conn).ConnectionState().PeerCertificates
			_, _ = c.Write([]byte("x"))
		}
	})
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: 20 * time.Second}, "tcp", l.Addr().String(), client)
	if err != nil {
		wg.Wait()
		return nil, nil, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	_, err = io.ReadFull(c, make([]byte, 1)) // the server's verdict on the client comes only now
	wg.Wait()
	return c.ConnectionState().PeerCertificates, atServer, err
}

var bus1, bus2 = Leaf{Role: RoleBus, Name: "nats-1", IPs: here}, Leaf{Role: RoleBus, Name: "nats-2", IPs: here}

// Whoever holds some certificate of ours is not yet whom the other side means.
func TestACertificateOfAnotherRoleOrAuthorityIsRefused(t *testing.T) {
	ca, foreign := openCA(t, t.TempDir(), time.Now()), openCA(t, t.TempDir(), time.Now())
	node := ca.Source(bus1)
	for what, c := range map[string]struct {
		who  Source
		want string
	}{
		"another node":      {ca.Source(bus2), ""},
		"a host":            {ca.Source(Leaf{Role: RoleHost, Name: "nats-2", ClientOnly: true}), "certificate"},
		"another authority": {foreign.Source(bus2), "certificate"},
	} {
		_, _, err := shake(t, Mutual(node, Only(RoleBus, "")), Mutual(c.who, Only(RoleBus, "")))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, _, err := shake(t, Mutual(ca.Source(Leaf{Role: RoleHost, Name: "nats-2"})), Client(node, Only(RoleBus, "")))
	if err == nil || !strings.Contains(err.Error(), "not nats") {
		t.Errorf("a host that listens: %v", err)
	}
	_, _, err = shake(t, Server(node, tls.VerifyClientCertIfGiven), Client(ca.Source(bus2), Only(RoleBus, "nats-3")))
	if err == nil {
		t.Error("another name was accepted")
	}
	if _, _, err := shake(t, Server(node, tls.RequireAndVerifyClientCert), &tls.Config{InsecureSkipVerify: true}); err == nil { //nolint:gosec // the server is tested
		t.Error("no certificate was accepted")
	}
}

// A certificate for clients must not serve as a listener's, whatever its holder is called.
func TestAClientsCertificateIsNoListeners(t *testing.T) {
	ca := openCA(t, t.TempDir(), time.Now())
	thief := ca.Source(Leaf{Role: RoleHost, Name: "localhost", ClientOnly: true})
	roots, err := thief.Roots()
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := shake(t, Server(thief, tls.NoClientCert), &tls.Config{RootCAs: roots, ServerName: "localhost"}); err == nil {
		t.Error("a host called localhost passes for a server here")
	}
}

func TestNothingBelowTLS13(t *testing.T) {
	ca := openCA(t, t.TempDir(), time.Now())
	roots, err := ca.Source(bus1).Roots()
	if err != nil {
		t.Fatal(err)
	}
	for _, conf := range []*tls.Config{Server(ca.Source(bus1), tls.NoClientCert), Mutual(ca.Source(bus1))} {
		if _, _, err := shake(t, conf, &tls.Config{RootCAs: roots, MaxVersion: tls.VersionTLS12}); err == nil || !strings.Contains(err.Error(), "protocol version") {
			t.Errorf("got %v", err)
		}
	}
}

// Reload and rotation: no handshake fails, and no configuration is made again.
func TestACertificateAndARootAreReplacedWithoutARestart(t *testing.T) {
	ca := openCA(t, t.TempDir(), time.Now())
	one, onePath := files(t, ca, bus1)
	two, twoPath := files(t, ca, bus2)
	server, client := Mutual(one, Only(RoleBus, "")), Mutual(two, Only(RoleBus, ""))
	seen := func(what string) string {
		t.Helper()
		got, _, err := shake(t, server, client)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if _, _, err := shake(t, client, server); err != nil {
			t.Fatalf("%s, the other way round: %v", what, err)
		}
		return got[0].SerialNumber.String()
	}
	first := seen("at first")
	if err := os.Remove(onePath); err != nil {
		t.Fatal(err)
	}
	if again := seen("the file is away"); again != first {
		t.Error("another certificate out of nowhere")
	}
	keep := func(path string, l Leaf) {
		t.Helper()
		if err := ca.Keep(path, l, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	keep(onePath, bus1)
	second := seen("a new certificate")
	if second == first {
		t.Error("the new certificate is not shown")
	}
	if err := os.WriteFile(onePath, []byte("-----BEGIN CERT"), 0o600); err != nil {
		t.Fatal(err)
	}
	if again := seen("a half-written file"); again != second {
		t.Error("what was good before is not shown")
	}
	stale, err := os.ReadFile(ca.BundleFile())
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.Rotate(time.Now()); err != nil {
		t.Fatal(err)
	}
	seen("a new root is trusted")
	keep(onePath, bus1)
	if seen("one side has a certificate of the new root") == second {
		t.Error("Keep kept a certificate of the old root")
	}
	// Who did not hear of the new root yet believes it for the old one's word.
	old, err := Pool(stale)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := shake(t, Server(one, tls.NoClientCert), &tls.Config{RootCAs: old, ServerName: "nats-1"}); err != nil {
		t.Errorf("with the roots of before: %v", err)
	}
	keep(twoPath, bus2)
	seen("both have")
}

// A certificate that ran out stops a fleet when nobody remembers it any more.
func TestACertificateIsRenewedWhenAThirdOfItsLifeIsLeft(t *testing.T) {
	now := time.Now()
	ca := openCA(t, t.TempDir(), now)
	raw, err := ca.Issue(bus1, now)
	if err != nil {
		t.Fatal(err)
	}
	moved := bus1
	moved.IPs = []netip.Addr{netip.MustParseAddr("127.0.0.2")}
	for what, c := range map[string]struct {
		l    Leaf
		at   time.Duration
		want bool
	}{
		"new":          {bus1, 0, true},
		"19 days":      {bus1, 19 * 24 * time.Hour, true},
		"21 days":      {bus1, 21 * 24 * time.Hour, false},
		"over":         {bus1, 40 * 24 * time.Hour, false},
		"not yet":      {bus1, -2 * time.Hour, false},
		"other name":   {bus2, 0, false},
		"other place":  {moved, 0, false},
		"clients only": {Leaf{Role: RoleBus, Name: "nats-1", IPs: here, ClientOnly: true}, 0, false},
	} {
		if got := ca.Fresh(raw, c.l, now.Add(c.at)); got != c.want {
			t.Errorf("%s: fresh is %v", what, got)
		}
	}
	s := &issued{ca: ca, leaf: bus1, clock: func() time.Time { return now }}
	first, err := s.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	if same, _ := s.Certificate(); same != first {
		t.Error("it was issued again for no reason")
	}
	now = now.Add(21 * 24 * time.Hour)
	if next, _ := s.Certificate(); next == first {
		t.Error("a process that runs for long ends with its certificate")
	}
}

// An old root is trusted as long as a certificate of it can live, and no longer.
func TestAnOldRootIsForgotten(t *testing.T) {
	now := time.Now()
	ca := openCA(t, t.TempDir(), now)
	if err := ca.Rotate(now); err != nil {
		t.Fatal(err)
	}
	for days, want := range map[int]int{0: 2, 29: 2, 31: 1} {
		roots, err := ca.Roots(now.Add(time.Duration(days) * 24 * time.Hour))
		if err != nil || len(roots) != want {
			t.Errorf("after %d days %d roots are trusted, %v", days, len(roots), err)
		}
	}
	raw, err := os.ReadFile(ca.file())
	if err != nil || strings.Count(string(raw), "PRIVATE KEY-----") != 2 {
		t.Errorf("the key of the old root is kept: %v", err)
	}
}

// Several processes start on an empty folder at once.
func TestOneAuthorityIsMadeOfManyAtOnce(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	got := make([]string, 8)
	for i := range got {
		wg.Go(func() {
			c, err := OpenCA(dir, time.Now())
			if err != nil {
				t.Error(err)
				return
			}
			b, err := c.Bundle(time.Now())
			if err != nil {
				t.Error(err)
			}
			got[i] = string(b)
		})
	}
	wg.Wait()
	for _, g := range got {
		if g == "" || g != got[0] {
			t.Fatal("there is more than one root")
		}
	}
}

func TestKeysAreTheOwnersOnly(t *testing.T) {
	dir := t.TempDir()
	ca := openCA(t, dir, time.Now())
	if err := ca.Keep(ca.Path("nats-1"), bus1, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{ca.file(), ca.Path("nats-1")} {
		if st, err := os.Stat(f); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", f, st, err)
		}
	}
	if err := os.Chmod(ca.file(), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenCA(dir, time.Now()); err == nil || !strings.Contains(err.Error(), "by others") {
		t.Errorf("a key that others can read was used: %v", err)
	}
}

func TestWhatNamesNobodyIsNotIssued(t *testing.T) {
	ca := openCA(t, t.TempDir(), time.Now())
	for _, l := range []Leaf{{Role: RoleHost}, {Name: "x"}, {Role: "a/b", Name: "x"}, {Role: RoleHost, Name: "../x"},
		{Role: RoleHost, Name: strings.Repeat("x", 200)}, {Role: RoleHost, Name: "X"}} {
		if _, err := ca.Issue(l, time.Now()); err == nil {
			t.Errorf("%v was issued", l)
		}
	}
}
