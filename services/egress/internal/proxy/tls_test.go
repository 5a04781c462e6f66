package proxy

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

func hi(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.WriteString(c, "hello"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
		t.Fatalf("%q, %v", b, err)
	}
}

func TestTLSIsPassedThroughUnopened(t *testing.T) {
	for _, n := range []authority.Name{"open.example.com", "six.example.com"} { // IPv4, IPv6
		g := open(t, standard, Limits{})
		g.secure(n, &tls.Config{}, echo)
		c := tls.Client(g.direct(n), &tls.Config{ServerName: string(n), RootCAs: g.public.pool})
		hi(t, c)
		_ = c.Close()
		r := g.recorded(1, egressv1.Verdict_VERDICT_ALLOWED, policy.Allowed)
		if r.GetRule() != "open" || r.GetAuthority() != string(n) || r.GetDoor() != transparent || r.GetProtocol() != "tls" ||
			r.GetAddress() != "127.0.0.1" || r.GetBytesOut() < 100 || r.GetBytesIn() < 500 || r.GetPolicyGeneration() != 7 || r.GetLayer() != egressv1.Layer_LAYER_CELL {
			t.Errorf("recorded %v", r)
		}
		if d := g.world.dialled(); !slices.Equal(d, []string{string(n) + ":" + itoa(g.port())}) {
			t.Errorf("dialled %v", d)
		}
	}
}

// TestRow2And14SNIOfAnotherHost: a second name on the same address is another host.
func TestRow2And14SNIOfAnotherHost(t *testing.T) {
	for _, name := range []string{"shut.example.com", "read.example.com", "open.example.com.evil.test", "xopen.example.com"} {
		g := open(t, standard, Limits{})
		g.secure("open.example.com", &tls.Config{}, echo)
		c := g.direct("open.example.com")
		_ = tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
		g.refused(c, 1, policy.Mismatch)
	}
}

func TestSNIInAnotherCaseIsTheSameHost(t *testing.T) {
	g := open(t, standard, Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	c := tls.Client(g.direct("open.example.com"), &tls.Config{ServerName: "OPEN.example.COM", InsecureSkipVerify: true})
	hi(t, c)
}

func TestRow2HiddenHello(t *testing.T) {
	g := open(t, standard, Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	c := g.direct("open.example.com")
	if _, err := c.Write(hiddenHello(t, "open.example.com")); err != nil {
		t.Fatal(err)
	}
	g.refused(c, 1, policy.Hidden)
}

// hiddenHello is a hello with an ECH extension, as Chrome sends it with GREASE.
func hiddenHello(t *testing.T, name string) []byte {
	t.Helper()
	client, server := net.Pipe()
	go func() {
		_ = tls.Client(client, &tls.Config{ServerName: name}).Handshake()
	}()
	defer client.Close()
	b := make([]byte, 16<<10)
	n, err := server.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	ech := []byte{0xfe, 0x0d, 0, 14, 0, 0, 1, 0, 1, 9, 0, 2, 1, 2, 0, 2, 3, 4} // outer, HKDF-SHA256, AES-128-GCM
	b = append(b[:n], ech...)                                                  // the extensions are at the end
	grow := func(at int) {
		n := int(b[at])<<8 + int(b[at+1]) + len(ech)
		b[at], b[at+1] = byte(n>>8), byte(n)
	}
	grow(3)
	grow(7) // the lower bytes of three
	at := 9 + 2 + 32
	at += 1 + int(b[at])
	at += 2 + int(b[at])<<8 + int(b[at+1])
	at += 1 + int(b[at])
	grow(at)
	return b
}

func TestRow3TLSWithoutSNI(t *testing.T) {
	for _, n := range []authority.Name{"open.example.com", "read.example.com"} {
		g := open(t, standard, Limits{})
		c := g.direct(n)
		_ = tls.Client(c, &tls.Config{InsecureSkipVerify: true}).Handshake()
		g.refused(c, 1, policy.NoName)
	}
}

// again is a client that names another host when the server asks for a second hello.
type again struct {
	net.Conn
	from, to string
	hellos   int
}

func (a *again) Write(b []byte) (int, error) {
	if strings.Contains(string(b), a.from) {
		if a.hellos++; a.hellos == 2 {
			b = []byte(strings.ReplaceAll(string(b), a.from, a.to))
		}
	}
	return a.Conn.Write(b)
}

func TestRow2SecondHelloOfAnotherHost(t *testing.T) {
	for to, reason := range map[string]policy.Reason{"open.example.com": policy.Allowed, "shut.example.com": policy.Mismatch} {
		g := open(t, standard, Limits{})
		asked := make(chan string, 4)
		g.secure("open.example.com", &tls.Config{CurvePreferences: []tls.CurveID{tls.CurveP521}}, func(c net.Conn) {
			_ = c.(*tls.Conn).Handshake()
			asked <- c.(*tls.Conn).ConnectionState().ServerName
			echo(c)
		})
		c := &again{Conn: g.direct("open.example.com"), from: "open.example.com", to: to}
		err := tls.Client(c, &tls.Config{ServerName: "open.example.com", RootCAs: g.public.pool, CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP521}}).Handshake()
		_ = c.Close()
		if c.hellos != 2 {
			t.Fatalf("%d hellos: the server did not ask again", c.hellos)
		}
		if ok := reason == policy.Allowed; (err == nil) != ok {
			t.Errorf("%s: %v", to, err)
		} else if v := egressv1.Verdict_VERDICT_ALLOWED; !ok {
			g.recorded(1, egressv1.Verdict_VERDICT_DENIED, reason)
		} else {
			g.recorded(1, v, reason)
		}
	}
}

func TestRow1To3BrokenHello(t *testing.T) {
	g := open(t, standard, Limits{})
	c := g.direct("open.example.com")
	if _, err := c.Write([]byte{0x16, 3, 1, 0xff, 0xff}); err != nil {
		t.Fatal(err)
	}
	g.refused(c, 1, policy.Malformed)
}

// TestRow2InjectionOnlyEverIntercepted: where a rule looks at requests TLS is opened with the cell's own
// certificate, whatever the client does, and the engine gets it with its name.
func TestRow2InjectionOnlyEverIntercepted(t *testing.T) {
	g := open(t, standard, Limits{})
	c := tls.Client(g.direct("read.example.com"), &tls.Config{ServerName: "read.example.com", RootCAs: g.minted.pool, NextProtos: []string{"http/1.1"}})
	if got := get(t, c, "/v1/x"); got != "transparent https read.example.com:"+itoa(g.port())+" allowed" {
		t.Errorf("got %q", got)
	}
	served := <-g.pages.served
	if !served.Secure || served.ALPN != "http/1.1" || served.Name != "read.example.com" {
		t.Errorf("served %+v", served)
	}
	if d := g.world.dialled(); len(d) > 0 {
		t.Errorf("dialled %v: that is the engine's", d)
	}
	if g.box.records != nil {
		t.Errorf("recorded %v: that is the engine's", g.box.records)
	}
}

func TestALPNIsWhatBothKnow(t *testing.T) {
	g := open(t, standard, Limits{})
	for _, c := range []struct{ offer, want []string }{
		{nil, []string{""}}, {[]string{"h2", "http/1.1"}, []string{"h2"}}, {[]string{"foo", "http/1.1"}, []string{"http/1.1"}},
	} {
		conn := tls.Client(g.direct("read.example.com"), &tls.Config{ServerName: "read.example.com", RootCAs: g.minted.pool, NextProtos: c.offer})
		if err := conn.Handshake(); err != nil {
			t.Fatal(err)
		}
		if got := (<-g.pages.served).ALPN; got != c.want[0] {
			t.Errorf("offered %v, got %q", c.offer, got)
		}
		_ = conn.Close()
	}
}

func TestHiddenHelloIsOpenedWhereTLSIs(t *testing.T) {
	g := open(t, standard, Limits{})
	c := g.direct("read.example.com")
	if _, err := c.Write(hiddenHello(t, "read.example.com")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	if _, err := io.ReadFull(c, b); err != nil || b[0] != 0x16 {
		t.Errorf("%v, %v: want the gate's own hello", b, err)
	}
}

func TestClientThatDoesNotTrustTheCell(t *testing.T) {
	g := open(t, standard, Limits{})
	c := g.direct("read.example.com")
	if err := tls.Client(c, &tls.Config{ServerName: "read.example.com", RootCAs: g.public.pool}).Handshake(); err == nil {
		t.Error("it does")
	}
	_ = c.Close()
	g.recorded(1, egressv1.Verdict_VERDICT_FAILED, policy.Certificate)
}

// TestHandshakeThatTheClientLeavesIsARefusal: refusals that are alike are counted, not recorded one by one.
func TestHandshakeThatTheClientLeavesIsARefusal(t *testing.T) {
	g := open(t, standard, Limits{})
	c := g.direct("read.example.com")
	if _, err := c.Write(hiddenHello(t, "read.example.com")); err != nil {
		t.Fatal(err)
	}
	_, _ = io.ReadFull(c, make([]byte, 1))
	_ = c.Close()
	g.recorded(1, egressv1.Verdict_VERDICT_DENIED, policy.Malformed)
}

func TestNoAuthorityNoInterception(t *testing.T) {
	g := open(t, standard, Limits{})
	g.change(func() { g.minted.away = errors.New("there is no authority") })
	c := g.direct("read.example.com")
	if err := tls.Client(c, &tls.Config{ServerName: "read.example.com", RootCAs: g.minted.pool}).Handshake(); err == nil {
		t.Error("opened")
	}
	g.recorded(1, egressv1.Verdict_VERDICT_FAILED, policy.Certificate)
	if d := g.world.dialled(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
}

func TestRefusedTLSIsResetAtOnce(t *testing.T) {
	g := open(t, standard, Limits{})
	c := g.direct("shut.example.com")
	err := tls.Client(c, &tls.Config{ServerName: "shut.example.com"}).Handshake()
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	g.recorded(1, egressv1.Verdict_VERDICT_DENIED, policy.NoRule)
}

// TestPolicyThatChangesBeforeTheHelloIsComplete: what holds when it is complete decides.
func TestPolicyThatChangesBeforeTheHelloIsComplete(t *testing.T) {
	for how, doc := range map[string]string{
		"opened":  "rules: [{name: x, allow: {hosts: [open.example.com], ports: [PORT], protocol: https, methods: [GET]}}]",
		"refused": "rules: []",
		"raw":     "rules: [{name: x, allow: {hosts: [open.example.com], ports: [PORT], protocol: tcp}}]",
	} {
		g := open(t, standard, Limits{})
		g.secure("open.example.com", &tls.Config{}, echo)
		c := &slowHello{Conn: g.direct("open.example.com"), asked: g.box.asked, then: func() { g.box.set(parse(t, g.doc(doc))) }}
		s := tls.Client(c, &tls.Config{ServerName: "open.example.com", RootCAs: g.minted.pool})
		if err := s.Handshake(); (err == nil) != (how == "opened") {
			t.Errorf("%s: %v", how, err)
		}
		if d := g.world.dialled(); len(d) > 0 {
			t.Errorf("%s: dialled %v", how, d)
		}
		if how != "opened" {
			g.recorded(1, egressv1.Verdict_VERDICT_DENIED, policy.Revoked)
		}
	}
}

// slowHello does something after the first bytes of the hello, once the gate has read them.
type slowHello struct {
	net.Conn
	asked <-chan struct{}
	then  func()
}

func (s *slowHello) Write(b []byte) (int, error) {
	if s.then == nil {
		return s.Conn.Write(b)
	}
	if _, err := s.Conn.Write(b[:10]); err != nil {
		return 0, err
	}
	for range 3 { // what it needs: before the first byte, plain or TLS, and after it
		<-s.asked
	}
	s.then()
	s.then = nil
	n, err := s.Conn.Write(b[10:])
	return n + 10, err
}
