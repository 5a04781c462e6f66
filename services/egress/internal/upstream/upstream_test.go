package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/berth-dev/berth/internal/testport"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}

// server is a DNS server of the test on loopback, UDP and TCP.
type server struct {
	at    netip.AddrPort
	asked atomic.Int64

	mu     sync.Mutex
	answer func(q *dns.Msg, network string) *dns.Msg
}

func newServer(t testing.TB, answer func(*dns.Msg, string) *dns.Msg) *server {
	t.Helper()
	s := &server{answer: answer}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	s.at = l.Addr().(*net.TCPAddr).AddrPort()
	p, err := net.ListenPacket("udp", s.at.String())
	must(t, err)
	for _, d := range []*dns.Server{{Listener: l}, {PacketConn: p}} {
		d.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			s.asked.Add(1)
			s.mu.Lock()
			m := s.answer(q, w.LocalAddr().Network())
			s.mu.Unlock()
			if m != nil {
				_ = w.WriteMsg(m)
			}
		})
		ready := make(chan struct{})
		d.NotifyStartedFunc = func() { close(ready) }
		go func() { _ = d.ActivateAndServe() }()
		<-ready
		t.Cleanup(func() { _ = d.Shutdown() })
	}
	return s
}

// records answers a question with lines of a zone file.
func records(q *dns.Msg, lines ...string) *dns.Msg {
	m := new(dns.Msg).SetReply(q)
	for _, l := range lines {
		rr, err := dns.NewRR(l)
		if err != nil {
			panic(err)
		}
		if t := rr.Header().Rrtype; t == q.Question[0].Qtype || t == dns.TypeCNAME {
			m.Answer = append(m.Answer, rr)
		}
	}
	return m
}

func zone(lines ...string) func(*dns.Msg, string) *dns.Msg {
	return func(q *dns.Msg, _ string) *dns.Msg { return records(q, lines...) }
}

// echo is a TCP server on loopback; it counts connections.
func echo(t testing.TB, network, at string) (uint16, *atomic.Int64) {
	t.Helper()
	l, err := net.Listen(network, at)
	must(t, err)
	t.Cleanup(func() { l.Close() })
	var n atomic.Int64
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n.Add(1)
			go func() { defer c.Close(); _, _ = io.Copy(c, c) }()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort().Port(), &n
}

func dialerTo(s *server) Dialer {
	return New(Config{Resolvers: []netip.AddrPort{s.at}, Timeout: 5 * time.Second})
}

func refused(t testing.TB, err error, want policy.Reason) {
	t.Helper()
	if r := (*session.Refusal)(nil); !errors.As(err, &r) || r.Reason != want {
		t.Errorf("got %v, want a refusal with reason %s", err, want)
	}
}

// Row 11: every range that is nobody's public host is refused, unless the operator named it.
func TestSpecialAddressesAreRefused(t *testing.T) {
	bad := []string{"0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.0.1", "169.254.1.1", "169.254.169.254",
		"172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.1",
		"203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "100.100.100.200", "168.63.129.16",
		"::", "::1", "::7f00:1", "::808:808", "::ffff:8.8.8.8", "::ffff:10.0.0.1", "64:ff9b::808:808", "64:ff9b::a00:1", "64:ff9b:1::1", "100::1",
		"2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1",
		"3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fd62:6572:7468:f::1", "fe80::1", "fec0::1", "ff02::1", "4000::1", "fe80::1%lo"}
	for _, s := range bad {
		if Check(netip.MustParseAddr(s), nil, nil) == nil {
			t.Errorf("%s may be reached", s)
		}
	}
	for _, s := range []string{"1.1.1.1", "8.8.8.8", "93.184.215.14", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1", "2001:4860:4860::8888"} {
		must(t, Check(netip.MustParseAddr(s), nil, nil))
	}
}

func TestNamedRangesAreReached(t *testing.T) {
	own := map[netip.Addr]bool{netip.MustParseAddr("10.1.2.3"): true, netip.MustParseAddr("127.0.0.1"): true, netip.MustParseAddr("2a00:1450::5"): true}
	for _, c := range []struct {
		addr, allowed string
		ok            bool
	}{
		{"10.1.9.9", "10.1.0.0/16", true}, {"10.2.0.1", "10.1.0.0/16", false}, {"fd00:1::5", "fd00:1::/64", true},
		{"127.0.0.1", "127.0.0.0/8", true},
		{"10.1.2.3", "10.0.0.0/8", false}, {"10.1.2.3", "10.1.2.3/32", true}, // the host itself
		{"2a00:1450::5", "", false}, {"2a00:1450::5", "2a00::/16", false}, {"::ffff:10.1.2.3", "::ffff:0:0/96", false}, {"64:ff9b::a01:203", "64:ff9b::/96", false},
		{"169.254.169.254", "169.254.0.0/16", false}, {"169.254.169.254", "0.0.0.0/0", false}, {"169.254.169.254", "169.254.169.254/32", true},
		{"::ffff:169.254.169.254", "::/0", false}, {"64:ff9b::a9fe:a9fe", "64:ff9b::/96", false}, {"2002:a9fe:a9fe::1", "2002::/16", false},
		{"fd00:ec2::254", "fd00::/8", false}, {"168.63.129.16", "168.63.0.0/16", false},
		{"::ffff:10.9.9.9", "10.0.0.0/8", false}, {"64:ff9b::a09:909", "10.0.0.0/8", false}, {"64:ff9b::a09:909", "64:ff9b::/96", true},
		{"0.0.0.0", "0.0.0.0/0", false}, {"::", "::/0", false}, {"224.0.0.1", "224.0.0.0/4", false}, {"::ffff:0.0.0.0", "::/0", false},
	} {
		var allowed []netip.Prefix
		if c.allowed != "" {
			allowed = append(allowed, netip.MustParsePrefix(c.allowed))
		}
		if err := Check(netip.MustParseAddr(c.addr), allowed, own); (err == nil) != c.ok {
			t.Errorf("%s with %s: %v", c.addr, c.allowed, err)
		}
	}
}

func TestNameIsDialledOverBothFamilies(t *testing.T) {
	for _, c := range []struct{ network, at, record, want string }{
		{"tcp4", "127.0.0.1:0", "a.example.com. 60 IN A 127.0.0.1", "127.0.0.1"},
		{"tcp6", "[::1]:0", "a.example.com. 60 IN AAAA ::1", "::1"},
	} {
		port, n := echo(t, c.network, c.at)
		conn, at, err := dialerTo(newServer(t, zone(c.record))).Dial(t.Context(), "a.example.com", port, loopback)
		must(t, err)
		conn.Close()
		if at.String() != c.want || n.Load() > 1 {
			t.Errorf("dialled %s", at)
		}
	}
}

// Row 13: an allowed name that leads to a private address.
func TestPrivateAddressOfAnAllowedNameIsNotDialled(t *testing.T) {
	port, n := echo(t, "tcp4", "127.0.0.1:0")
	for _, zoneLine := range []string{"a.example.com. 60 IN A 127.0.0.1", "a.example.com. 60 IN AAAA ::ffff:127.0.0.1", "a.example.com. 60 IN A 169.254.169.254"} {
		_, _, err := dialerTo(newServer(t, zone(zoneLine))).Dial(t.Context(), "a.example.com", port, nil)
		refused(t, err, policy.Private)
		if strings.Contains(fmt.Sprint(err), "127.0.0.1") {
			t.Errorf("the sandbox is told the address: %v", err)
		}
	}
	if n.Load() != 0 {
		t.Error("it was dialled")
	}
}

// Row 12: the first answer is good and the second is private: what was checked is what is dialled, and the
// second answer is checked as well.
func TestChangedAnswerIsCheckedAgain(t *testing.T) {
	port, n := echo(t, "tcp4", "127.0.0.1:0")
	var turn atomic.Int64
	s := newServer(t, func(q *dns.Msg, _ string) *dns.Msg {
		if turn.Load() == 0 {
			return records(q, "a.example.com. 0 IN A 127.0.0.1")
		}
		return records(q, "a.example.com. 0 IN A 10.0.0.1", "a.example.com. 0 IN AAAA fd00::1")
	})
	d := dialerTo(s)
	conn, at, err := d.Dial(t.Context(), "a.example.com", port, loopback)
	must(t, err)
	conn.Close()
	turn.Store(1)
	conn, again, err := d.Dial(t.Context(), "a.example.com", port, loopback) // still pinned by the cache
	must(t, err)
	conn.Close()
	if at != again {
		t.Errorf("%s, then %s within the cache's time", at, again)
	}
	r := d.(*dialer).names
	r.mu.Lock()
	r.cache["a.example.com"].until = time.Now().Add(-time.Second)
	r.mu.Unlock()
	_, _, err = d.Dial(t.Context(), "a.example.com", port, loopback)
	refused(t, err, policy.Private)
	if n.Load() != 2 {
		t.Errorf("%d connections", n.Load())
	}
}

// Only the good ones of several addresses are dialled.
func TestBadAddressesAmongGoodOnesAreLeftOut(t *testing.T) {
	port, _ := echo(t, "tcp4", "127.0.0.1:0")
	s := newServer(t, zone("a.example.com. 60 IN A 10.0.0.1", "a.example.com. 60 IN A 127.0.0.1", "a.example.com. 60 IN AAAA fe80::1"))
	conn, at, err := dialerTo(s).Dial(t.Context(), "a.example.com", port, loopback[:1])
	must(t, err)
	conn.Close()
	if at.String() != "127.0.0.1" {
		t.Errorf("dialled %s", at)
	}
}

func TestDeadAddressDoesNotHoldUpTheNext(t *testing.T) {
	port, _ := echo(t, "tcp4", "127.0.0.1:0") // nobody listens on ::1
	s := newServer(t, zone("a.example.com. 60 IN AAAA ::1", "a.example.com. 60 IN A 127.0.0.1"))
	conn, at, err := dialerTo(s).Dial(t.Context(), "a.example.com", port, loopback)
	must(t, err)
	conn.Close()
	if at.String() != "127.0.0.1" {
		t.Errorf("dialled %s", at)
	}
	port = uint16(testport.Reserve(t, 1)[0])
	_, _, err = dialerTo(s).Dial(t.Context(), "a.example.com", port, loopback)
	refused(t, err, policy.Unreachable)
}

func TestOnlyTheAnswerToTheQuestionIsUsed(t *testing.T) {
	for name, lines := range map[string][]string{
		"another name":          {"b.example.com. 60 IN A 127.0.0.1"},
		"behind another alias":  {"c.example.com. 60 IN CNAME b.example.com.", "b.example.com. 60 IN A 127.0.0.1"},
		"beside an alias":       {"a.example.com. 60 IN CNAME b.example.com.", "a.example.com. 60 IN A 127.0.0.1"},
		"aliases in a circle":   {"a.example.com. 60 IN CNAME b.example.com.", "b.example.com. 60 IN CNAME a.example.com."},
		"no address whatsoever": {},
	} {
		_, _, err := dialerTo(newServer(t, zone(lines...))).Dial(t.Context(), "a.example.com", 443, loopback)
		if refused(t, err, policy.Unresolved); t.Failed() {
			t.Fatal(name)
		}
	}
	port, _ := echo(t, "tcp4", "127.0.0.1:0")
	s := newServer(t, zone("a.example.com. 60 IN CNAME B.example.net.", "b.example.net. 60 IN CNAME c.example.net.", "C.example.net. 60 IN A 127.0.0.1"))
	conn, _, err := dialerTo(s).Dial(t.Context(), "a.example.com", port, loopback)
	must(t, err)
	conn.Close()
}

func TestCutOffAnswerIsAskedForOverTCP(t *testing.T) {
	port, _ := echo(t, "tcp4", "127.0.0.1:0")
	s := newServer(t, func(q *dns.Msg, network string) *dns.Msg {
		if network == "udp" {
			m := records(q)
			m.Truncated = true
			return m
		}
		return records(q, "a.example.com. 60 IN A 127.0.0.1")
	})
	conn, _, err := dialerTo(s).Dial(t.Context(), "a.example.com", port, loopback)
	must(t, err)
	conn.Close()
}

func TestSilentServerIsPassedOver(t *testing.T) {
	port, _ := echo(t, "tcp4", "127.0.0.1:0")
	silent := newServer(t, func(*dns.Msg, string) *dns.Msg { return nil })
	broken := newServer(t, func(q *dns.Msg, _ string) *dns.Msg { return new(dns.Msg).SetRcode(q, dns.RcodeServerFailure) })
	good := newServer(t, zone("a.example.com. 60 IN A 127.0.0.1"))
	d := New(Config{Resolvers: []netip.AddrPort{silent.at, broken.at, good.at}, Timeout: 8 * time.Second})
	conn, _, err := d.Dial(t.Context(), "a.example.com", port, loopback)
	must(t, err)
	conn.Close()
	_, _, err = dialerTo(broken).Dial(t.Context(), "a.example.com", port, loopback)
	refused(t, err, policy.Unresolved)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, _, err = dialerTo(silent).Dial(ctx, "a.example.com", port, loopback)
	refused(t, err, policy.Unresolved)
}

func TestManyDialsAskOnce(t *testing.T) {
	port, _ := echo(t, "tcp4", "127.0.0.1:0")
	s := newServer(t, zone("a.example.com. 60 IN A 127.0.0.1"))
	d := dialerTo(s)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			conn, _, err := d.Dial(t.Context(), "a.example.com", port, loopback)
			if err != nil {
				t.Error(err)
				return
			}
			conn.Close()
		})
	}
	wg.Wait()
	if n := s.asked.Load(); n != 2 {
		t.Errorf("the server was asked %d times, twice is enough", n)
	}
}

func TestCacheIsBounded(t *testing.T) {
	r := newResolver(nil, nil)
	for i := range 3 * cacheSize {
		e := &entry{done: make(chan struct{}), until: time.Now().Add(time.Minute)}
		close(e.done)
		r.mu.Lock()
		r.makeRoom()
		r.cache[authority.Name(fmt.Sprintf("x%d.example.com", i))] = e
		r.mu.Unlock()
	}
	if len(r.cache) > cacheSize {
		t.Errorf("%d names are kept", len(r.cache))
	}
}

func TestServersOfTheHostAreRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	must(t, os.WriteFile(file, []byte("search example.com\nnameserver 192.0.2.53\nnameserver 2001:db8::53\noptions ndots:5\n"), 0o600))
	list, err := serversOf(file)
	must(t, err)
	if fmt.Sprint(list) != "[192.0.2.53:53 [2001:db8::53]:53]" {
		t.Errorf("%v", list)
	}
}

// FuzzAnswer: whatever a server answers, it is read or refused, and an address is one of the question's family.
func FuzzAnswer(f *testing.F) {
	q := new(dns.Msg).SetQuestion("a.example.com.", dns.TypeA)
	for _, m := range []*dns.Msg{records(q, "a.example.com. 60 IN A 127.0.0.1"), records(q, "a.example.com. 60 IN CNAME a.example.com.")} {
		raw, err := m.Pack()
		must(f, err)
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var m dns.Msg
		if m.Unpack(raw) != nil {
			return
		}
		for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA} {
			list, life := addressesOf(&m, dns.Question{Name: "a.example.com.", Qtype: kind, Qclass: dns.ClassINET})
			if life < minLife || life > maxLife || len(list) > maxAddrs {
				t.Fatalf("%d addresses for %s", len(list), life)
			}
			for _, a := range list {
				if a.Is4() != (kind == dns.TypeA) {
					t.Fatalf("%s answers a question of type %d", a, kind)
				}
			}
		}
	})
}
