package policy

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/egress/authority"
	"golang.org/x/sys/unix"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

func merged(t testing.TB, text string) *Policy {
	t.Helper()
	d, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return Merge([]Layered{{layer("tenant"), 5, d}})
}

// TestARequestThatNobodyMadeByParseIsDenied: Judge trusts no caller to have made it canonical.
func TestARequestThatNobodyMadeByParseIsDenied(t *testing.T) {
	p := merged(t, "rules:\n  - {name: all, allow: {hosts: [a.test, '*.a.test'], ports: [443]}}\n")
	for q, want := range map[Request]Reason{
		{Name: "A.test", Port: 443, Protocol: HTTPS, Method: "GET", Path: "/"}:       BadName,
		{Name: "a.test.", Port: 443, Protocol: HTTPS, Method: "GET", Path: "/"}:      BadName,
		{Name: "127.0.0.1", Port: 443, Protocol: HTTPS, Method: "GET", Path: "/"}:    Literal,
		{Name: "x\x00.a.test", Port: 443, Protocol: TLS}:                             BadName,
		{Name: "a.test", Port: 0, Protocol: TLS}:                                     BadPort,
		{Name: "a.test", Port: 443, Protocol: "udp"}:                                 Protocols,
		{Name: "a.test", Port: 443, Protocol: HTTPS, Method: "GET", Path: ""}:        Malformed,
		{Name: "a.test", Port: 443, Protocol: HTTPS, Method: "", Path: "/"}:          Malformed,
		{Name: "a.test", Port: 443, Protocol: HTTPS, Method: "GET", Path: "/a/../b"}: Malformed,
		{Name: "a.test", Port: 443, Protocol: TLS, Method: "GET", Path: "/"}:         Malformed,
	} {
		if d := p.Judge(q); d.Allowed || d.Reason != want {
			t.Errorf("%+v: %+v, want %s", q, d, want)
		}
		if _, d := p.Need(q.Name, q.Port, true); d.Allowed && (want == BadName || want == Literal || want == BadPort) {
			t.Errorf("%+v: %+v", q, d)
		}
	}
}

// FuzzJudge: whatever is asked, only what a rule names is allowed.
func FuzzJudge(f *testing.F) {
	f.Add("a.test", uint16(443), "https", "GET", "/v1/x")
	f.Add("b.a.test", uint16(443), "tls", "", "")
	f.Add("127.1", uint16(80), "http", "GET", "/")
	f.Add("a.test", uint16(443), "https", "GET", "/v1/..%2fx")
	p := merged(f, "rules:\n  - {name: v1, allow: {hosts: [a.test], methods: [GET], paths: [/v1]}}\n  - {name: below, allow: {hosts: ['*.b.test']}}\n  - {name: no, deny: {hosts: [no.b.test]}}\n")
	f.Fuzz(func(t *testing.T, name string, port uint16, protocol, method, path string) {
		q := Request{authority.Name(name), port, Protocol(protocol), method, path}
		d := p.Judge(q)
		if !d.Allowed {
			return
		}
		v1 := name == "a.test" && port == 443 && protocol == "https" && method == "GET" && (path == "/v1" || strings.HasPrefix(path, "/v1/"))
		below := strings.HasSuffix(name, ".b.test") && name != "no.b.test" && port == 443 && (protocol == "https" || protocol == "tls")
		if !v1 && !below || !p.MayResolve(q.Name) {
			t.Fatalf("%+v: %+v", q, d)
		}
		if n, err := authority.ParseStrict(name); err != nil || string(n) != name {
			t.Fatalf("%q is allowed and no name", name)
		}
	})
}

func record(session, protocol, host string, port uint32, request, reason string, times uint64) *egressv1.Record {
	method, path, _ := strings.Cut(request, " ")
	r := &egressv1.Record{Session: &corev1.SessionRef{Tenant: "acme", Session: session}, Protocol: protocol, Authority: host, Port: port, Method: method, Path: path,
		Reason: reason, Verdict: egressv1.Verdict_VERDICT_DENIED, Times: times}
	if reason == "allowed" {
		r.Verdict, r.Rule = egressv1.Verdict_VERDICT_ALLOWED, "old"
	}
	return r
}

// TestReplaySaysWhatWouldChange: and only that, the denials first.
func TestReplaySaysWhatWouldChange(t *testing.T) {
	p := merged(t, "rules:\n  - {name: a, allow: {hosts: [a.test], paths: [/v1]}}\n  - {name: tcp, allow: {hosts: [db.test], protocol: tcp, ports: [22]}}\n  - {name: open, allow: {hosts: [open.test]}}\n")
	records := []*egressv1.Record{
		record("s1", "https", "a.test", 443, "GET /v1/x", "allowed", 0),
		record("s1", "https", "a.test", 443, "GET /v2/x", "allowed", 3), record("s2", "https", "a.test", 443, "GET /v2/x", "allowed", 0),
		record("s1", "https", "b.test", 443, "GET /", "allowed", 0), record("s1", "dns", "b.test", 0, "", "allowed", 9), record("s1", "dns", "db.test", 0, "", "no_rule", 0),
		record("s1", "tcp", "db.test", 22, "", "no_rule", 0), record("s1", "https", "a.test", 443, "GET /v1/y", "path", 2),
		record("s1", "https", "a.test", 443, "GET /v1/z", "rate", 0), record("s1", "https", "a.test", 443, "GET /v1/z", "credentials", 0),
		record("s1", "tls", "a.test", 443, "", "allowed", 0), record("s1", "https", "open.test", 443, "", "allowed", 0), record("s1", "websocket", "a.test", 443, "GET /v1/ws", "allowed", 0),
		record("s1", "https", "127.0.0.1", 443, "", "literal", 0), record("s1", "https", "a.test", 443, "GET /v1/..%2f", "malformed", 0), record("s1", "ftp", "a.test", 21, "", "allowed", 0),
	}
	got := Replay(slices.Values(records), func(*egressv1.Record) *Policy { return p })
	text := fmt.Sprintf("%d %d %d %d\n", got.Records, got.Times, got.Same, got.Unknown)
	for _, c := range got.Changed {
		text += fmt.Sprintf("%s was %v, now %v %s by %q, %d of %d\n", c.Request(), c.Was, c.Now, c.Reason, c.Rule, c.Times, c.Sessions)
	}
	const want = `16 27 6 3
the name b.test was true, now false no_rule by "", 9 of 1
GET https://a.test/v2/x was true, now false path by "", 4 of 2
GET https://b.test/ was true, now false no_rule by "", 1 of 1
GET https://a.test/v1/y was false, now true allowed by "a", 2 of 1
the name db.test was false, now true allowed by "tcp", 1 of 1
TCP to db.test:22 was false, now true allowed by "tcp", 1 of 1
`
	if text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
}

// TestManyRulesJudgeInMicroseconds: 10,000 of them, and as many sessions that share them.
func TestManyRulesJudgeInMicroseconds(t *testing.T) {
	p := many(t, 10_000)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime(t)
	for range 1000 {
		if !p.Judge(Request{Name: "h9999.example.com", Port: 443, Protocol: HTTPS, Method: "GET", Path: "/v1/x"}).Allowed {
			t.Fatal("it is denied")
		}
	}
	if took := threadTime(t) - began; took > 500*time.Millisecond {
		t.Errorf("1,000 decisions by 10,000 rules took %s", took)
	}
}

// threadTime is the CPU time of this thread, which other processes do not lengthen.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func many(t testing.TB, n int) *Policy {
	var b strings.Builder
	b.WriteString("rules:\n")
	for i := range n {
		fmt.Fprintf(&b, "- {name: r%d, allow: {hosts: [h%d.example.com], paths: [/v1]}}\n", i, i)
	}
	d, err := Parse([]byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	return Merge([]Layered{{layer("tenant"), 1, d}})
}

func BenchmarkJudge(b *testing.B) {
	for _, n := range []int{1, 100, 10_000} {
		p := many(b, n)
		q := Request{Name: authority.Name(fmt.Sprintf("h%d.example.com", n-1)), Port: 443, Protocol: HTTPS, Method: "GET", Path: "/v1/x"}
		b.Run(fmt.Sprint(n, " rules"), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.Judge(q)
			}
		})
	}
}

func BenchmarkParse10000(b *testing.B) {
	for b.Loop() {
		many(b, 10_000)
	}
}
