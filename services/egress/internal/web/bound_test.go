package web

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

// streams opens n streams of HTTP/2 that ask for a path of a.test and give answers no room.
func streams(t *testing.T, c io.Writer, n int, fields ...string) *http2.Framer {
	t.Helper()
	var all bytes.Buffer
	all.WriteString(http2.ClientPreface)
	f := http2.NewFramer(&all, nil)
	_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for i := range n {
		block.Reset()
		for _, kv := range append([]string{":method=GET", ":scheme=https", ":authority=a.test", ":path=/x"}, fields...) {
			k, v, _ := strings.Cut(kv, "=")
			_ = enc.WriteField(hpack.HeaderField{Name: k, Value: v})
		}
		rest := block.Bytes()
		first := rest[:min(len(rest), 16<<10)]
		rest = rest[len(first):]
		id := uint32(2*i + 1)
		_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndStream: true, EndHeaders: len(rest) == 0})
		for len(rest) > 0 {
			part := rest[:min(len(rest), 16<<10)]
			rest = rest[len(part):]
			_ = f.WriteContinuation(id, len(rest) == 0, part)
		}
	}
	if _, err := c.Write(all.Bytes()); err != nil {
		t.Fatal(err)
	}
	if r, ok := c.(io.Reader); ok {
		return http2.NewFramer(io.Discard, r)
	}
	return nil
}

// resets counts the streams that are reset until there are n.
func resets(t *testing.T, f *http2.Framer, n int) {
	t.Helper()
	for n > 0 {
		fr, err := f.ReadFrame()
		if err != nil {
			t.Fatalf("%d streams were not reset: %v", n, err)
		}
		if _, ok := fr.(*http2.RSTStreamFrame); ok {
			n--
		}
	}
}

const nothing = `rules: [{name: no, deny: {hosts: [a.test]}}]`

func TestRefusalsThatNobodyTakesEnd(t *testing.T) {
	w := newWorld(t, nothing)
	began := time.Now()
	resets(t, streams(t, w.h2("a.test"), 20), 20)
	if d := time.Since(began); d > 3*denyTime {
		t.Errorf("it took %s", d)
	}
	p := w.e.pools.open(w.box)
	defer p.release()
	for end := time.Now().Add(5 * time.Second); p.requests.Load() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d requests are still counted", p.requests.Load())
		}
	}
}

func TestRefusedRequestsUnderWayAreBounded(t *testing.T) {
	w := newWorld(t, nothing)
	w.e.MaxRequests = 3
	resets(t, streams(t, w.h2("a.test"), 20), 17)
	for over, others := 0, 0; over < 17; {
		if r := w.box.last(t); r.Reason == string(policy.Rate) {
			over++
		} else if others++; others > 3 {
			t.Fatalf("more than three waited: %v", r)
		}
	}
}

// TestClientThatReadsNothingIsReset: a deadline of a stream needs a connection that takes bytes.
func TestClientThatReadsNothingIsReset(t *testing.T) {
	w := newWorld(t, nothing)
	mine, theirs := net.Pipe()
	defer mine.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.e.Serve(w.ctx, Conn{Conn: theirs, Session: w.box, Name: "a.test", Port: 443, Secure: true, ALPN: "h2"})
	}()
	streams(t, struct{ io.Writer }{mine}, 2)
	select {
	case <-done:
	case <-time.After(5 * denyTime):
		t.Error("it is still served")
	}
}

func TestHeadsOfHTTP2AreSmall(t *testing.T) {
	w := newWorld(t, `rules: [{name: a, allow: {hosts: [a.test], protocol: https, methods: [GET]}}]`)
	w.host("a.test", 443, http.HandlerFunc(echoPath))
	c := w.client("a.test", 443, true)
	if resp, _ := do(t, c, get(t, "https://a.test/x", "X-Big: "+strings.Repeat("b", 12<<10))); resp.StatusCode != 200 {
		t.Error(resp.StatusCode)
	}
	f := streams(t, w.h2("a.test"), 1, "x-big="+strings.Repeat("b", 60<<10))
	for {
		fr, err := f.ReadFrame()
		if err != nil {
			break // it is ended
		}
		if h, ok := fr.(*http2.HeadersFrame); ok {
			fields, _ := hpack.NewDecoder(4096, nil).DecodeFull(h.HeaderBlockFragment())
			if len(fields) == 0 || fields[0].Value != "431" {
				t.Errorf("answered %v", fields)
			}
			break
		}
	}
	if n := w.dialCount(); n != 1 {
		t.Errorf("%d dials", n)
	}
}

// hanging is an upstream whose dials end with their context.
type hanging struct {
	began chan struct{}
	now   atomic.Int64
}

func (h *hanging) Dial(ctx context.Context, _ authority.Name, _ uint16, _ []netip.Prefix) (net.Conn, netip.Addr, error) {
	h.now.Add(1)
	defer h.now.Add(-1)
	h.began <- struct{}{}
	<-ctx.Done()
	return nil, netip.Addr{}, ctx.Err()
}

func TestDialsOfCancelledRequestsAreCountedAndEndWithTheSession(t *testing.T) {
	w := newWorld(t, `rules: [{name: a, allow: {hosts: ["*.many.test"], protocol: http}}]`)
	h := &hanging{began: make(chan struct{}, 100)}
	w.e.Upstream, w.e.MaxRequests = h, 2
	refused := 0
	for i := range 10 {
		name := fmt.Sprintf("h%d.many.test", i)
		c := w.connect(Conn{Name: authority.Name(name), Port: 80})
		_, _ = fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", name)
		told := make(chan string, 1)
		go func() {
			b := make([]byte, 4096)
			n, _ := c.Read(b)
			told <- string(b[:n])
		}()
		select {
		case <-h.began:
		case text := <-told:
			if !strings.Contains(text, " 429 ") {
				t.Fatalf("%q", text)
			}
			refused++
		case <-time.After(10 * time.Second):
			t.Fatal("neither dialled nor refused")
		}
		_ = c.Close()
		w.box.last(t)
	}
	if n := h.now.Load(); n > 4 {
		t.Errorf("%d dials are under way", n)
	}
	if h.now.Load() == 4 && refused != 6 {
		t.Errorf("%d were refused", refused)
	}
	w.e.Close()
	for end := time.Now().Add(5 * time.Second); h.now.Load() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d dials outlive the engine", h.now.Load())
		}
	}
}

func TestConnectionsToHostsAreCountedUntilTheyEnd(t *testing.T) {
	w := newWorld(t, `rules: [{name: a, allow: {hosts: [a.test], protocol: http}}]`)
	w.host("a.test", 80, http.HandlerFunc(echoPath))
	c := w.client("a.test", 80, false)
	for range 3 {
		if resp, _ := do(t, c, get(t, "http://a.test/x")); resp.StatusCode != 200 {
			t.Fatal(resp.StatusCode)
		}
	}
	p := w.e.pools.open(w.box)
	defer p.release()
	if n := p.conns.Load(); n != 1 {
		t.Errorf("%d are counted, want 1", n)
	}
	p.close()
	for end := time.Now().Add(5 * time.Second); p.conns.Load() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d are counted after the end", p.conns.Load())
		}
	}
}

func TestFieldsThatRerouteDoNotGoOn(t *testing.T) {
	w := newWorld(t, `rules: [{name: a, allow: {hosts: [a.test], protocol: http, methods: [POST]}}]`)
	h := newSeen(nil)
	w.host("a.test", 80, h)
	c := w.connect(Conn{Name: "a.test", Port: 80})
	names := []string{"X-Forwarded-Host", "X_Forwarded_Host", "x-forwarded-prefix", "Forwarded", "X-Host", "X-Original-URL", "X-Rewrite-Url",
		"X-HTTP-Method-Override", "X_HTTP_Method_Override", "X-Method-Override", "X-HTTP-Method"}
	head := "POST /x HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\nX-Kept: 1\r\n"
	for _, n := range names {
		head += n + ": DELETE\r\n"
	}
	if resp, _ := say(t, c, head+"\r\n"); resp.StatusCode != 200 {
		t.Fatal(resp.StatusCode)
	}
	got := (<-h.r).Header
	for k, vs := range got {
		if vs[0] == "DELETE" {
			t.Errorf("%s went on", k)
		}
	}
	if got.Get("X-Kept") != "1" {
		t.Error(got)
	}
	c = w.connect(Conn{Name: "a.test", Port: 80})
	resp, _ := say(t, c, "POST /x HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nTrailer: X-Http-Method-Override\r\n\r\n0\r\nX-Http-Method-Override: DELETE\r\n\r\n")
	want(t, resp, 400, policy.Malformed)
}

func TestCredentialsUnderOtherNamesAreRefused(t *testing.T) {
	w := newWorld(t, `rules: [{name: a, refuse_credentials: true, allow: {hosts: [a.test], protocol: https, methods: [GET]}}]`)
	w.host("a.test", 443, http.HandlerFunc(echoPath))
	c := w.client("a.test", 443, true)
	for _, with := range []string{"X_Api_Key: own", "X-Auth-Key: own", "X-Figma-Token: own", "X-Shopify-Access-Token: own", "X-Consul-Token: own",
		"Dd-Api-Key: own", "Token: own", "Authentication: own", "Sec-Websocket-Protocol: bearer, a.b.c",
		"Sec-Websocket-Protocol: " + strings.Repeat("k", 65)} {
		resp, _ := do(t, c, get(t, "https://a.test/x", with))
		want(t, resp, 403, policy.Credentials)
	}
	if resp, _ := do(t, c, get(t, "https://a.test/x", "Sec-Websocket-Protocol: graphql-ws")); resp.StatusCode != 200 {
		t.Error(resp.StatusCode)
	}
}

// TestSandboxDoesNotChooseWhatStandsBesideASecret: an answer that is cut where it likes would show parts.
func TestSandboxDoesNotChooseWhatStandsBesideASecret(t *testing.T) {
	w := newWorld(t, injecting)
	w.host("api.example.com", 443, newSeen(nil))
	c := w.client("api.example.com", 443, true)
	b64 := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	const p = "BERTH_SECRET_KEY"
	for _, q := range []struct{ url, field string }{
		{"/v1/x", p}, {"/v1/x", "token " + p}, {"/v1/x", "Bearer  " + p}, {"/v1/x", "Bearer " + p + " x"}, {"/v1/x", "Bearer x" + p},
		{"/v1/x", "Bearer " + p + " " + p}, {"/v1/x", b64("git:" + p)}, {"/git/x", b64("git:" + p + "x")}, {"/git/x", b64("a:b:" + p)},
		{"/git/x", b64(strings.Repeat("u", 65) + ":" + p)}, {"/named/x", b64("git:" + p)}, {"/q/x?key=x" + p, ""}, {"/q/x?key=" + p + "%20x", ""},
	} {
		var fields []string
		if q.field != "" {
			fields = []string{"Authorization: " + q.field}
		}
		resp, _ := do(t, c, get(t, "https://api.example.com"+q.url, fields...))
		if resp.StatusCode != 403 || resp.Header.Get("Berth-Denied") != string(policy.Placeholder) {
			t.Errorf("%v: %d %s", q, resp.StatusCode, resp.Header.Get("Berth-Denied"))
		}
	}
}

func TestNamesOfAnnouncedTrailersAreScrubbed(t *testing.T) {
	w := newWorld(t, injecting)
	w.host("api.example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Trailer", "X-"+hex.EncodeToString([]byte(theSecret)))
		_, _ = io.WriteString(rw, "text")
	}))
	for _, h2 := range []bool{true, false} {
		resp, _ := do(t, w.client("api.example.com", 443, h2), get(t, "https://api.example.com/v1/x"))
		want(t, resp, 502, policy.Echo)
		w.noSecret(fmt.Sprint(resp.Header, resp.Trailer))
	}
}

// h2 is a connection of HTTP/2 to a name that is not written to yet.
func (w *world) h2(name string) net.Conn {
	w.t.Helper()
	c := tls.Client(w.connect(Conn{Name: authority.Name(name), Port: 443, Secure: true}), &tls.Config{RootCAs: w.ca.pool, ServerName: name, NextProtos: []string{"h2"}})
	if err := c.Handshake(); err != nil {
		w.t.Fatal(err)
	}
	return c
}
