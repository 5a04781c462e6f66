package names

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is a server with two sessions: 127.0.0.1 (and ::1) with a policy, 127.0.0.2 without.
type world struct {
	*Server
	table *session.Table
	pol   *policy.Policy

	mu      sync.Mutex
	records []*egressv1.Record
}

func (w *world) Of(b *egressv1.Binding) *policy.Policy {
	if b.GetSandbox() == "two" {
		return policy.Merge(nil)
	}
	return w.pol
}

func (*world) Known() bool { return true }

func (w *world) Record(r *egressv1.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.records = append(w.records, r)
	return nil
}

func (*world) Ready(string) error                                            { return nil }
func (*world) Begin(*egressv1.Record) (func(), error)                        { return func() {}, nil }
func (*world) Event(string, *egressv1.Event)                                 {}
func (*world) Notice(context.Context, *egressv1.Binding, []byte) (err error) { return nil }

func (w *world) audit() []*egressv1.Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.records
}

const rules = `
contact: it@acme.example
rules:
  - name: api
    allow: {hosts: [api.example.com, "*.svc.example.com"], ports: [443], protocol: https}
  - name: paste
    deny: {hosts: ["*.pastebin.com"]}
`

func newWorld(t testing.TB) *world {
	d, err := policy.Parse([]byte(rules))
	must(t, err)
	w := &world{pol: policy.Merge([]policy.Layered{{Scope: &egressv1.Scope{Layer: egressv1.Layer_LAYER_TENANT}, Generation: 7, Document: d}})}
	began := time.Now()
	w.table = session.NewTable(session.Config{Host: "h1", Policies: w, Audit: w, Outlet: w, MaxConnections: 9, AllConnections: 9, Log: quiet,
		Boot: func() time.Duration { return time.Since(began) }})
	w.table.Lease(time.Hour)
	for i, name := range []string{"one", "two"} {
		b := &egressv1.Binding{Session: &corev1.SessionRef{Tenant: "acme", Session: "s" + name}, Sandbox: name, Address4: fmt.Sprintf("127.0.0.%d", i+1)}
		if i == 0 {
			b.Address6 = "::1"
		}
		_, err := w.table.Bind(b)
		must(t, err)
	}
	w.Server = New(func(a netip.Addr) (Session, bool) { return w.table.Bound(a) }, quiet, nil)
	return w
}

var one, two = netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")

// ask asks for one name.
func (w *world) ask(t testing.TB, from netip.Addr, name string, kind uint16) *dns.Msg {
	t.Helper()
	q := new(dns.Msg).SetQuestion(dns.Fqdn(name), kind)
	q.SetEdns0(1232, false)
	raw, err := q.Pack()
	must(t, err)
	var m dns.Msg
	must(t, m.Unpack(w.Answer(from, raw, maxUDP)))
	if m.Id != q.Id || !m.Response || len(m.Question) == 1 && m.Question[0] != q.Question[0] {
		t.Fatalf("the answer to %s is to another question", name)
	}
	return &m
}

func extended(m *dns.Msg) (uint16, string) {
	if opt := m.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return e.InfoCode, e.ExtraText
			}
		}
	}
	return 0, ""
}

// Row 16: an allowed name, and any name below an allowed wildcard, gets an address of the gate's own.
func TestAllowedNamesGetSyntheticAddresses(t *testing.T) {
	w := newWorld(t)
	b, _ := w.table.Bound(one)
	for _, name := range []string{"api.example.com", "a.svc.example.com", "ZGF0YQ.and-more-data.svc.example.com"} {
		want := authority.Name(strings.ToLower(name))
		a := w.ask(t, one, name, dns.TypeA)
		if len(a.Answer) != 1 || a.Answer[0].Header().Ttl > 30 {
			t.Fatalf("%s: %s", name, a)
		}
		four, _ := netip.AddrFromSlice(a.Answer[0].(*dns.A).A)
		six, _ := netip.AddrFromSlice(w.ask(t, one, name, dns.TypeAAAA).Answer[0].(*dns.AAAA).AAAA)
		for _, x := range []netip.Addr{four, six} {
			if n, ok := b.NameOf(x); !ok || n != want {
				t.Errorf("%s stands for %q, want %s", x, n, want)
			}
		}
		if again := w.ask(t, one, strings.ToUpper(name)+".", dns.TypeA).Answer[0].(*dns.A).A; again.String() != four.String() {
			t.Errorf("%s in capitals is another host", name)
		}
	}
	if len(w.audit()) != 0 {
		t.Error("an answer leaves a record")
	}
}

func TestOtherTypesOfAllowedNamesAreEmpty(t *testing.T) {
	w := newWorld(t)
	for _, kind := range []uint16{dns.TypeTXT, dns.TypeMX, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeSRV, dns.TypeNS, dns.TypeCNAME, dns.TypePTR, dns.TypeANY, dns.TypeAXFR} {
		if m := w.ask(t, one, "api.example.com", kind); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 0 {
			t.Errorf("%s: %s", dns.TypeToString[kind], m)
		}
	}
}

// Row 15: a name that is not allowed does not exist, the reason is told and recorded.
func TestOtherNamesDoNotExist(t *testing.T) {
	w := newWorld(t)
	for name, want := range map[string]struct {
		reason policy.Reason
		code   uint16
		text   string
	}{
		"c2VjcmV0.evil.test":        {policy.NoRule, dns.ExtendedErrorCodeBlocked, "no_rule"},
		"svc.example.com":           {policy.NoRule, dns.ExtendedErrorCodeBlocked, "it@acme.example"},
		"evil-api.example.com":      {policy.NoRule, dns.ExtendedErrorCodeBlocked, "generation 7"},
		"api.example.com.evil.test": {policy.NoRule, dns.ExtendedErrorCodeBlocked, "no_rule"},
		"x.pastebin.com":            {policy.DeniedRule, dns.ExtendedErrorCodeProhibited, "rule paste of the tenant's policy"},
		"1.2.3.4":                   {policy.Literal, dns.ExtendedErrorCodeBlocked, "literal"},
		"0x7f000001":                {policy.Literal, dns.ExtendedErrorCodeBlocked, "literal"},
		"_dmarc.example.com":        {policy.BadName, dns.ExtendedErrorCodeBlocked, "name"},
		"a\\000.example.com":        {policy.BadName, dns.ExtendedErrorCodeBlocked, "name"},
	} {
		before := len(w.audit())
		m := w.ask(t, one, name, dns.TypeA)
		code, text := extended(m)
		if last := name[strings.LastIndexByte(name, '.')+1:]; last == name { // one label: noise
			if m.Rcode != dns.RcodeNameError || len(m.Answer) != 0 {
				t.Errorf("%s: %s", name, m)
			}
			continue
		}
		if m.Rcode != dns.RcodeNameError || len(m.Answer) != 0 || code != want.code || !strings.Contains(text, want.text) {
			t.Errorf("%s: %s, %d %q", name, dns.RcodeToString[m.Rcode], code, text)
		}
		if list := w.audit(); len(list) != before+1 || list[before].GetReason() != string(want.reason) || list[before].GetProtocol() != "dns" ||
			list[before].GetVerdict() != egressv1.Verdict_VERDICT_DENIED {
			t.Errorf("%s is recorded as %v", name, list[before:])
		}
	}
}

func TestNoPolicyNoName(t *testing.T) {
	w := newWorld(t)
	if m := w.ask(t, two, "api.example.com", dns.TypeA); m.Rcode != dns.RcodeNameError || len(m.Answer) != 0 {
		t.Errorf("%s", m)
	}
	if m := w.ask(t, netip.MustParseAddr("127.0.0.3"), "api.example.com", dns.TypeA); m.Rcode != dns.RcodeRefused || len(m.Answer) != 0 {
		t.Errorf("nobody's address: %s", m)
	}
	if m := w.ask(t, netip.MustParseAddr("::1"), "api.example.com", dns.TypeAAAA); len(m.Answer) != 1 {
		t.Errorf("over IPv6: %s", m)
	}
}

func TestLocalhostAndNoiseLeaveNoRecord(t *testing.T) {
	w := newWorld(t)
	if a := w.ask(t, one, "localhost", dns.TypeA).Answer; len(a) != 1 || a[0].(*dns.A).A.String() != "127.0.0.1" {
		t.Errorf("%v", a)
	}
	if a := w.ask(t, one, "db.localhost", dns.TypeAAAA).Answer; len(a) != 1 || a[0].(*dns.AAAA).AAAA.String() != "::1" {
		t.Errorf("%v", a)
	}
	for _, name := range []string{"wpad", "printer.local", "1.0.64.100.in-addr.arpa", "api.example.com.lan", "."} {
		if m := w.ask(t, one, name, dns.TypeA); m.Rcode != dns.RcodeNameError || len(m.Answer) != 0 {
			t.Errorf("%s: %s", name, m)
		}
	}
	if n := len(w.audit()); n != 0 {
		t.Errorf("%d records", n)
	}
}

func TestWhatIsNoPlainQuestionIsRefused(t *testing.T) {
	w := newWorld(t)
	question := func(change func(*dns.Msg)) []byte {
		q := new(dns.Msg).SetQuestion("api.example.com.", dns.TypeA)
		change(q)
		raw, err := q.Pack()
		must(t, err)
		return raw
	}
	for name, c := range map[string]struct {
		raw  []byte
		want int // -1: no answer
	}{
		"nothing":       {nil, -1},
		"a torn head":   {[]byte{1, 2, 3}, -1},
		"a torn packet": {question(func(*dns.Msg) {})[:20], dns.RcodeFormatError},
		"an answer":     {question(func(q *dns.Msg) { q.Response = true }), -1},
		"an update":     {question(func(q *dns.Msg) { q.Opcode = dns.OpcodeUpdate }), dns.RcodeNotImplemented},
		"a notify":      {question(func(q *dns.Msg) { q.Opcode = dns.OpcodeNotify }), dns.RcodeNotImplemented},
		"no question":   {question(func(q *dns.Msg) { q.Question = nil }), dns.RcodeFormatError},
		"two questions": {question(func(q *dns.Msg) { q.Question = append(q.Question, q.Question[0]) }), dns.RcodeFormatError},
		"chaos":         {question(func(q *dns.Msg) { q.Question[0].Qclass = dns.ClassCHAOS }), dns.RcodeRefused},
		"another edns":  {question(func(q *dns.Msg) { q.SetEdns0(1232, false); q.IsEdns0().SetVersion(1) }), dns.RcodeBadVers},
	} {
		out := w.Answer(one, c.raw, maxUDP)
		if c.want < 0 {
			if out != nil {
				t.Errorf("%s is answered", name)
			}
			continue
		}
		var m dns.Msg
		must(t, m.Unpack(out))
		if m.Rcode != c.want || len(m.Answer) != 0 {
			t.Errorf("%s: %s", name, &m)
		}
	}
}

// listen serves on loopback over UDP and TCP.
func listen(t testing.TB, w *world) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p, err := net.ListenPacket("udp", l.Addr().String())
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = w.ServePacket(ctx, p) })
	wg.Go(func() { _ = w.Serve(ctx, l) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return l.Addr().String()
}

func TestServesOverUDPAndTCP(t *testing.T) {
	w := newWorld(t)
	at := listen(t, w)
	for _, network := range []string{"udp", "tcp"} {
		c := dns.Client{Net: network, Timeout: 5 * time.Second}
		conn, err := c.Dial(at)
		must(t, err)
		for range 3 {
			m, _, err := c.ExchangeWithConn(new(dns.Msg).SetQuestion("api.example.com.", dns.TypeA), conn)
			must(t, err)
			if len(m.Answer) != 1 {
				t.Errorf("%s: %s", network, m)
			}
		}
		conn.Close()
	}
}

// TestStreamsAreCountedBySandbox: both its addresses share them, and a tenant's sandboxes a part of all.
func TestStreamsAreCountedBySandbox(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel()
	served := 0
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", at)
		must(t, err)
		serving.Go(func() { _ = w.Serve(ctx, l) })
		for range 2 * perSandbox {
			c := dns.Client{Net: "tcp", Timeout: 5 * time.Second}
			conn, err := c.Dial(l.Addr().String())
			must(t, err)
			defer conn.Close()
			if _, _, err := c.ExchangeWithConn(new(dns.Msg).SetQuestion("api.example.com.", dns.TypeA), conn); err == nil {
				served++
			}
		}
	}
	if served != perSandbox {
		t.Errorf("%d streams of one sandbox were served, want %d", served, perSandbox)
	}
	in := 0
	for i := range maxStreams {
		if w.enter(owner{sandbox: fmt.Sprint(i)}, owner{tenant: "other"}) {
			in++
		}
	}
	if in != perTenant {
		t.Errorf("a tenant got %d, want %d", in, perTenant)
	}
}

func TestOneSandboxDoesNotHoldTheResolver(t *testing.T) {
	w := newWorld(t)
	at := listen(t, w)
	for range 3 * perSandbox { // connections that ask nothing
		c, err := net.Dial("tcp", at)
		must(t, err)
		defer c.Close()
	}
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	c := dns.Client{Net: "tcp", Timeout: 5 * time.Second, Dialer: &d}
	_, _, err := c.Exchange(new(dns.Msg).SetQuestion("api.example.com.", dns.TypeA), at)
	must(t, err)
	q, err := new(dns.Msg).SetQuestion("api.example.com.", dns.TypeA).Pack()
	must(t, err)
	n := 0
	for range 3 * burst {
		if w.admits(one) && w.Answer(one, q, maxUDP) != nil {
			n++
		}
	}
	if n > 2*burst {
		t.Errorf("%d questions of one sandbox were answered at once", n)
	}
	if !w.admits(two) {
		t.Error("the other sandbox has to wait")
	}
}

func TestTornStreamsEnd(t *testing.T) {
	w := newWorld(t)
	at := listen(t, w)
	for _, raw := range [][]byte{{0, 0}, {0xff, 0xff, 1}, append(binary.BigEndian.AppendUint16(nil, 3), 1, 2, 3)} {
		c, err := net.Dial("tcp", at)
		must(t, err)
		_, err = c.Write(raw)
		must(t, err)
		must(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
		if _, err := c.Read(make([]byte, 1)); err != io.EOF && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%x: %v", raw, err)
		}
		c.Close()
	}
}

// FuzzPacket: whatever comes, an answer is one, fits, and holds no address but for a name that is allowed.
func FuzzPacket(f *testing.F) {
	for _, name := range []string{"api.example.com.", "x.svc.example.com.", "evil.test.", "a\\.b.example.com.", ".", "localhost."} {
		for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT} {
			q := new(dns.Msg).SetQuestion(name, kind)
			q.SetEdns0(4096, true)
			raw, err := q.Pack()
			must(f, err)
			f.Add(raw)
		}
	}
	w := newWorld(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		out := w.Answer(one, raw, maxUDP)
		if out == nil {
			return
		}
		var m dns.Msg
		if err := m.Unpack(out); err != nil || !m.Response || len(out) > maxUDP || len(raw) >= 2 && m.Id != binary.BigEndian.Uint16(raw) {
			t.Fatalf("%x is answered with %x (%v)", raw, out, err)
		}
		for _, rr := range m.Answer {
			n := strings.ToLower(strings.TrimSuffix(rr.Header().Name, "."))
			if n != "api.example.com" && !strings.HasSuffix(n, ".svc.example.com") && n != "localhost" && !strings.HasSuffix(n, ".localhost") {
				t.Fatalf("%q has an address", n)
			}
		}
	})
}
