package proxy

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/berth-dev/berth/services/egress/authority"
)

// FuzzConnect: what is accepted has one meaning, which net/http shares, and is what is judged and dialled.
func FuzzConnect(f *testing.F) {
	f.Add([]byte(connectTo("open.example.com:443")))
	f.Add([]byte("CONNECT a.example.com:1 HTTP/1.0\r\nA: b\r\n\r\nrest"))
	f.Add([]byte("CONNECT a.example.com:1 HTTP/1.1\r\nHost: b\r\n c\r\n\r\n"))
	f.Add([]byte("CONNECT [::1]:443 HTTP/1.1\r\nContent-Length: 0\r\n\r\n"))
	f.Add([]byte("GET http://a.example.com/ HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		slow, _, slowly := readHead(&canned{r: iotest.OneByteReader(bytes.NewReader(raw))})
		head, rest, err := readHead(&canned{r: bytes.NewReader(raw)})
		if err == nil && (slowly != nil || !bytes.Equal(slow, head)) || slowly == nil && err != nil {
			t.Fatalf("read at once %q, %v; byte by byte %q, %v", head, err, slow, slowly)
		}
		if err != nil {
			return
		}
		if !bytes.Equal(append(head[:len(head):len(head)], rest...), raw[:len(head)+len(rest)]) || len(head) > maxHead {
			t.Fatalf("read %q and %q of %q", head, rest, raw)
		}
		target, err := parseConnect(head)
		if err != nil {
			return
		}
		req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
		if err != nil {
			return // stricter than this
		}
		name, port, err := authority.SplitHostPort(target)
		if err != nil {
			return
		}
		other, at, err := authority.SplitHostPort(req.RequestURI)
		if err != nil || other != name || at != port || req.Method != http.MethodConnect {
			t.Errorf("%q is %s:%d here and %q there", head, name, port, req.RequestURI)
		}
	})
}

// FuzzSOCKS: a request is read to its last byte and no further, and names one destination.
func FuzzSOCKS(f *testing.F) {
	f.Add([]byte{5, 1, 0, 1, 10, 0, 0, 1, 1, 0xbb})
	f.Add([]byte("\x05\x01\x00\x03\x10open.example.com\x01\xbb"))
	f.Add(append([]byte{5, 3, 0, 4}, make([]byte, 18)...))
	f.Add([]byte{5, 1, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, _ = readGreeting(bytes.NewReader(raw))
		r := bytes.NewReader(raw)
		ask, err := readSOCKS(r)
		if err != nil {
			return
		}
		took := len(raw) - r.Len()
		want := map[byte]int{typeIPv4: 10, typeIPv6: 22, typeName: 7 + len(ask.name)}[ask.kind]
		if took != want || ask.address.IsValid() == (ask.name != "") {
			t.Errorf("took %d bytes of %v for %+v", took, raw, ask)
		}
		if n, err := authority.Parse(ask.name); err == nil && strings.ContainsAny(string(n), "\x00\r\n@[]%:/") {
			t.Errorf("%q became %q", ask.name, n)
		}
		_ = replyOf(refusal{}, ask)
	})
}

// canned is a connection whose other end has said all it will.
type canned struct {
	net.Conn
	r io.Reader
}

func (c *canned) Read(p []byte) (int, error) { return c.r.Read(p) }
