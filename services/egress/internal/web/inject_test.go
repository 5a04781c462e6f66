package web

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

const injecting = `rules:
  - {name: api, allow: {hosts: [api.example.com], protocol: https, methods: [GET, POST, HEAD], paths: [/v1/]}, inject: {secret: key, header: Authorization}}
  - {name: query, allow: {hosts: [api.example.com], protocol: https, methods: [GET], paths: [/q/]}, inject: {secret: key, query: key}}
  - {name: git, allow: {hosts: [api.example.com], protocol: https, paths: [/git/]}, inject: {secret: key, header: Authorization, format: "Basic {secret}"}}
  - {name: named, allow: {hosts: [api.example.com], protocol: https, paths: [/named/]}, inject: {secret: key, header: Authorization, format: "Basic bot:{secret}"}}
  - {name: other, allow: {hosts: [other.example.com], protocol: https, methods: [GET, POST]}}
  - {name: away, allow: {hosts: [away.example.com], protocol: https}, inject: {secret: key, header: X-Key, format: "k={secret}"}}
  - {name: none, allow: {hosts: [api.example.com], protocol: https, paths: [/none/]}, inject: {secret: missing, header: X-Key}}
`

// seen is a host that remembers the last request and answers with what it is told.
type seenHost struct {
	r    chan *http.Request
	body chan string
	say  func(http.ResponseWriter, *http.Request)
}

func (s *seenHost) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	select {
	case s.r <- r:
		s.body <- string(b)
	default:
	}
	if s.say != nil {
		s.say(w, r)
	}
}

func newSeen(say func(http.ResponseWriter, *http.Request)) *seenHost {
	return &seenHost{r: make(chan *http.Request, 1), body: make(chan string, 1), say: say}
}

func TestSecretIsPutInItsPlaceAndOnlyThere(t *testing.T) {
	w := newWorld(t, injecting)
	h := newSeen(nil)
	w.host("api.example.com", 443, h)
	c := w.client("api.example.com", 443, true)
	basicOf := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	for _, q := range []struct{ url, field, header, query string }{
		{"/v1/x", "", "Bearer " + theSecret, ""},
		{"/v1/x", "Authorization: Bearer own", "Bearer " + theSecret, ""},
		{"/v1/x", "Authorization: bearer BERTH_SECRET_KEY", "Bearer " + theSecret, ""},
		{"/git/x", "Authorization: " + basicOf("git:BERTH_SECRET_KEY"), basicOf("git:" + theSecret), ""},
		{"/named/x", "", basicOf("bot:" + theSecret), ""},
		{"/named/x", "Authorization: " + basicOf("bot:BERTH_SECRET_KEY"), basicOf("bot:" + theSecret), ""},
		{"/v1/x?a=b", "Connection: Authorization", "Bearer " + theSecret, "a=b"},
		{"/q/x?a=b", "", "", "a=b&key=" + url.QueryEscape(theSecret)},
		{"/q/x?key=own&a=b&key=2", "", "", "a=b&key=" + url.QueryEscape(theSecret)},
		{"/q/x?%6bey=BERTH_SECRET_KEY&a=b", "", "", "key=" + url.QueryEscape(theSecret) + "&a=b"},
	} {
		fields := []string{}
		if q.field != "" {
			fields = append(fields, q.field)
		}
		if strings.HasPrefix(q.field, "Connection") { // HTTP/2 has none
			fields = nil
		}
		resp, _ := do(t, c, get(t, "https://api.example.com"+q.url, fields...))
		if resp.StatusCode != 200 {
			t.Fatalf("%v: %d %v", q, resp.StatusCode, resp.Header)
		}
		r := <-h.r
		<-h.body
		if r.Header.Get("Authorization") != q.header || len(r.Header["Authorization"]) > 1 || r.URL.RawQuery != q.query {
			t.Fatalf("%v: %v %q", q, r.Header, r.URL.RawQuery)
		}
		if r := w.box.last(t); r.Injected != "key" || strings.Contains(r.Path, "?") {
			t.Fatal(r)
		}
	}
}

func TestSecretThatCannotBeHadStopsTheRequest(t *testing.T) {
	w := newWorld(t, injecting)
	h := newSeen(nil)
	w.host("api.example.com", 443, h)
	w.host("away.example.com", 443, h)
	resp, _ := do(t, w.client("api.example.com", 443, true), get(t, "https://api.example.com/none/"))
	want(t, resp, 502, policy.SecretAway)
	if r := w.box.last(t); r.Verdict != egressv1.Verdict_VERDICT_FAILED || r.Injected != "" {
		t.Fatal(r)
	}
	resp, _ = do(t, w.client("away.example.com", 443, true), get(t, "https://away.example.com/"))
	want(t, resp, 502, policy.SecretAway)
	if w.dialCount() != 0 {
		t.Fatal(w.dials)
	}
}

func TestSecretGoesToNoUnverifiedHost(t *testing.T) {
	w := newWorld(t, injecting)
	h := newSeen(nil)
	w.host("other.example.com", 443, h)
	w.mu.Lock()
	w.hosts["api.example.com:443"] = w.hosts["other.example.com:443"]
	w.mu.Unlock()
	resp, _ := do(t, w.client("api.example.com", 443, true), get(t, "https://api.example.com/v1/"))
	want(t, resp, 502, policy.Certificate)
	if len(h.r) != 0 {
		t.Fatal("it got the request")
	}
}

// Row 24: the placeholder of provider A sent to provider B, and to A in another place.
func TestRow24PlaceholderSentElsewhere(t *testing.T) {
	w := newWorld(t, injecting)
	h := newSeen(nil)
	w.host("api.example.com", 443, h)
	w.host("other.example.com", 443, h)
	const p = "BERTH_SECRET_KEY"
	b64 := base64.StdEncoding.EncodeToString([]byte("u:" + p))
	for _, r := range []*http.Request{
		get(t, "https://other.example.com/", "Authorization: Bearer "+p),
		get(t, "https://other.example.com/", "X-Any: "+p),
		get(t, "https://other.example.com/", "Authorization: Basic "+b64),
		get(t, "https://other.example.com/?a="+p),
		get(t, "https://other.example.com/?a=BERTH%5FSECRET%5FKEY"),
		get(t, "https://other.example.com/"+p),
		get(t, "https://other.example.com/"+"BERTH_SECRET_OTHER"),
		request(t, "POST", "https://other.example.com/", strings.NewReader(strings.Repeat("x", 50000)+p)),
		request(t, "POST", "https://other.example.com/", io.MultiReader(strings.NewReader("xx BERTH_SEC"), strings.NewReader("RET_KEY yy"))),
		get(t, "https://api.example.com/v1/"+p),
		get(t, "https://api.example.com/v1/?a="+p),
		get(t, "https://api.example.com/v1/", "X-Other: "+p),
		get(t, "https://api.example.com/v1/", "Authorization: Bearer BERTH_SECRET_OTHER"),
		get(t, "https://api.example.com/v1/", "Authorization: Bearer BERTH_SECRET_KEY_2"),
		request(t, "POST", "https://api.example.com/v1/", strings.NewReader("a BERTH_SECRET_OTHER b")),
	} {
		for _, h2 := range []bool{true, false} {
			if r.Body != nil && r.GetBody == nil && !h2 {
				continue
			}
			if r.GetBody != nil {
				r.Body, _ = r.GetBody()
			}
			resp, _ := do(t, w.client(r.URL.Hostname(), 443, h2), r)
			want(t, resp, 403, policy.Placeholder)
			if rec := w.box.last(t); rec.Reason != string(policy.Placeholder) || rec.Verdict != egressv1.Verdict_VERDICT_DENIED {
				t.Fatal(rec)
			}
		}
	}
	resp, _ := do(t, w.client("api.example.com", 443, true), request(t, "POST", "https://api.example.com/v1/", strings.NewReader("my environment: "+p)))
	if resp.StatusCode != 200 {
		t.Fatal("a text about the placeholder of the host itself was refused")
	}
}

// Row 25: an endpoint that echoes the injected secret: raw, base64, hex, compressed, split over chunks.
func TestRow25EchoedSecretsAreScrubbed(t *testing.T) {
	w := newWorld(t, injecting)
	bodies := map[string]func(secret string) string{
		"raw":       func(s string) string { return "you sent " + s + "." },
		"base64":    func(s string) string { return base64.StdEncoding.EncodeToString([]byte("Bearer " + s)) },
		"base64url": func(s string) string { return base64.RawURLEncoding.EncodeToString([]byte("x" + s)) },
		"hex":       func(s string) string { return hex.EncodeToString([]byte(s)) },
		"upperhex":  func(s string) string { return fmt.Sprintf("%X", s) },
		"url":       url.QueryEscape,
		"json":      func(s string) string { return fmt.Sprintf("{%q:%s}", "auth", jsonOf(s)) },
	}
	compress := map[string]func(io.Writer) io.WriteCloser{
		"":        nil,
		"gzip":    func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
		"deflate": func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
		"br":      func(w io.Writer) io.WriteCloser { return brotli.NewWriter(w) },
		"zstd":    func(w io.Writer) io.WriteCloser { z, _ := zstd.NewWriter(w); return z },
	}
	w.host("api.example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		secret := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		if r.Header.Get("Accept-Encoding") != "identity" || r.Header.Get("Range") != "" {
			t.Error("the host may compress or part the answer")
		}
		text := []byte(bodies[r.URL.Query().Get("body")](secret))
		rw.Header().Set("X-Echo", string(text))
		rw.Header().Set("Trailer", "X-Last")
		defer rw.Header().Set("X-Last", string(text))
		coding := r.URL.Query().Get("coding")
		if c := compress[coding]; c != nil {
			var b bytes.Buffer
			z := c(&b)
			_, _ = z.Write(text)
			_ = z.Close()
			text = b.Bytes()
			rw.Header().Set("Content-Encoding", coding)
		}
		for i := range text { // one byte a chunk
			_, _ = rw.Write(text[i : i+1])
			rw.(http.Flusher).Flush()
		}
	}))
	for _, h2 := range []bool{true, false} {
		c := w.client("api.example.com", 443, h2)
		for body, encode := range bodies {
			for coding := range compress {
				resp, text := do(t, c, get(t, "https://api.example.com/v1/?body="+body+"&coding="+coding, "Accept-Encoding: gzip, br", "Range: bytes=0-3"))
				if resp.StatusCode != 200 || resp.Header.Get("Content-Encoding") != "" || len(text) != len(encode(theSecret)) || !strings.Contains(text, "******") {
					t.Fatalf("%s %s: %d %v %q", body, coding, resp.StatusCode, resp.Header, text)
				}
				if resp.Trailer.Get("X-Last") == "" || resp.Header.Get("X-Echo") == "" {
					t.Fatalf("fields are missing: %v %v", resp.Header, resp.Trailer)
				}
				w.noSecret(text + resp.Header.Get("X-Echo") + resp.Trailer.Get("X-Last"))
			}
		}
	}
}

func jsonOf(s string) string { return `"` + jsonText(s, true) + `"` }

// Row 25: what cannot be read is refused.
func TestRow25UnreadableAnswersAreRefused(t *testing.T) {
	w := newWorld(t, injecting)
	w.host("api.example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/coding":
			rw.Header().Set("Content-Encoding", "compress")
		case "/v1/grpc":
			rw.Header().Set("Grpc-Encoding", "gzip")
		case "/v1/part":
			rw.Header().Set("Content-Range", "bytes 0-3/50")
			rw.WriteHeader(206)
		case "/v1/name":
			rw.Header()["X-"+hex.EncodeToString([]byte(theSecret))] = []string{"x"}
		}
		_, _ = io.WriteString(rw, r.Header.Get("Authorization")[:4])
	}))
	for _, path := range []string{"coding", "grpc", "part", "name"} {
		resp, _ := do(t, w.client("api.example.com", 443, true), get(t, "https://api.example.com/v1/"+path))
		want(t, resp, 502, policy.Echo)
	}
}

// Row 26: the secret in any log, error, record or print of what holds it.
func TestRow26SecretPrintsAsNothing(t *testing.T) {
	w := newWorld(t, injecting)
	s := Secret{Value: []byte(theSecret), Hosts: []authority.Name{"a.test"}}
	for _, f := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		w.noSecret(fmt.Sprintf(f, s))
		w.noSecret(fmt.Sprintf(f, newScrubber([]byte(theSecret))))
	}
	// The host breaks off, answers rubbish, or quotes the secret in a malformed head.
	w.raw("api.example.com", 443, rubbish)
	for range 3 {
		resp, body := do(t, w.client("api.example.com", 443, false), get(t, "https://api.example.com/v1/x"))
		want(t, resp, 504, policy.Unreachable)
		w.noSecret(body)
		w.noSecret(fmt.Sprint(resp.Header))
	}
	resp, body := do(t, w.client("api.example.com", 443, false), get(t, "https://api.example.com/q/x"))
	want(t, resp, 504, policy.Unreachable)
	w.noSecret(body) // and, at the end, all that was logged and recorded
}

// Row 26: net/http logs what a host says unasked.
func TestRow26UnaskedAnswerIsNotLogged(t *testing.T) {
	var std safeBuffer
	before := log.Writer()
	log.SetOutput(&std)
	defer log.SetOutput(before)
	w := newWorld(t, injecting)
	told := make(chan struct{})
	w.raw("api.example.com", 443, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nBerth-Denied: no\r\n\r\nok"+r.Header.Get("Authorization"))
		_, _ = io.Copy(io.Discard, c) // until the gate has had enough
		close(told)
	})
	resp, body := do(t, w.client("api.example.com", 443, false), get(t, "https://api.example.com/v1/x"))
	if body != "ok" || resp.Header.Get("Berth-Denied") != "" {
		t.Fatal(body, resp.Header)
	}
	<-told
	log.Print("after")
	w.noSecret(std.String())
	if !strings.Contains(std.String(), "after") {
		t.Fatal("the log is gone")
	}
}
