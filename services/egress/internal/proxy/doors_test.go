package proxy

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

func itoa(n int) string { return strconv.Itoa(n) }

// get asks for a path and returns the body.
func get(t *testing.T, c net.Conn, path string) string {
	t.Helper()
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
		t.Fatal(err)
	}
	return body(t, c)
}

func body(t *testing.T, c net.Conn) string {
	t.Helper()
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// through asks for a tunnel and returns the status and, where it was refused, the body.
func (g *gate) through(t *testing.T, head string) (c *net.TCPConn, status int, text string) {
	t.Helper()
	c = dial(t, g.connect)
	if _, err := io.WriteString(c, head); err != nil {
		t.Fatal(err)
	}
	var said []byte // and not a byte of what comes after it
	for one := make([]byte, 1); !bytes.HasSuffix(said, []byte("\r\n\r\n")); said = append(said, one[0]) {
		if _, err := io.ReadFull(c, one); err != nil {
			t.Fatalf("%q: %v", said, err)
		}
	}
	res, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(said)), &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode == http.StatusOK {
		return c, res.StatusCode, ""
	}
	if !res.Close {
		t.Error("a refused CONNECT keeps its connection")
	}
	b, _ := io.ReadAll(c)
	return c, res.StatusCode, string(b)
}

func connectTo(target string) string {
	return "CONNECT " + target + " HTTP/1.1\r\nHost: " + target + "\r\nProxy-Connection: keep-alive\r\n\r\n"
}

func (g *gate) target(n string) string { return n + ":" + itoa(g.port()) }

func TestConnectPassesTLS(t *testing.T) {
	g := open(t, standard, Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	c, status, text := g.through(t, connectTo(g.target("OPEN.example.com.")))
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	s := tls.Client(c, &tls.Config{ServerName: "open.example.com", RootCAs: g.public.pool})
	hi(t, s)
	_ = s.Close()
	if r := g.recorded(1, egressv1.Verdict_VERDICT_ALLOWED, policy.Allowed); r.GetDoor() != connect || r.GetAuthority() != "open.example.com" {
		t.Errorf("recorded %v", r)
	}
	if d := g.world.dialled(); len(d) != 1 || d[0] != g.target("open.example.com") {
		t.Errorf("dialled %v", d)
	}
}

func TestRow1ConnectThenSNIOfAnother(t *testing.T) {
	g := open(t, standard, Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	c, status, _ := g.through(t, connectTo(g.target("open.example.com")))
	if status != http.StatusOK {
		t.Fatal(status)
	}
	_ = tls.Client(c, &tls.Config{ServerName: "shut.example.com", InsecureSkipVerify: true}).Handshake()
	g.refused(c, 1, policy.Mismatch)
}

func TestRow1ConnectWithHostOfAnother(t *testing.T) {
	for _, host := range []string{"shut.example.com", "open.example.com:1", "", "open.example.com@shut.example.com"} {
		g := open(t, standard, Limits{})
		_, status, text := g.through(t, "CONNECT "+g.target("open.example.com")+" HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		if status != http.StatusForbidden || !strings.Contains(text, "mismatch") {
			t.Errorf("Host %q: %d %s", host, status, text)
		}
		g.recorded(1, egressv1.Verdict_VERDICT_DENIED, policy.Mismatch)
	}
}

// TestRow1HostOfAnotherInsideATunnel: the engine is told the one name that requests may be for.
func TestRow1HostOfAnotherInsideATunnel(t *testing.T) {
	g := open(t, standard, Limits{})
	c, status, _ := g.through(t, connectTo(g.target("read.example.com")))
	if status != http.StatusOK {
		t.Fatal(status)
	}
	s := tls.Client(c, &tls.Config{ServerName: "read.example.com", RootCAs: g.minted.pool})
	if got := get(t, s, "/v2/"); got != "connect https "+g.target("read.example.com")+" path" {
		t.Errorf("got %q", got)
	}
}

func TestRow7And8AuthorityWithTwoMeanings(t *testing.T) {
	g := open(t, standard, Limits{})
	port := ":" + itoa(g.port())
	n := 0
	for _, target := range []string{
		"open.example.com" + port + "\x00", "open.example.com\x00.evil.test" + port, "[open.example.com]" + port, "user@open.example.com" + port,
		"open.example.com%2eevil.test" + port, "open%2eexample.com" + port, "evil.test#open.example.com" + port, "open.example.com/x" + port,
		"open.example.com\\" + port, "open.example.com", "open.example.com:", "open.example.com:+443", "open.example.com:0443", "open.example.com:99999",
		"http://open.example.com" + port, "open..example.com" + port, "open_example.com" + port, "open.example.com:80:443", "оpen.example.com" + port,
		"open.example.com\t" + port, "open.example.com\v" + port, "com" + port,
	} {
		_, status, text := g.through(t, "CONNECT "+target+" HTTP/1.1\r\n\r\n")
		if status != http.StatusForbidden && status != http.StatusBadRequest {
			t.Errorf("%q: %d %s", target, status, text)
		}
		n++
		g.box.last(t, n)
	}
	if d := g.world.dialled(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
}

func TestRow8And22HeadWithTwoMeanings(t *testing.T) {
	g := open(t, standard, Limits{})
	at := g.target("open.example.com")
	n := 0
	for name, head := range map[string]string{
		"bare LF":            "CONNECT " + at + " HTTP/1.1\nHost: " + at + "\n\n",
		"bare LF in between": "CONNECT " + at + " HTTP/1.1\r\nA: b\nC: d\r\n\r\n",
		"bare CR":            "CONNECT " + at + " HTTP/1.1\r\nA: b\rC: d\r\n\r\n",
		"folded":             "CONNECT " + at + " HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
		"NUL":                "CONNECT " + at + " HTTP/1.1\r\nA: \x00\r\n\r\n",
		"two spaces":         "CONNECT  " + at + " HTTP/1.1\r\n\r\n",
		"space before colon": "CONNECT " + at + " HTTP/1.1\r\nHost : " + at + "\r\n\r\n",
		"two hosts":          "CONNECT " + at + " HTTP/1.1\r\nHost: " + at + "\r\nHost: " + at + "\r\n\r\n",
		"chunked":            "CONNECT " + at + " HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
		"a body":             "CONNECT " + at + " HTTP/1.1\r\nContent-Length: 5\r\n\r\n",
		"HTTP 2":             "CONNECT " + at + " HTTP/2.0\r\n\r\n",
		"no version":         "CONNECT " + at + "\r\n\r\n",
		"too long":           "CONNECT " + at + " HTTP/1.1\r\nA: " + strings.Repeat("b", maxHead) + "\r\n\r\n",
		"no HTTP":            "\x16\x03\x01",
		"upgrade (row 27)":   "CONNECT " + at + " HTTP/1.1\r\nUpgrade: h2c\r\n\r\n",
	} {
		if _, status, text := g.through(t, head); status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", name, status, text)
		}
		n++
		g.recorded(n, egressv1.Verdict_VERDICT_DENIED, policy.Malformed)
	}
	if d := g.world.dialled(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
}

// literals are one address in the ways that some parser reads it.
var literals = []string{"127.0.0.1", "2130706433", "0177.0.0.1", "0x7f000001", "0x7f.1", "127.1", "127.0.1", "[::1]", "[::ffff:127.0.0.1]", "127.0.0.1."}

func TestRow9LiteralsAtConnect(t *testing.T) {
	g := open(t, standard, Limits{})
	for i, l := range literals {
		if _, status, text := g.through(t, "CONNECT "+g.target(l)+" HTTP/1.1\r\n\r\n"); status != http.StatusForbidden || !strings.Contains(text, "literal") {
			t.Errorf("%s: %d %s", l, status, text)
		}
		g.recorded(i+1, egressv1.Verdict_VERDICT_DENIED, policy.Literal)
	}
	if d := g.world.dialled(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
}

func TestRow9LiteralAtTheTransparentDoor(t *testing.T) {
	for _, n := range []authority.Name{"away.example.com", "six.example.com"} {
		g := open(t, standard, Limits{})
		to := g.at[n].Addr()
		g.box.mu.Lock()
		delete(g.box.names, to)
		g.box.mu.Unlock()
		if c, err := net.Dial("tcp", g.at[n].String()); err == nil { // else it was reset before Dial came back
			g.refused(c, 1, policy.Literal)
			_ = c.Close()
		}
		if r := g.box.last(t, 1); r.GetAuthority() != to.String() || int(r.GetPort()) != g.port() {
			t.Errorf("recorded %v", r)
		}
	}
}

func TestRow10AllowedNameOnAnotherPort(t *testing.T) {
	g := open(t, strings.ReplaceAll(standard, "PORT", "9"), Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	c := g.direct("open.example.com")
	_ = tls.Client(c, &tls.Config{ServerName: "open.example.com"}).Handshake()
	g.refused(c, 1, policy.BadPort)
	if _, status, text := g.through(t, connectTo(g.target("open.example.com"))); status != http.StatusForbidden || !strings.Contains(text, "port") {
		t.Errorf("%d %s", status, text)
	}
	if _, reply := g.ask(t, "open.example.com", g.port()); reply != replyRefused {
		t.Errorf("SOCKS5 replies %d", reply)
	}
}

func TestRow14SecondNameOfAnAddress(t *testing.T) {
	g := open(t, standard, Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	g.change(func() { g.world.hosts["shut.example.com"] = g.world.hosts["open.example.com"] })
	if _, status, text := g.through(t, connectTo(g.target("shut.example.com"))); status != http.StatusForbidden || text != "shut.example.com no_rule " {
		t.Errorf("%d %s", status, text)
	}
	c := g.direct("shut.example.com")
	_ = tls.Client(c, &tls.Config{ServerName: "shut.example.com"}).Handshake()
	g.refused(c, 2, policy.NoRule)
}

// TestRow20SameVerdictAtEveryDoor: it makes no difference whether a client knows of a proxy.
func TestRow20SameVerdictAtEveryDoor(t *testing.T) {
	for _, n := range []authority.Name{"open.example.com", "shut.example.com", "read.example.com", "bytes.example.com"} {
		g := open(t, standard, Limits{})
		g.secure(n, &tls.Config{}, echo)
		tunnel := func() net.Conn { c, _, _ := g.through(t, connectTo(g.target(string(n)))); return c }
		socks := func() net.Conn { c, _ := g.ask(t, string(n), g.port()); return c }
		for door, c := range map[string]net.Conn{transparent: g.direct(n), connect: tunnel(), socks5: socks()} {
			s := tls.Client(c, &tls.Config{ServerName: string(n), InsecureSkipVerify: true})
			err := s.Handshake()
			if (err == nil) != (n != "shut.example.com") {
				t.Errorf("%s at the %s door: %v", n, door, err)
			}
			if err == nil {
				minted := s.ConnectionState().PeerCertificates[0].Issuer.CommonName == "minted"
				if minted != (n == "read.example.com") {
					t.Errorf("%s at the %s door: opened is %v", n, door, minted)
				}
			}
			_ = c.Close()
		}
	}
}

// TestRow21HTTPAndHTTPSAreJudgedByTheSameRules: plain HTTP and WebSocket go to the engine with the name too.
func TestRow21HTTPAndHTTPSAreJudgedByTheSameRules(t *testing.T) {
	g := open(t, standard, Limits{})
	if got := get(t, g.direct("read.example.com"), "/"); got != "transparent http "+g.target("read.example.com")+" allowed" {
		t.Errorf("got %q", got)
	}
	for _, n := range []string{"open.example.com", "shut.example.com"} {
		got := get(t, g.direct(authority.Name(n)), "/")
		if !strings.HasPrefix(got, "transparent http "+g.target(n)) || strings.HasSuffix(got, "allowed") {
			t.Errorf("%s: got %q, want the engine's refusal", n, got)
		}
	}
	c := dial(t, g.connect)
	if _, err := fmt.Fprintf(c, "GET http://%s/ HTTP/1.1\r\nHost: %s\r\n\r\n", g.target("read.example.com"), g.target("read.example.com")); err != nil {
		t.Fatal(err)
	}
	if got := body(t, c); got != "connect http "+g.target("read.example.com")+" allowed" {
		t.Errorf("got %q", got)
	}
	if d := g.world.dialled(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
}

func TestRow5And6NoPolicyNothingLeaves(t *testing.T) {
	for name, p := range map[string]*policy.Policy{"none": nil, "no layer": policy.Merge(nil), "no rule": parse(t, "rules: []")} {
		g := open(t, standard, Limits{})
		g.box.policy.Store(p)
		for _, n := range []authority.Name{"open.example.com", "read.example.com", "bytes.example.com"} {
			c := g.direct(n)
			if err := tls.Client(c, &tls.Config{ServerName: string(n), InsecureSkipVerify: true}).Handshake(); err == nil {
				t.Errorf("policy %s: %s answers", name, n)
			}
		}
		if _, status, _ := g.through(t, connectTo(g.target("open.example.com"))); status != http.StatusForbidden {
			t.Errorf("policy %s: CONNECT gets %d", name, status)
		}
		if d := g.world.dialled(); len(d) > 0 {
			t.Errorf("policy %s: dialled %v", name, d)
		}
	}
}

// ask asks for a connection by SOCKS5.
func (g *gate) ask(t *testing.T, host string, port int) (*net.TCPConn, byte) {
	t.Helper()
	return g.askRaw(t, append(append([]byte{5, 1, 0, typeName, byte(len(host))}, host...), byte(port>>8), byte(port)))
}

func (g *gate) askRaw(t *testing.T, request []byte) (*net.TCPConn, byte) {
	t.Helper()
	c := dial(t, g.socks)
	if _, err := c.Write(append([]byte{5, 2, 2, 0}, request...)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 12)
	if _, err := io.ReadFull(c, b); err != nil || !bytes.Equal(b[:3], []byte{5, 0, 5}) {
		t.Fatalf("%v, %v", b, err)
	}
	return c, b[3]
}

func TestSOCKSByNameAndBySyntheticAddress(t *testing.T) {
	g := open(t, standard, Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	port := []byte{byte(g.port() >> 8), byte(g.port())}
	four, six := g.at["open.example.com"].Addr().AsSlice(), g.at["six.example.com"].Addr().AsSlice()
	g.change(func() { g.world.hosts["six.example.com"] = g.world.hosts["open.example.com"] })
	for i, r := range [][]byte{
		append(append([]byte{5, 1, 0, typeName, 16}, "open.example.com"...), port...),
		append(append([]byte{5, 1, 0, typeIPv4}, four...), port...),
		append(append([]byte{5, 1, 0, typeIPv6}, six...), port...),
	} {
		name := "open.example.com"
		if i == 2 {
			name = "six.example.com"
		}
		c, reply := g.askRaw(t, r)
		if reply != replyOK {
			t.Fatalf("%v: reply %d", r, reply)
		}
		s := tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true})
		hi(t, s)
		_ = s.Close()
		if r := g.recorded(i+1, egressv1.Verdict_VERDICT_ALLOWED, policy.Allowed); r.GetDoor() != socks5 || r.GetAuthority() != name {
			t.Errorf("recorded %v", r)
		}
	}
}

func TestSOCKSRefusals(t *testing.T) {
	g := open(t, standard, Limits{})
	name := func(command byte, n string, port int) []byte {
		return append(append([]byte{5, command, 0, typeName, byte(len(n))}, n...), byte(port>>8), byte(port))
	}
	for i, c := range []struct {
		what    string
		request []byte
		reply   byte
		reason  policy.Reason
	}{
		{"row 9: IPv4 that stands for nothing", []byte{5, 1, 0, typeIPv4, 10, 0, 0, 1, 1, 0xbb}, replyRefused, policy.Literal},
		{"row 9: IPv6 that stands for nothing", append([]byte{5, 1, 0, typeIPv6, 0xfe, 0x80}, make([]byte, 16)...), replyRefused, policy.Literal},
		{"row 9: an address as a name", name(1, "127.0.0.1", 443), replyRefused, policy.Literal},
		{"row 9: hex", name(1, "0x7f000001", 443), replyRefused, policy.Literal},
		{"row 8: NUL", name(1, "open.example.com\x00.evil.test", 443), replyRefused, policy.BadName},
		{"row 8: CR LF", name(1, "open.example.com\r\nx", 443), replyRefused, policy.BadName},
		{"row 10: another port", name(1, "open.example.com", 1), replyRefused, policy.BadPort},
		{"no rule", name(1, "shut.example.com", g.port()), replyRefused, policy.NoRule},
		{"BIND", name(2, "open.example.com", g.port()), replyCommand, policy.Malformed},
		{"row 18: UDP ASSOCIATE", name(3, "open.example.com", g.port()), replyCommand, policy.Malformed},
		{"no such type", []byte{5, 1, 0, 9}, replyType, policy.Malformed},
		{"port 0", name(1, "open.example.com", 0), replyFailed, policy.Malformed},
	} {
		request := c.request
		if c.what == "row 9: IPv6 that stands for nothing" {
			request[len(request)-1] = 1
		}
		if _, reply := g.askRaw(t, request); reply != c.reply {
			t.Errorf("%s: reply %d, want %d", c.what, reply, c.reply)
		}
		g.recorded(i+1, egressv1.Verdict_VERDICT_DENIED, c.reason)
	}
	if d := g.world.dialled(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
}

func TestSOCKSWithoutAMethodThatIsTaken(t *testing.T) {
	g := open(t, standard, Limits{})
	c := dial(t, g.socks)
	_, _ = c.Write([]byte{5, 1, 2})
	if b, err := io.ReadAll(c); err != nil || !bytes.Equal(b, []byte{5, 0xff}) {
		t.Errorf("%v, %v", b, err)
	}
	c = dial(t, g.socks)
	_, _ = c.Write([]byte{4, 1, 0, 80, 1, 2, 3, 4, 0})
	if b, _ := io.ReadAll(c); len(b) > 0 {
		t.Errorf("SOCKS4 gets %v", b)
	}
}

func TestFailuresAreToldWhereTheDoorCan(t *testing.T) {
	g := open(t, standard, Limits{})
	if _, status, text := g.through(t, connectTo(g.target("bytes.example.com"))); status != http.StatusBadGateway || !strings.Contains(text, "unresolved") {
		t.Errorf("%d %s", status, text)
	}
	if r := g.recorded(1, egressv1.Verdict_VERDICT_FAILED, policy.Unresolved); r.GetRule() != "bytes" {
		t.Errorf("recorded %v", r)
	}
	if _, reply := g.ask(t, "bytes.example.com", g.port()); reply != replyUnreachable {
		t.Errorf("reply %d", reply)
	}
}

func TestAuditAwayRefuses(t *testing.T) {
	g := open(t, standard, Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	g.change(func() { g.box.refuse = &session.Refusal{Reason: policy.AuditAway, Text: "full"} })
	c := g.direct("open.example.com")
	_ = tls.Client(c, &tls.Config{ServerName: "open.example.com"}).Handshake()
	g.refused(c, 1, policy.AuditAway)
}
