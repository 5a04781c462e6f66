package replica

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"strings"
	"testing"
	"time"
)

// TestOnlyAReplicaWithItsOwnCertificateIsHeard: what is refused, and that the
// group goes on.
func TestOnlyAReplicaWithItsOwnCertificateIsHeard(t *testing.T) {
	g := newGroup(t, 3)
	lead := g.leader()
	victim := g.cfg[g.follower(lead)]
	lead = g.leader()
	stranger := newAuthority(t)
	foreign := stranger.conf("n1")
	foreign.RootCAs = g.ca.conf("n1").RootCAs // it trusts us; we do not trust it
	without := g.ca.conf("n1")
	without.Certificates = nil
	for _, c := range []struct {
		name string
		conf *tls.Config
		as   string
		said string
	}{
		{"foreign certificate", foreign, "n1", ""},
		{"no certificate", without, "n1", ""},
		{"expired certificate", g.ca.conf("n1", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }), "n1", ""},
		{"certificate for servers only", g.ca.conf("n1", func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }), "n1", ""},
		{"certificate of another replica", g.ca.conf("n2"), "n1", "the certificate names"},
		{"certificate of no replica", g.ca.conf("x", func(c *x509.Certificate) { c.DNSNames, c.Subject = nil, pkix.Name{CommonName: "hostagent"} }), "n1", "the certificate names"},
		{"replica that is no member", g.ca.conf("m9"), "m9", "no member of the group"},
		{"nameless replica", g.ca.conf(""), "", "the certificate names"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := greetAs(t, c.conf, c.as, victim)
			if err == nil {
				t.Fatal("it was heard")
			}
			if !strings.Contains(err.Error(), c.said) {
				t.Errorf("it was told %q, want %q", err, c.said)
			}
		})
	}
	if g.leader() != lead {
		t.Error("the leader changed")
	}
	apply(t, lead, joinEntry())
}

// greetAs speaks with a replica and waits until it is welcome.
func greetAs(t *testing.T, conf *tls.Config, id string, to Config) error {
	l := &link{self: id, conf: conf, pins: &pins{own: "f"}, done: make(chan struct{}), open: map[net.Conn]struct{}{}}
	return l.ask(within(t, 10*time.Second), Peer{ID: to.ID, Addr: to.Bind})
}

// TestReplicaIsNotSpokenWithUnderAnotherName: a server whose certificate is
// good, but names somebody else.
func TestReplicaIsNotSpokenWithUnderAnotherName(t *testing.T) {
	g := newGroup(t, 1)
	g.leader()
	to := g.cfg["n1"]
	to.ID = "n2"
	err := greetAs(t, g.ca.conf("n3"), "n3", to)
	if err == nil || !strings.Contains(err.Error(), "certificate is valid for n1, not n2") {
		t.Errorf("n1 was taken for n2: %v", err)
	}
}

func TestGroupWithoutMutualTLSIsRefused(t *testing.T) {
	ca := newAuthority(t)
	half := ca.conf("n1")
	half.ClientAuth = tls.VerifyClientCertIfGiven
	for _, c := range []struct {
		cfg  Config
		said string
	}{
		{Config{Dir: "d", Bind: "127.0.0.1:0", ID: "n1"}, "mutual TLS only"},
		{Config{Dir: "d", Bind: "127.0.0.1:0", ID: "n1", TLS: half}, "mutual TLS only"},
		{Config{Dir: "d", Bind: "127.0.0.1:0", TLS: ca.conf("n1")}, "which its certificate names"},
		{Config{Dir: "d", Bind: ":7000", ID: "n1", TLS: ca.conf("n1")}, "advertise one"},
		{Config{Dir: "d", Bind: "here", ID: "n1", TLS: ca.conf("n1")}, "host:port"},
		{Config{Dir: "d", Join: true}, "needs an address to bind"},
		{Config{Dir: "d", Bind: "127.0.0.1:0", ID: "n1", TLS: ca.conf("n1"), Peers: []Peer{{ID: "n2", Addr: "127.0.0.1:1"}}}, "not among its own peers"},
		{Config{}, "no folder"},
	} {
		_, err := OpenContext(context.Background(), c.cfg)
		if err == nil || !strings.Contains(err.Error(), c.said) {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.said)
		}
	}
}
