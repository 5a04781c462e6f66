package web

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"

	"github.com/berth-dev/berth/services/egress/policy"
)

const twoHosts = `rules:
  - {name: plain, allow: {hosts: [a.test, b.test], protocol: http, methods: [GET, POST]}}
  - {name: tls, allow: {hosts: [a.test, b.test], protocol: https, methods: [GET, POST, PUT]}}
`

func echoPath(rw http.ResponseWriter, r *http.Request) {
	_, _ = fmt.Fprintf(rw, "%s %s %s", r.Method, r.Host, r.RequestURI)
}

// Row 1: CONNECT to an allowed host, then Host of another, also on a later keep-alive request.
func TestRow1HostOfAnotherOnALaterRequest(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, http.HandlerFunc(echoPath))
	w.host("b.test", 80, http.HandlerFunc(echoPath))
	c := w.connect(Conn{Name: "a.test", Port: 80, Door: "connect"})
	b := bufio.NewReader(c)
	for _, host := range []string{"a.test", "b.test", "a.test:8080", "a.test"} {
		_, _ = fmt.Fprintf(c, "GET /x HTTP/1.1\r\nHost: %s\r\n\r\n", host)
		resp, body := hear(t, b)
		if host == "a.test" {
			if resp.StatusCode != 200 || body != "GET a.test /x" {
				t.Fatalf("%d %s", resp.StatusCode, body)
			}
			continue
		}
		want(t, resp, 421, policy.Mismatch)
	}
	for _, d := range w.dials {
		if d != "a.test:80" {
			t.Fatalf("dialled %s", d)
		}
	}
}

// Row 7: spellings of a host have one form; a look-alike is another host.
func TestRow7SpellingsOfTheHostField(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, http.HandlerFunc(echoPath))
	for _, host := range []string{"a.test", "A.TEST", "a.test.", "A.test.:80", "a.test:80"} {
		resp, body := say(t, w.connect(Conn{Name: "a.test", Port: 80}), "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		if resp.StatusCode != 200 || body != "GET a.test /" {
			t.Fatalf("%s: %d %s", host, resp.StatusCode, body)
		}
	}
	dials := w.dialCount()
	for host, reason := range map[string]policy.Reason{
		"a.test.evil.example": policy.Mismatch, "evil-a.test": policy.Mismatch, "xn--80ak6aa92e.test": policy.Mismatch,
		"127.0.0.1": policy.Literal, "2130706433": policy.Literal, "0x7f.1": policy.Literal, "[::1]": policy.Literal,
		"a..test": policy.BadName, "a_b.test": policy.BadName, "a.test:080": policy.BadName, "a.test:": policy.BadName,
		"a.test%00.b.test": policy.BadName,
	} {
		resp, _ := say(t, w.connect(Conn{Name: "a.test", Port: 80}), "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		if got := resp.Header.Get("Berth-Denied"); got != string(reason) {
			t.Errorf("%s: %q, want %q", host, got, reason)
		}
	}
	if w.dialCount() != dials {
		t.Fatal("a refused name was dialled")
	}
}

// Row 21: http, https and WebSocket to one host go by one rule.
func TestRow21OneRuleForHTTPAndWebSocket(t *testing.T) {
	w := newWorld(t, `rules: [{name: a, allow: {hosts: [a.test], protocol: http, methods: [GET], paths: [/ok/]}}]`)
	w.host("a.test", 80, http.HandlerFunc(echoPath))
	for _, extra := range []string{"", wsHead} {
		resp, _ := say(t, w.connect(Conn{Name: "a.test", Port: 80}), "GET /no/ HTTP/1.1\r\nHost: a.test\r\n"+extra+"\r\n")
		want(t, resp, 403, policy.BadPath)
		resp, _ = say(t, w.connect(Conn{Name: "a.test", Port: 80}), "GET /ok/ HTTP/1.1\r\nHost: a.test\r\n"+extra+"\r\n")
		if resp.StatusCode != 200 {
			t.Fatal(resp.StatusCode)
		}
	}
	resp, _ := do(t, w.client("a.test", 443, false), get(t, "https://a.test/ok/"))
	want(t, resp, 403, policy.BadPort)
}

// Row 22: requests are written anew: what the host gets is what was judged, and no field of one connection.
func TestRow22RequestsAreWrittenAnew(t *testing.T) {
	w := newWorld(t, twoHosts)
	got := make(chan string, 1)
	w.raw("a.test", 80, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		var b bytes.Buffer
		_ = r.Header.Write(&b)
		got <- r.RequestURI + "\n" + b.String()
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	})
	say(t, w.connect(Conn{Name: "a.test", Port: 80}), "GET /x/../%7ey/%2e/a%2Fb?q=/../%20 HTTP/1.1\r\nhost: A.test\r\nConnection: x-mine\r\nX-Mine: 1\r\n"+
		"Proxy-Connection: keep-alive\r\nKeep-Alive: 3\r\nTE: trailers, gzip\r\nX-Other:   v  \r\nProxy-Authorization: Basic eA==\r\n\r\n")
	if text := <-got; text != "/~y/a%2Fb?q=/../%20\nTe: trailers\r\nX-Other: v\r\n" {
		t.Fatalf("%q", text)
	}
}

// Row 23: a redirect is the client's; its next request is judged as any other.
func TestRow23EveryHopOfARedirectIsJudged(t *testing.T) {
	w := newWorld(t, `rules: [{name: a, allow: {hosts: [a.test], protocol: http}}]`)
	w.host("a.test", 80, http.RedirectHandler("http://b.test/next", 302))
	resp, _ := do(t, w.client("a.test", 80, false), get(t, "http://a.test/"))
	if resp.StatusCode != 302 || resp.Header.Get("Location") != "http://b.test/next" {
		t.Fatal(resp.StatusCode, resp.Header)
	}
	resp, _ = do(t, w.client("b.test", 80, false), get(t, "http://b.test/next"))
	want(t, resp, 403, policy.NoRule)
	if w.dialCount() != 1 {
		t.Fatal(w.dials)
	}
}

const wsHead = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

// Row 27: Upgrade to anything but WebSocket.
func TestRow27OtherUpgradesAreRefused(t *testing.T) {
	w := newWorld(t, twoHosts)
	for name, text := range map[string]string{
		"other":         "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: upgrade\r\nUpgrade: irc\r\n\r\n",
		"h2c":           "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
		"list":          "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: upgrade\r\nUpgrade: websocket, h2c\r\n\r\n",
		"post":          "POST / HTTP/1.1\r\nHost: a.test\r\n" + wsHead + "\r\n",
		"old":           "GET / HTTP/1.0\r\nHost: a.test\r\n" + wsHead + "\r\n",
		"no connection": "GET / HTTP/1.1\r\nHost: a.test\r\nUpgrade: websocket\r\n\r\n",
		"no key":        "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
		"connect":       "CONNECT a.test:80 HTTP/1.1\r\nHost: a.test:80\r\n\r\n",
	} {
		c := w.connect(Conn{Name: "a.test", Port: 80})
		b := bufio.NewReader(c)
		_, _ = io.WriteString(c, text+"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n")
		resp, _ := hear(t, b)
		if resp.Header.Get("Berth-Denied") != string(policy.Upgrade) {
			t.Errorf("%s: %d %q", name, resp.StatusCode, resp.Header.Get("Berth-Denied"))
		}
		if _, err := b.ReadByte(); err == nil {
			t.Errorf("%s: the connection went on", name)
		}
	}
	if w.dialCount() != 0 {
		t.Fatal(w.dials)
	}
}

// Row 27: a 101 that nobody asked for, or that agrees to something else.
func TestRow27UnsolicitedSwitchIsRefused(t *testing.T) {
	for name, answer := range map[string]string{
		"unasked":    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
		"wrong key":  "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOq=\r\n\r\n",
		"other":      "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
		"extensions": "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Extensions: x\r\n\r\n",
	} {
		w := newWorld(t, twoHosts)
		w.raw("a.test", 80, func(c net.Conn) {
			_, _ = http.ReadRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, answer)
			_, _ = io.Copy(io.Discard, c)
		})
		extra := wsHead
		if name == "unasked" {
			extra = ""
		}
		resp, _ := say(t, w.connect(Conn{Name: "a.test", Port: 80}), "GET / HTTP/1.1\r\nHost: a.test\r\n"+extra+"\r\n")
		if resp.Header.Get("Berth-Denied") != string(policy.Upgrade) {
			t.Errorf("%s: %d %v", name, resp.StatusCode, resp.Header)
		}
	}
}

// Row 28: what is revoked during a download is reset, over HTTP/1 and HTTP/2.
func TestRow28RevokedDuringADownload(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprint("h2=", h2), func(t *testing.T) {
			w := newWorld(t, twoHosts)
			gone := make(chan struct{})
			w.host("a.test", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				defer close(gone)
				for r.Context().Err() == nil {
					if _, err := rw.Write(make([]byte, 64<<10)); err != nil {
						return
					}
				}
			}))
			resp, err := w.client("a.test", 443, h2).Do(get(t, "https://a.test/"))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if _, err := io.ReadFull(resp.Body, make([]byte, 1<<20)); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			w.box.apply(t, "rules: [{name: b, allow: {hosts: [b.test], protocol: https}}]")
			if _, err := io.Copy(io.Discard, resp.Body); err == nil {
				t.Fatal("the download ended as if it were complete")
			}
			<-gone
			if d := time.Since(began); d > time.Second {
				t.Fatalf("it took %v", d)
			}
			if r := w.box.last(t); r.Verdict != egressv1.Verdict_VERDICT_RESET || r.Reason != string(policy.Revoked) || r.BytesIn < 1<<20 {
				t.Fatalf("%v", r)
			}
		})
	}
}

// Row 30: HTTP/2 streams with another :authority on one connection.
func TestRow30EachStreamIsJudged(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 443, http.HandlerFunc(echoPath))
	w.host("b.test", 443, http.HandlerFunc(echoPath))
	c := tls.Client(w.connect(Conn{Name: "a.test", Port: 443, Secure: true}), &tls.Config{RootCAs: w.ca.pool, ServerName: "a.test", NextProtos: []string{"h2"}})
	cc, err := (&http2.Transport{}).NewClientConn(c)
	if err != nil {
		t.Fatal(err)
	}
	for i, host := range []string{"a.test", "b.test", "a.test:8443", "a.test", "127.0.0.1", "A.test.:443"} {
		r := get(t, "https://a.test/x")
		r.Host = host
		resp, err := cc.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		switch i {
		case 0, 3, 5:
			if resp.StatusCode != 200 || string(body) != "GET a.test /x" || resp.ProtoMajor != 2 {
				t.Fatalf("%s: %d %s", host, resp.StatusCode, body)
			}
		case 4:
			want(t, resp, 403, policy.Literal)
		default:
			want(t, resp, 421, policy.Mismatch)
		}
	}
	for _, d := range w.dials {
		if d != "a.test:443" {
			t.Fatalf("dialled %s", d)
		}
	}
}

// Row 31: on a shared domain the path decides, and credentials of the sandbox's own go nowhere.
func TestRow31PathsAndCredentialsOnASharedDomain(t *testing.T) {
	w := newWorld(t, `rules: [{name: mine, refuse_credentials: true, allow: {hosts: [store.test], protocol: https, methods: [GET, POST], paths: [/mine/]}}]`)
	w.host("store.test", 443, http.HandlerFunc(echoPath))
	c := w.client("store.test", 443, true)
	for _, path := range []string{"/theirs/x", "/mine/../theirs/x", "/mine/%2e%2e/theirs/x", "/mine", "//mine/x", "/Mine/x"} {
		resp, _ := do(t, c, get(t, "https://store.test"+path))
		want(t, resp, 403, policy.BadPath)
	}
	resp, _ := do(t, c, get(t, "https://store.test/mine/..%2ftheirs/x"))
	want(t, resp, 400, policy.Malformed)
	for _, with := range []string{"Authorization: Bearer own", "Cookie: a=b", "X-Api-Key: own", "X-Amz-Security-Token: own", "Proxy-Authorization: Basic eA=="} {
		resp, _ := do(t, c, get(t, "https://store.test/mine/x", with))
		want(t, resp, 403, policy.Credentials)
	}
	for _, q := range []string{"X-Amz-Signature=own", "sig=own", "a=b&%6bey=own", "a=b;token=own"} {
		resp, _ := do(t, c, get(t, "https://store.test/mine/x?"+q))
		want(t, resp, 403, policy.Credentials)
	}
	if w.dialCount() != 0 {
		t.Fatal(w.dials)
	}
	if resp, _ := do(t, c, get(t, "https://store.test/mine/x?q=1")); resp.StatusCode != 200 {
		t.Fatal(resp.StatusCode)
	}
}

func TestProxyRequestsInAbsoluteFormAreEachJudged(t *testing.T) {
	w := newWorld(t, `rules: [{name: a, allow: {hosts: [a.test], protocol: http}}]`)
	w.host("a.test", 80, http.HandlerFunc(echoPath))
	c := w.connect(Conn{Door: "connect"})
	b := bufio.NewReader(c)
	for _, q := range []struct {
		target, host string
		reason       policy.Reason
	}{{"http://a.test/p", "a.test", ""}, {"http://b.test/", "b.test", policy.NoRule}, {"http://a.test:81/", "a.test:81", policy.BadPort},
		{"/p", "a.test", policy.Malformed}, {"https://a.test/", "a.test", policy.Malformed}} {
		if q.reason == policy.Malformed {
			c = w.connect(Conn{Door: "connect"})
			b = bufio.NewReader(c)
		}
		_, _ = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", q.target, q.host)
		resp, body := hear(t, b)
		if got := resp.Header.Get("Berth-Denied"); got != string(q.reason) {
			t.Fatalf("%s: %q", q.target, got)
		}
		if q.reason == "" && body != "GET a.test /p" {
			t.Fatal(body)
		}
	}
}

func TestDenialSpeaksToWhomItHits(t *testing.T) {
	w := newWorld(t, "contact: it@example.com\nrules: [{name: no, deny: {hosts: [a.test]}}]")
	c := w.client("a.test", 80, false)
	resp, body := do(t, c, get(t, "http://a.test/p?q=1", "Accept: */*"))
	want(t, resp, 403, policy.DeniedRule)
	var it map[string]any
	if err := json.Unmarshal([]byte(body), &it); err != nil || it["error"] != "egress_denied" || it["host"] != "a.test" || it["path"] != "/p" ||
		it["rule"] != "no" || it["layer"] != "tenant" || it["policy_generation"] != 7.0 || it["ask"] != "it@example.com" || it["see"] != see {
		t.Fatalf("%v %s", err, body)
	}
	resp, body = do(t, c, get(t, "http://a.test/<script>", "Accept: text/html,*/*"))
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html") || !strings.Contains(body, "it@example.com") || strings.Contains(body, "<script>") {
		t.Fatal(body)
	}
	resp, body = do(t, c, get(t, "http://a.test/", "Accept: image/png"))
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/plain") || !strings.Contains(body, "ask: it@example.com") {
		t.Fatal(body)
	}
}

func TestCertificateOfAnotherHostIsRefused(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("b.test", 443, http.HandlerFunc(echoPath))
	w.mu.Lock()
	w.hosts["a.test:443"] = w.hosts["b.test:443"]
	w.mu.Unlock()
	resp, _ := do(t, w.client("a.test", 443, true), get(t, "https://a.test/"))
	want(t, resp, 502, policy.Certificate)
	if r := w.box.last(t); r.Verdict != egressv1.Verdict_VERDICT_FAILED {
		t.Fatal(r)
	}
}

func TestSessionsShareNoConnectionToAHost(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, http.HandlerFunc(echoPath))
	other := newSandbox(t, "two", twoHosts)
	for range 3 {
		say(t, w.connect(Conn{Name: "a.test", Port: 80}), "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n")
		w.box.last(t)
	}
	if w.dialCount() != 1 {
		t.Fatalf("one session dialled %d times", w.dialCount())
	}
	say(t, w.connect(Conn{Name: "a.test", Port: 80, Session: other}), "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n")
	if w.dialCount() != 2 {
		t.Fatal("two sessions shared a connection")
	}
}

func TestBytesThatAreUsedUpEndADownload(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(make([]byte, 4<<20)) }))
	w.box.most = 1 << 20
	resp, err := w.client("a.test", 80, false).Do(get(t, "http://a.test/"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); err == nil || n > 1<<20 {
		t.Fatal(n, err)
	}
	if r := w.box.last(t); r.Verdict != egressv1.Verdict_VERDICT_RESET || r.Reason != string(policy.Bytes) {
		t.Fatal(r)
	}
}

func TestWhatCannotBeRecordedDoesNotEndWell(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.box.noAudit = true
	w.host("a.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		_, _ = rw.Write(make([]byte, 1<<20))
		rw.(http.Flusher).Flush()
	}))
	resp, err := w.client("a.test", 80, false).Do(get(t, "http://a.test/"))
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	if err == nil {
		t.Fatal("it looked complete")
	}
}

func TestEndOfTheContextResetsTheConnection(t *testing.T) {
	w := newWorld(t, twoHosts)
	c := w.connect(Conn{Name: "a.test", Port: 80})
	_, _ = io.WriteString(c, "GET / HT")
	w.cancel()
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}
