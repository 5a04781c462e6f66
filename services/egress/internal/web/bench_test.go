package web

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
)

const benchPolicy = `rules:
  - {name: api, allow: {hosts: [api.example.com], protocol: https, methods: [GET], paths: [/v1/]}, inject: {secret: key, header: Authorization}}
  - {name: plain, allow: {hosts: [api.example.com], protocol: https, methods: [GET], paths: [/plain]}}
`

// BenchmarkServe compares what goes through the engine, with TLS on both sides, with a direct connection to
// the same host: large bodies by bytes, small ones by requests.
func BenchmarkServe(b *testing.B) {
	w := newWorld(b, benchPolicy)
	body := make([]byte, 64<<20)
	for i := range body {
		body[i] = byte(i * 7)
	}
	s := w.host("api.example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		n := 64
		if r.URL.RawQuery == "large" {
			n = len(body)
		}
		rw.Header().Set("Content-Length", fmt.Sprint(n))
		_, _ = rw.Write(body[:n])
	}))
	direct := func(h2 bool) *http.Client {
		tr := &http.Transport{DisableCompression: true, ForceAttemptHTTP2: h2, TLSClientConfig: &tls.Config{RootCAs: w.ca.pool, ServerName: "api.example.com"},
			DialContext: func(context.Context, string, string) (net.Conn, error) {
				return net.Dial("tcp", s.Listener.Addr().String())
			}}
		if !h2 {
			tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
		}
		b.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	for _, h2 := range []bool{false, true} {
		for _, how := range []struct {
			name, path string
			c          *http.Client
		}{{"direct", "/plain", direct(h2)}, {"intercepted", "/plain", w.client("api.example.com", 443, h2)}, {"injected", "/v1/", w.client("api.example.com", 443, h2)}} {
			how.c.Timeout = 0
			for _, size := range []string{"large", "small"} {
				b.Run(fmt.Sprintf("h2=%v/%s/%s", h2, how.name, size), func(b *testing.B) { fetch(b, how.c, "https://api.example.com"+how.path+"?"+size) })
			}
		}
	}
}

func fetch(b *testing.B, c *http.Client, url string) {
	var total atomic.Int64
	for b.Loop() {
		resp, err := c.Get(url)
		if err != nil || resp.StatusCode != 200 {
			b.Fatal(err, resp)
		}
		n, err := io.Copy(io.Discard, resp.Body)
		if err != nil {
			b.Fatal(err)
		}
		resp.Body.Close()
		total.Add(n)
	}
	b.SetBytes(total.Load() / int64(b.N))
}
