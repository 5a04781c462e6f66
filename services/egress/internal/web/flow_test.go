package web

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"

	"github.com/berth-dev/berth/services/egress/policy"
)

// rubbish answers with what it got as if that were HTTP.
func rubbish(c net.Conn) {
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	_, _ = fmt.Fprintf(c, "HTTP/1.1 %s %s\r\n\x00%s\r\n\r\n", r.Header.Get("Authorization"), r.RequestURI, r.Header.Get("Authorization"))
}

func TestEventsAreNotHeldBack(t *testing.T) {
	for _, path := range []string{"/v1/events", "/plain"} {
		for _, h2 := range []bool{false, true} {
			w := newWorld(t, injecting+"  - {name: plain, allow: {hosts: [api.example.com], protocol: https, methods: [POST], paths: [/plain]}}\n")
			w.host("api.example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				b := bufio.NewReader(r.Body)
				_ = http.NewResponseController(rw).EnableFullDuplex()
				rw.Header().Set("Content-Type", "text/event-stream")
				rw.(http.Flusher).Flush()
				for {
					line, err := b.ReadString('\n')
					if err != nil {
						return
					}
					_, _ = io.WriteString(rw, "data: "+line)
					rw.(http.Flusher).Flush()
				}
			}))
			in, out := io.Pipe()
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			resp, err := w.client("api.example.com", 443, h2).Do(request(t, "POST", "https://api.example.com"+path, in).WithContext(ctx))
			if err != nil {
				t.Fatal(err)
			}
			b := bufio.NewReader(resp.Body)
			for i := range 5 { // each waits for the one before
				_, _ = fmt.Fprintf(out, "s%d\n", i)
				if line, err := b.ReadString('\n'); err != nil || line != fmt.Sprintf("data: s%d\n", i) {
					t.Fatal(line, err)
				}
			}
			out.Close()
			if _, err := b.ReadByte(); err != io.EOF {
				t.Fatal(err)
			}
			resp.Body.Close()
		}
	}
}

func TestBodyWaitsForContinue(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			rw.WriteHeader(413)
			return
		}
		_, _ = io.Copy(rw, r.Body)
	}))
	head := "Host: a.test\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
	c := w.connect(Conn{Name: "a.test", Port: 80})
	b := bufio.NewReader(c)
	_, _ = io.WriteString(c, "POST /yes HTTP/1.1\r\n"+head)
	if line, _ := b.ReadString('\n'); line != "HTTP/1.1 100 Continue\r\n" {
		t.Fatal(line)
	}
	_, _ = b.ReadString('\n')
	_, _ = io.WriteString(c, "hello")
	if resp, body := hear(t, b); resp.StatusCode != 200 || body != "hello" {
		t.Fatal(resp.StatusCode, body)
	}
	resp, _ := say(t, w.connect(Conn{Name: "a.test", Port: 80}), "POST /no HTTP/1.1\r\n"+head)
	if resp.StatusCode != 413 {
		t.Fatal(resp.StatusCode)
	}
	resp, _ = say(t, w.connect(Conn{Name: "a.test", Port: 80}), "PUT /no HTTP/1.1\r\n"+head)
	if resp.StatusCode != 403 {
		t.Fatal(resp.StatusCode)
	}
}

func TestTrailersGoBothWays(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		rw.Header().Set("Trailer", "X-Back")
		_, _ = io.WriteString(rw, "body")
		rw.Header().Set("X-Back", r.Trailer.Get("X-Sum"))
	}))
	c := w.connect(Conn{Name: "a.test", Port: 80})
	resp, body := say(t, c, "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 42\r\n\r\n")
	if body != "body" || resp.Trailer.Get("X-Back") != "42" {
		t.Fatal(body, resp.Trailer)
	}
}

func TestTrailerThatNeverComesEndsTheAnswer(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Trailer", "X-Never")
		_, _ = io.WriteString(rw, "body")
		rw.(http.Flusher).Flush()
	}))
	for _, h2 := range []bool{false, true} {
		if _, body := do(t, w.client("a.test", 443, h2), get(t, "https://a.test/")); body != "body" {
			t.Fatal(body)
		}
	}
}

func TestGRPCWorks(t *testing.T) {
	w := newWorld(t, injecting+"  - {name: grpc, allow: {hosts: [rpc.example.com], protocol: https, methods: [POST]}}\n")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	leaf := w.ca.leaf(t, "rpc.example.com")
	s := grpc.NewServer(grpc.Creds(credentials.NewServerTLSFromCert(&leaf)))
	hs := health.NewServer()
	healthv1.RegisterHealthServer(s, hs)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	w.mu.Lock()
	w.hosts["rpc.example.com:443"] = l.Addr().String()
	w.mu.Unlock()
	cc, err := grpc.NewClient("passthrough:///rpc.example.com", grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: w.ca.pool})),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			c := w.connect(Conn{Name: "rpc.example.com", Port: 443, Secure: true})
			return c, c.SetDeadline(time.Time{})
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	h := healthv1.NewHealthClient(cc)
	if r, err := h.Check(ctx, &healthv1.HealthCheckRequest{}); err != nil || r.Status != healthv1.HealthCheckResponse_SERVING {
		t.Fatal(r, err)
	}
	if _, err := h.Check(ctx, &healthv1.HealthCheckRequest{Service: "none"}); err == nil || !strings.Contains(err.Error(), "NotFound") {
		t.Fatal(err)
	}
	stream, err := h.Watch(ctx, &healthv1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 4 { // each only comes when the one before was read
		want := []healthv1.HealthCheckResponse_ServingStatus{healthv1.HealthCheckResponse_SERVING, healthv1.HealthCheckResponse_NOT_SERVING}[i%2]
		if r, err := stream.Recv(); err != nil || r.Status != want {
			t.Fatal(r, err)
		}
		hs.SetServingStatus("", []healthv1.HealthCheckResponse_ServingStatus{healthv1.HealthCheckResponse_NOT_SERVING, healthv1.HealthCheckResponse_SERVING}[i%2])
	}
}

func echoSocket(extra func(*http.Request) string) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(rw, r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionContextTakeover})
		if err != nil {
			return
		}
		defer c.CloseNow()
		c.SetReadLimit(-1)
		for {
			kind, b, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if err := c.Write(r.Context(), kind, append(b, extra(r)...)); err != nil {
				return
			}
		}
	})
}

func TestWebSocketWorksAndShowsNoSecret(t *testing.T) {
	for _, path := range []string{"/v1/ws", "/plain"} {
		w := newWorld(t, injecting+"  - {name: plain, allow: {hosts: [api.example.com], protocol: https, methods: [GET], paths: [/plain]}}\n")
		w.host("api.example.com", 443, echoSocket(func(r *http.Request) string { return r.Header.Get("Authorization") }))
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		c, _, err := websocket.Dial(ctx, "wss://api.example.com"+path, &websocket.DialOptions{HTTPClient: w.client("api.example.com", 443, false), CompressionMode: websocket.CompressionContextTakeover})
		if err != nil {
			t.Fatal(err)
		}
		c.SetReadLimit(-1)
		for _, size := range []int{0, 1, 125, 126, 70000, 300000} {
			if err := c.Write(ctx, websocket.MessageText, []byte(strings.Repeat("x", size))); err != nil {
				t.Fatal(err)
			}
			kind, b, err := c.Read(ctx)
			if err != nil || kind != websocket.MessageText || strings.Count(string(b), "x") < size {
				t.Fatal(kind, len(b), err)
			}
			w.noSecret(string(b))
			if hidden := strings.Contains(string(b), "*****"); hidden != (path == "/v1/ws") {
				t.Fatalf("%q", b[size:])
			}
		}
		_ = c.Close(websocket.StatusNormalClosure, "")
		if r := w.box.last(t); r.Protocol != "websocket" || r.Status != 101 || path == "/v1/ws" && r.BytesOut < 370000 || r.Verdict != egressv1.Verdict_VERDICT_ALLOWED {
			t.Fatal(r)
		}
	}
}

// A host may part a secret over frames and messages.
func TestSecretOverSeveralFramesIsMasked(t *testing.T) {
	w := newWorld(t, injecting)
	w.raw("api.example.com", 443, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		s := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		_, _ = fmt.Fprintf(c, "HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: %s\r\n\r\n", acceptOf(r.Header.Get("Sec-WebSocket-Key")))
		half := len(s) / 2
		_, _ = fmt.Fprintf(c, "\x01%c%s\x89\x02hi\x80%c%s", byte(half), s[:half], byte(len(s)-half), s[half:])
		_, _ = fmt.Fprintf(c, "\x88%c\x03\xe8%s", byte(2+len(s)), s)
	})
	c := w.connect(Conn{Name: "api.example.com", Port: 443, Secure: true})
	tc := tls.Client(c, &tls.Config{RootCAs: w.ca.pool, ServerName: "api.example.com", NextProtos: []string{"http/1.1"}})
	_, _ = io.WriteString(tc, "GET /v1/ HTTP/1.1\r\nHost: api.example.com\r\n"+wsHead+"\r\n")
	all, _ := io.ReadAll(tc)
	w.noSecret(string(all))
	if !strings.Contains(string(all), "\x89\x02hi") || strings.Count(string(all), "*") < 2*len(theSecret)-8 {
		t.Fatalf("%q", all)
	}
}

// Row 28 for WebSocket.
func TestRow28RevokedWebSocketIsReset(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, echoSocket(func(*http.Request) string { return "" }))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, _, err := websocket.Dial(ctx, "ws://a.test/", &websocket.DialOptions{HTTPClient: w.client("a.test", 80, false)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	if err := c.Write(ctx, websocket.MessageText, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Read(ctx); err != nil {
		t.Fatal(err)
	}
	w.box.apply(t, "rules: [{name: b, allow: {hosts: [b.test], protocol: https}}]")
	if _, _, err := c.Read(ctx); err == nil || ctx.Err() != nil {
		t.Fatal("it goes on", err)
	}
	if r := w.box.last(t); r.Verdict != egressv1.Verdict_VERDICT_RESET || r.Protocol != "websocket" {
		t.Fatal(r)
	}
}

func TestAnswersWithoutASecretAreNotTouched(t *testing.T) {
	w := newWorld(t, twoHosts)
	body := strings.Repeat("\x00\xffany bytes", 20000)
	w.host("a.test", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			if b, err := io.ReadAll(r.Body); err != nil || string(b) != body || r.ContentLength != int64(len(body)) {
				t.Error("the upload came otherwise", len(b), err)
			}
		}
		if r.Header.Get("Accept-Encoding") != "br" || r.Header.Get("Range") != "bytes=0-9" {
			t.Error(r.Header)
		}
		rw.Header().Set("Content-Encoding", "br")
		rw.Header()["Content-Type"] = nil
		rw.WriteHeader(206)
		_, _ = io.WriteString(rw, body)
	}))
	for _, h2 := range []bool{false, true} {
		for _, method := range []string{"GET", "POST"} {
			r := request(t, method, "https://a.test/", nil, "Accept-Encoding: br", "Range: bytes=0-9")
			if method == "POST" {
				r = request(t, method, "https://a.test/", strings.NewReader(body), "Accept-Encoding: br", "Range: bytes=0-9")
			}
			resp, got := do(t, w.client("a.test", 443, h2), r)
			if got != body || resp.StatusCode != 206 || resp.Header.Get("Content-Encoding") != "br" || resp.Header["Content-Type"] != nil {
				t.Fatal(len(got), resp.StatusCode, resp.Header)
			}
		}
	}
}

func TestHeadTellsTheLengthAndEndsThere(t *testing.T) {
	w := newWorld(t, injecting)
	w.host("api.example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Length", "12345")
		rw.Header().Set("X-Echo", r.Header.Get("Authorization"))
	}))
	for _, h2 := range []bool{false, true} {
		c := w.client("api.example.com", 443, h2)
		for range 2 {
			resp, _ := do(t, c, request(t, "HEAD", "https://api.example.com/v1/", nil))
			if resp.StatusCode != 200 || resp.ContentLength != 12345 {
				t.Fatal(resp.StatusCode, resp.ContentLength)
			}
			w.noSecret(resp.Header.Get("X-Echo"))
		}
	}
}

func TestConnectionGoesOnAfterADenial(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, http.HandlerFunc(echoPath))
	c := w.connect(Conn{Name: "a.test", Port: 80})
	b := bufio.NewReader(c)
	for range 3 {
		_, _ = io.WriteString(c, "DELETE /x HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhello")
		resp, _ := hear(t, b)
		want(t, resp, 403, policy.BadMethod)
		_, _ = io.WriteString(c, "GET /x HTTP/1.1\r\nHost: a.test\r\n\r\n")
		if resp, body := hear(t, b); resp.StatusCode != 200 || body != "GET a.test /x" {
			t.Fatal(resp.StatusCode, body)
		}
	}
}

func TestConnectionGoesOnAfterUploads(t *testing.T) {
	w := newWorld(t, twoHosts)
	w.host("a.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprint(rw, len(b))
	}))
	c := w.connect(Conn{Name: "a.test", Port: 80})
	b := bufio.NewReader(c)
	for i := range 50 {
		size := i * 997
		_, _ = fmt.Fprintf(c, "POST /x HTTP/1.1\r\nHost: a.test\r\nContent-Length: %d\r\n\r\n%s", size, strings.Repeat("x", size))
		if resp, body := hear(t, b); resp.StatusCode != 200 || body != fmt.Sprint(size) {
			t.Fatal(resp.StatusCode, body)
		}
		_, _ = fmt.Fprintf(c, "POST /x HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", size+1, strings.Repeat("x", size+1))
		if resp, body := hear(t, b); resp.StatusCode != 200 || body != fmt.Sprint(size+1) {
			t.Fatal(resp.StatusCode, body)
		}
	}
}
