package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

const (
	// maxHead bounds the head of a CONNECT.
	maxHead = 16 << 10
	method  = "CONNECT "
	// What is still read of a client that was refused, so that it can read why.
	lingerBytes = 64 << 10
	lingerTime  = time.Second
)

var (
	errMalformed = errors.New("the request can be read in two ways, or in none")
	errNoConnect = errors.New("another request than CONNECT")
	errHosts     = errors.New("CONNECT and Host name two hosts")
)

// connect reads one CONNECT. Any other request is the engine's, which wants it in absolute form.
func (f *flow) connect(ctx context.Context) {
	f.explain = f.forbid
	_ = f.client.SetReadDeadline(time.Now().Add(f.Limits.First))
	head, rest, err := readHead(f.client)
	if errors.Is(err, errNoConnect) {
		f.web(ctx, &replay{Conn: f.client, head: rest}, false, "")
		return
	}
	target := ""
	if err == nil {
		target, err = parseConnect(head)
		f.asked = target
	}
	f.head = rest
	switch {
	case errors.Is(err, errHosts):
		f.deny(refusal{protocol: policy.TLS, decision: f.own(policy.Mismatch), text: err.Error()})
	case errors.Is(err, errMalformed):
		f.deny(refusal{protocol: policy.TLS, decision: f.own(policy.Malformed), status: http.StatusBadRequest, text: err.Error()})
	case err != nil: // it went again, or was too slow
	default:
		f.connectTo(ctx, target)
	}
}

func (f *flow) connectTo(ctx context.Context, target string) {
	var err error
	if f.name, f.port, err = authority.SplitHostPort(target); err != nil {
		f.deny(refusal{protocol: policy.TLS, decision: f.own(nameReason(err)), text: err.Error()})
		return
	}
	f.greet = func() error {
		_ = f.client.SetWriteDeadline(time.Now().Add(f.Limits.First))
		_, err := io.WriteString(f.client, "HTTP/1.1 200 Connection established\r\n\r\n")
		return err
	}
	f.run(ctx)
}

// nameReason: an address where a name belongs is told apart from what is neither.
func nameReason(err error) policy.Reason {
	if e := (*authority.Error)(nil); errors.As(err, &e) && e.Literal {
		return policy.Literal
	}
	return policy.BadName
}

// forbid answers a CONNECT that is refused, and ends the connection.
func (f *flow) forbid(r refusal) {
	status, kind, body := http.StatusForbidden, "text/plain; charset=utf-8", []byte(r.text+"\n")
	if f.Denial != nil {
		req := policy.Request{Name: f.name, Port: f.port, Protocol: r.protocol, Method: http.MethodConnect}
		status, kind, body = f.Denial(req, r.decision, r.text, "")
	}
	if r.verdict == egressv1.Verdict_VERDICT_FAILED {
		status = http.StatusBadGateway
	}
	if r.status != 0 {
		status = r.status
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n",
		status, http.StatusText(status), kind, len(body))
	b.Write(body)
	f.lastWords(b.Bytes())
}

// lastWords are written and left to be read: a client that is still sending would lose them to a reset.
func (f *flow) lastWords(b []byte) {
	_ = f.client.SetDeadline(time.Now().Add(lingerTime))
	if _, err := f.client.Write(b); err != nil {
		return
	}
	if closeWrite(f.client) == nil {
		_, _ = io.CopyN(io.Discard, f.client, lingerBytes)
	}
	_ = f.client.Close()
}

// readHead reads up to the empty line. rest is what came after it or, where it is no CONNECT, all that was
// read.
func readHead(c net.Conn) (head, rest []byte, err error) {
	b := make([]byte, 0, 512)
	for seen := 0; ; seen = max(len(b)-len("\r\n\r"), 0) {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := c.Read(b[len(b):min(cap(b), maxHead)])
		b = b[:len(b)+n]
		if k := min(len(b), len(method)); !bytes.Equal(b[:k], []byte(method)[:k]) {
			if b[0] < 'A' || b[0] > 'Z' {
				return nil, nil, errMalformed
			}
			return nil, b, errNoConnect
		}
		if i := bytes.Index(b[seen:], []byte("\r\n\r\n")); i >= 0 {
			end := seen + i + len("\r\n\r\n")
			return b[:end], b[end:], nil
		}
		switch {
		case bareLine(b, seen), len(b) >= maxHead:
			return nil, nil, errMalformed
		case err != nil:
			return nil, nil, err
		}
	}
}

// bareLine: there is an LF that no CR stands before, at from or later.
func bareLine(b []byte, from int) bool {
	for i := from; i < len(b); i++ {
		if b[i] == '\n' && (i == 0 || b[i-1] != '\r') {
			return true
		}
	}
	return false
}

// parseConnect reads the head of a CONNECT, which ends in an empty line. target is host:port as it was sent.
func parseConnect(head []byte) (target string, err error) {
	text, ok := strings.CutSuffix(string(head), "\r\n\r\n")
	if !ok || len(head) > maxHead {
		return "", errMalformed
	}
	lines := strings.Split(text, "\r\n")
	parts := strings.Split(lines[0], " ")
	if len(parts) != 3 || parts[0]+" " != method || parts[1] == "" || parts[2] != "HTTP/1.1" && parts[2] != "HTTP/1.0" || !visible(parts[1]) {
		return "", errMalformed
	}
	target = parts[1]
	hosts := 0
	for _, l := range lines[1:] {
		name, value, ok := strings.Cut(l, ":")
		if !ok || !token(name) || !fieldValue(value) {
			return target, errMalformed
		}
		value = strings.Trim(value, " \t")
		switch lower(name) {
		case "host":
			if hosts++; hosts > 1 {
				return target, errMalformed
			}
			err = sameHost(target, value)
		case "transfer-encoding", "upgrade":
			return target, errMalformed
		case "content-length":
			if value != "0" {
				return target, errMalformed
			}
		}
	}
	return target, err
}

// sameHost holds a Host field against the target. One without a port is for the target's.
func sameHost(target, host string) error {
	name, port, err := authority.SplitHostPort(target)
	if err != nil {
		return nil // the target is refused for what it is
	}
	if other, at, err := authority.SplitHost(host, port); err != nil || other != name || at != port {
		return errHosts
	}
	return nil
}

// visible: printable ASCII without space.
func visible(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}

// token as HTTP names fields.
func token(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		alnum := c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !alnum && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}

// fieldValue: no control but the tabulator.
func fieldValue(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < ' ' && s[i] != '\t' || s[i] == 0x7f {
			return false
		}
	}
	return true
}
