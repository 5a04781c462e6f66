package certs

import (
	"crypto/tls"
	"crypto/x509"
	"net/url"
	"strings"
	"testing"
	"time"
)

func named(t testing.TB, uris ...string) *x509.Certificate {
	t.Helper()
	c := &x509.Certificate{}
	for _, raw := range uris {
		u, err := url.Parse(raw)
		if err != nil {
			t.Skip("no URI: a certificate with it cannot be parsed either")
		}
		c.URIs = append(c.URIs, u)
	}
	return c
}

// A certificate that could be read in two ways names nobody.
func TestOnlyOnePlainIDNamesSomebody(t *testing.T) {
	for _, c := range []struct {
		uris []string
		want Peer
	}{
		{[]string{"spiffe://berth/nats/nats-1"}, Peer{"berth", "nats", "nats-1"}},
		{[]string{"spiffe://corp.example/berth/host/h1"}, Peer{"corp.example", "host", "h1"}},
		{nil, Peer{}},
		{[]string{"spiffe://berth/nats/n1", "spiffe://berth/host/n1"}, Peer{}},
		{[]string{"https://berth/nats/n1"}, Peer{}},
		{[]string{"spiffe:///nats/n1"}, Peer{}},
		{[]string{"spiffe://berth/nats"}, Peer{}},
		{[]string{"spiffe://berth/nats/"}, Peer{}},
		{[]string{"spiffe://berth//n1"}, Peer{}},
		{[]string{"spiffe://berth/ns/prod/sa/nats/n1"}, Peer{}},
		{[]string{"spiffe://berth/other/nats/n1"}, Peer{}},
		{[]string{"spiffe://u@berth/nats/n1"}, Peer{}},
		{[]string{"spiffe://berth/nats/n1?x"}, Peer{}},
		{[]string{"spiffe://berth/nats/n1#x"}, Peer{}},
		{[]string{"spiffe://berth/nats/n%2f1"}, Peer{}},
	} {
		if p, ok := PeerOf(named(t, c.uris...)); p != c.want || ok != (c.want != Peer{}) {
			t.Errorf("%v names %+v, %v", c.uris, p, ok)
		}
	}
}

func FuzzPeerOf(f *testing.F) {
	for _, s := range []string{"spiffe://berth/nats/n1", "spiffe://x/berth/host/h", "spiffe:", "spiffe://a/b/c/d", "spiffe://berth/a/%2e%2e"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, ok := PeerOf(named(t, s))
		if !ok {
			return
		}
		if p.Domain == "" || p.Role == "" || p.Name == "" || strings.ContainsAny(p.Role+p.Name, "/") {
			t.Fatalf("%q names %+v", s, p)
		}
		if again, ok := PeerOf(named(t, p.URI().String())); !ok || again != p {
			t.Fatalf("%q names %+v, whose URI names %+v", s, p, again)
		}
	})
}

// Whoever has a certificate for its web site is not one of Berth's processes.
func TestPublicAuthoritiesAreNotTrustedAmongOurselves(t *testing.T) {
	ca := openCA(t, t.TempDir(), time.Now())
	_, path := files(t, ca, bus1)
	own, err := OpenFiles(path, path, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	node := ca.Source(bus2)
	if _, _, err := shake(t, Server(own, tls.VerifyClientCertIfGiven), Client(node)); err == nil {
		t.Error("a listener without roots verifies by the machine's")
	}
	if _, _, err := shake(t, Server(node, tls.VerifyClientCertIfGiven), Client(own)); err == nil || !strings.Contains(err.Error(), "no roots") {
		t.Errorf("a client without roots: %v", err)
	}
}
