package web

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/berth-dev/berth/services/egress/policy"
)

// smuggled are requests that two servers read in two ways, each with a second request hidden in it.
var smuggled = map[string]string{
	"two lengths":                 "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
	"two equal lengths":           "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
	"list of lengths":             "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5, 5\r\n\r\nhello",
	"signed length":               "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: +5\r\n\r\nhello",
	"negative length":             "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: -1\r\n\r\nhello",
	"hexadecimal length":          "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0x5\r\n\r\nhello",
	"huge length":                 "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 18446744073709551617\r\n\r\nhello",
	"empty length":                "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length:\r\n\r\nhello",
	"length and chunked":          "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"chunked and length":          "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
	"two codings":                 "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
	"list of codings":             "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
	"unknown coding":              "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
	"quoted coding":               "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n",
	"vertical tab before coding":  "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
	"coding with space":           "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
	"length with tab":             "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length\t: 5\r\n\r\nhello",
	"underscore":                  "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer_Encoding: chunked\r\n\r\n0\r\n\r\n",
	"old with coding":             "POST / HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"bare LF in the request line": "GET / HTTP/1.1\nHost: a.test\r\n\r\n",
	"bare LF after a field":       "GET / HTTP/1.1\r\nHost: a.test\nX: y\r\n\r\n",
	"bare LF at the end":          "GET / HTTP/1.1\r\nHost: a.test\r\n\nGET /b HTTP/1.1\r\n\r\n",
	"bare CR":                     "GET / HTTP/1.1\r\nHost: a.test\r\nX: a\rb\r\n\r\n",
	"folded":                      "GET / HTTP/1.1\r\nHost: a.test\r\nX: a\r\n b\r\n\r\n",
	"folded first":                "GET / HTTP/1.1\r\n Host: a.test\r\nHost: a.test\r\n\r\n",
	"NUL in a value":              "GET / HTTP/1.1\r\nHost: a.test\r\nX: a\x00b\r\n\r\n",
	"escape in a value":           "GET / HTTP/1.1\r\nHost: a.test\r\nX: a\x1bb\r\n\r\n",
	"NUL in a name":               "GET / HTTP/1.1\r\nHost: a.test\r\nX\x00: a\r\n\r\n",
	"no colon":                    "GET / HTTP/1.1\r\nHost: a.test\r\nX\r\n\r\n",
	"no name":                     "GET / HTTP/1.1\r\nHost: a.test\r\n: x\r\n\r\n",
	"no host":                     "GET / HTTP/1.1\r\nX: a.test\r\n\r\n",
	"two hosts":                   "GET / HTTP/1.1\r\nHost: a.test\r\nHost: a.test\r\n\r\n",
	"empty host":                  "GET / HTTP/1.1\r\nHost:\r\n\r\n",
	"absolute form of another":    "GET http://b.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"absolute form with userinfo": "GET http://a.test@b.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"no version":                  "GET /\r\nHost: a.test\r\n\r\n",
	"version 2":                   "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	"version 1.2":                 "GET / HTTP/1.2\r\nHost: a.test\r\n\r\n",
	"small version":               "GET / http/1.1\r\nHost: a.test\r\n\r\n",
	"two spaces":                  "GET  / HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"space in the target":         "GET /a b HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"tab in the request line":     "GET\t/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"fragment":                    "GET /a#b HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"broken escape":               "GET /%zz HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"empty line first":            "\r\nGET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"h2c":                         "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
	"expects else":                "GET / HTTP/1.1\r\nHost: a.test\r\nExpect: 200-ok\r\n\r\n",
	"upgrade with a body":         "POST / HTTP/1.1\r\nHost: a.test\r\nUpgrade: websocket\r\nContent-Length: 5\r\n\r\nhello",
	"announced length":            "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n0\r\n\r\n",
}

// smuggledBodies follow a head with Transfer-Encoding: chunked.
var smuggledBodies = map[string]string{
	"extension":            "5;a=b\r\nhello\r\n0\r\n\r\n",
	"bare LF extension":    "5;\nxx\r\nhello\r\n0\r\n\r\n",
	"bare LF after size":   "5\nhello\r\n0\r\n\r\n",
	"prefix":               "0x5\r\nhello\r\n0\r\n\r\n",
	"sign":                 "+5\r\nhello\r\n0\r\n\r\n",
	"space":                "5 \r\nhello\r\n0\r\n\r\n",
	"huge":                 "10000000000000005\r\nhello\r\n0\r\n\r\n",
	"no size":              "\r\nhello\r\n0\r\n\r\n",
	"longer than it says":  "4\r\nhello\r\n0\r\n\r\n",
	"bare LF after data":   "5\r\nhello\n0\r\n\r\n",
	"bare LF at the end":   "5\r\nhello\r\n0\r\n\n",
	"trailer with length":  "0\r\nContent-Length: 5\r\n\r\n",
	"trailer with host":    "0\r\nHost: b.test\r\n\r\n",
	"trailer with login":   "0\r\nAuthorization: x\r\n\r\n",
	"folded trailer":       "0\r\nX: a\r\n b\r\n\r\n",
	"bare LF in a trailer": "0\r\nX: a\nY: b\r\n\r\n",
	"request as a trailer": "0\r\nGET /admin HTTP/1.1\r\n\r\n",
}

func TestSmuggledHeadsAreRefusedAndNothingIsDialled(t *testing.T) {
	w := newWorld(t, "rules: [{name: a, allow: {hosts: [a.test], protocol: http}}]")
	for name, text := range smuggled {
		t.Run(name, func(t *testing.T) {
			c := w.connect(Conn{Name: "a.test", Port: 80})
			b := bufio.NewReader(c)
			_, _ = io.WriteString(c, text)
			resp, _ := hear(t, b)
			want(t, resp, 400, policy.Malformed)
			if _, err := b.ReadByte(); err == nil {
				t.Fatal("the connection went on after it")
			}
			if r := w.box.last(t); r.Reason != string(policy.Malformed) {
				t.Fatalf("recorded as %v", r)
			}
		})
	}
	if n := w.dialCount(); n != 0 {
		t.Fatalf("%d dials", n)
	}
}

func TestSmuggledBodiesNeverComeOutWhole(t *testing.T) {
	w := newWorld(t, "rules: [{name: a, allow: {hosts: [a.test], protocol: http, methods: [POST]}}]")
	w.host("a.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err == nil {
			t.Error("a malformed body came through")
		}
	}))
	for name, text := range smuggledBodies {
		t.Run(name, func(t *testing.T) {
			c := w.connect(Conn{Name: "a.test", Port: 80})
			resp, _ := say(t, c, "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n"+text)
			want(t, resp, 400, policy.Malformed)
		})
	}
}

func TestRefusedHeadWaitsForTheAnswersBeforeIt(t *testing.T) {
	w := newWorld(t, "rules: [{name: a, allow: {hosts: [a.test], protocol: http}}]")
	w.host("a.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(rw, r.URL.Path) }))
	c := w.connect(Conn{Name: "a.test", Port: 80})
	b := bufio.NewReader(c)
	_, _ = io.WriteString(c, "GET /1 HTTP/1.1\r\nHost: a.test\r\n\r\nGET /2 HTTP/1.1\r\nHost: a.test\r\n\r\nGET /3 HTTP/1.1\nHost: a.test\r\n\r\n")
	for _, path := range []string{"/1", "/2"} {
		if resp, body := hear(t, b); resp.StatusCode != 200 || body != path {
			t.Fatalf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	resp, _ := hear(t, b)
	want(t, resp, 400, policy.Malformed)
}

// piece is a connection that gives bytes and takes none.
type piece struct {
	net.Conn
	io.Reader
}

func (p piece) Read(b []byte) (int, error) { return p.Reader.Read(b) }

// FuzzStrict: what comes out are bytes that came in, whatever the pieces, up to the substitute, and net/http
// reads from it exactly the requests that were checked.
func FuzzStrict(f *testing.F) {
	for _, s := range smuggled {
		f.Add([]byte(s))
	}
	for _, s := range smuggledBodies {
		f.Add([]byte("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n" + s))
	}
	f.Add([]byte("GET /1 HTTP/1.1\r\nHost: a.test\r\n\r\nPOST /2 HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\nabGET /3 HTTP/1.0\r\nhost:a.test\r\n\r\n"))
	f.Add([]byte("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\nGET http://a.test/ HTTP/1.1\r\nHost: A.test:80\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		s := newStrict(piece{Reader: bytes.NewReader(in)})
		out, _ := io.ReadAll(s)
		slow := newStrict(piece{Reader: iotest.OneByteReader(bytes.NewReader(in))})
		if again, _ := io.ReadAll(slow); !bytes.Equal(again, out) || slow.bad != s.bad {
			t.Fatalf("pieces matter: %q and %q", out, again)
		}
		clean := out
		if s.bad > 0 {
			clean = bytes.TrimSuffix(out, []byte(substitute))
		}
		if !bytes.HasPrefix(in, clean) {
			t.Fatalf("%q is not how %q begins", clean, in)
		}
		if strings.Contains(string(clean), "pgrade") || bytes.HasPrefix(clean, []byte("CONNECT")) || bytes.Contains(clean, []byte("\nCONNECT")) || strings.Contains(strings.ToLower(string(clean)), "upgrade") {
			return // bytes of any kind follow
		}
		b, n := bufio.NewReader(bytes.NewReader(clean)), 0
		for {
			if _, err := b.Peek(1); err != nil {
				break
			}
			r, err := http.ReadRequest(b)
			if err != nil {
				if n == s.count() {
					break // half a head, or the end
				}
				t.Fatalf("net/http refuses what was let through: %v: %q", err, clean)
			}
			n++
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				break
			}
		}
		heads := s.count()
		if s.bad > 0 {
			heads--
		}
		if n != heads {
			t.Fatalf("net/http reads %d requests, %d were checked: %q", n, heads, clean)
		}
	})
}
