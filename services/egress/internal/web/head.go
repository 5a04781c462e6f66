package web

import (
	"bytes"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/berth-dev/berth/services/egress/authority"
)

// The most that a head of a request, its fields, and the trailers of a chunked body may have.
const (
	maxHead     = 64 << 10
	maxFields   = 200
	maxTrailers = 8 << 10
	maxChunk    = 12 // hexadecimal digits of a chunk's size
	maxLength   = 15 // decimal digits of Content-Length
)

// framing is what a head says of what follows it.
type framing struct {
	length  int64
	chunked bool
	// upgrade: what follows is not HTTP if the other side agrees.
	upgrade bool
}

var crlf = []byte("\r\n")

func malformed(format string, args ...any) error { return fmt.Errorf(format, args...) }

// checkHead holds the head of an HTTP/1 request, with the empty line that ends it, to the grammar. It
// refuses whatever two implementations are known to read in two ways.
func checkHead(head []byte) (framing, error) {
	lines, err := splitLines(head)
	if err != nil {
		return framing{}, err
	}
	target, old, err := checkRequestLine(string(lines[0]))
	if err != nil {
		return framing{}, err
	}
	if len(lines)-1 > maxFields {
		return framing{}, errors.New("the request has too many fields")
	}
	fields := &seen{old: old, target: target, connect: bytes.HasPrefix(lines[0], []byte("CONNECT "))}
	for _, l := range lines[1:] {
		name, value, err := checkField(l)
		if err != nil {
			return framing{}, err
		}
		if err := fields.take(name, value); err != nil {
			return framing{}, err
		}
	}
	return fields.framing()
}

// splitLines parts a head at CR LF; no CR or LF may stand elsewhere.
func splitLines(head []byte) ([][]byte, error) {
	body, ok := bytes.CutSuffix(head, []byte("\r\n\r\n"))
	if !ok || len(body) == 0 {
		return nil, errors.New("the request has no request line")
	}
	lines := bytes.Split(body, crlf)
	for _, l := range lines {
		if bytes.IndexByte(l, '\n') >= 0 || bytes.IndexByte(l, '\r') >= 0 {
			return nil, errors.New("a line of the request ends with a bare CR or LF")
		}
	}
	return lines, nil
}

// checkRequestLine returns the target, and whether it is one of HTTP/1.0.
func checkRequestLine(line string) (target string, old bool, err error) {
	method, rest, ok := strings.Cut(line, " ")
	target, version, ok2 := strings.Cut(rest, " ")
	if !ok || !ok2 || !token(method) || len(method) > 32 {
		return "", false, errors.New("the request line is not method, target and version")
	}
	if version != "HTTP/1.1" && version != "HTTP/1.0" {
		return "", false, errors.New("the request is of a version of HTTP that is not spoken here")
	}
	if method == "CONNECT" {
		target = "http://" + target // net/http reads it so
	}
	return target, version == "HTTP/1.0", checkTarget(target)
}

// checkTarget refuses what stands in no request target, of HTTP/2 as well.
func checkTarget(target string) error {
	if target == "" {
		return errors.New("the request has no target")
	}
	for i := 0; i < len(target); i++ {
		if c := target[i]; c <= ' ' || c >= 0x7f || c == '#' {
			return errors.New("the request target holds what must be percent-encoded")
		}
	}
	if _, err := url.ParseRequestURI(target); err != nil {
		return errors.New("the request target is no URL")
	}
	return nil
}

// checkField parts a field line into its name, in lower case, and its value.
func checkField(line []byte) (name, value string, err error) {
	if len(line) > 0 && (line[0] == ' ' || line[0] == '\t') {
		return "", "", errors.New("a field of the request is folded over lines")
	}
	n, v, ok := strings.Cut(string(line), ":")
	if !ok {
		return "", "", errors.New("a line of the request is no field")
	}
	if !token(n) {
		return "", "", errors.New("a field of the request has a name that is none, or space before its colon")
	}
	for i := 0; i < len(v); i++ {
		if c := v[i]; c < ' ' && c != '\t' || c == 0x7f {
			return "", "", errors.New("a field of the request holds a control character")
		}
	}
	return strings.ToLower(n), strings.Trim(v, " \t"), nil
}

// seen is what the fields of a head have said until now.
type seen struct {
	old, connect    bool
	target, host    string
	hosts           int
	length, coding  []string
	expect, upgrade []string
}

func (s *seen) take(name, value string) error {
	switch name {
	case "host":
		s.hosts++
		s.host = value
		if !httpguts.ValidHostHeader(value) || value == "" {
			return errors.New("the Host field names no host")
		}
	case "content-length":
		s.length = append(s.length, value)
	case "transfer-encoding":
		s.coding = append(s.coding, value)
	case "expect":
		s.expect = append(s.expect, value)
	case "upgrade":
		s.upgrade = append(s.upgrade, value)
	case "content_length", "transfer_encoding", "http2-settings":
		return malformed("the request has a field %s", name)
	case "trailer":
		for _, t := range strings.Split(value, ",") {
			if err := checkTrailer(strings.Trim(t, " \t")); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *seen) framing() (framing, error) {
	switch {
	case s.hosts == 0:
		return framing{}, errors.New("the request has no Host field")
	case s.hosts > 1:
		return framing{}, errors.New("the request has more than one Host field")
	case len(s.length) > 1:
		return framing{}, errors.New("the request has more than one Content-Length field")
	case len(s.coding) > 1:
		return framing{}, errors.New("the request has more than one Transfer-Encoding field")
	case len(s.length) > 0 && len(s.coding) > 0:
		return framing{}, errors.New("the request has both Content-Length and Transfer-Encoding")
	case len(s.coding) > 0 && s.old:
		return framing{}, errors.New("a request of HTTP/1.0 has Transfer-Encoding")
	case len(s.coding) > 0 && !strings.EqualFold(s.coding[0], "chunked"):
		return framing{}, errors.New("the request has a Transfer-Encoding other than chunked")
	case len(s.expect) > 1 || len(s.expect) == 1 && !strings.EqualFold(s.expect[0], "100-continue"):
		return framing{}, errors.New("the request expects something else than 100-continue")
	case len(s.upgrade) > 1:
		return framing{}, errors.New("the request has more than one Upgrade field")
	}
	if !s.connect && s.target != "*" && !oneHost(s.target, s.host) {
		return framing{}, errors.New("the request target and the Host field name two hosts")
	}
	f := framing{chunked: len(s.coding) > 0, upgrade: len(s.upgrade) > 0 || s.connect}
	if len(s.length) > 0 {
		var err error
		if f.length, err = number(s.length[0]); err != nil {
			return framing{}, err
		}
	}
	if f.upgrade && (f.chunked || f.length > 0) {
		return framing{}, errors.New("a request to upgrade has a body")
	}
	return f, nil
}

// oneHost reports whether a target in absolute form names the host of the Host field.
func oneHost(target, host string) bool {
	t, err := parseTarget(target)
	if err != nil || t.host == "" || t.host == host {
		return err == nil
	}
	port := uint16(80)
	if t.scheme == "https" {
		port = 443
	}
	a, ap, err := authority.SplitHost(t.host, port)
	b, bp, err2 := authority.SplitHost(host, port)
	return err == nil && err2 == nil && a == b && ap == bp
}

// number reads a Content-Length.
func number(s string) (n int64, err error) {
	if s == "" || len(s) > maxLength {
		return 0, errors.New("the Content-Length is no length")
	}
	for i := 0; i < len(s); i++ {
		if s[i] < '0' || s[i] > '9' {
			return 0, errors.New("the Content-Length is no length")
		}
		n = n*10 + int64(s[i]-'0')
	}
	return n, nil
}

// chunkSize reads the line before a chunk, without CR LF. Extensions are refused: nobody needs them, and
// servers disagree on where they end.
func chunkSize(line []byte) (n int64, err error) {
	if len(line) == 0 || len(line) > maxChunk {
		return 0, errors.New("the size of a chunk is none, or has an extension")
	}
	for _, c := range line {
		d := strings.IndexByte("0123456789abcdef", c|0x20)
		if d < 0 || c < '0' {
			return 0, errors.New("the size of a chunk is none, or has an extension")
		}
		n = n<<4 + int64(d)
	}
	return n, nil
}

// forbiddenTrailers would say something of the request that was judged without them.
var forbiddenTrailers = map[string]bool{
	"transfer-encoding": true, "content-length": true, "content-encoding": true, "content-type": true,
	"content-range": true, "host": true, "trailer": true, "te": true, "connection": true, "keep-alive": true,
	"upgrade": true, "expect": true, "authorization": true, "proxy-authorization": true, "cookie": true,
	"proxy-connection": true, "max-forwards": true, "cache-control": true, "range": true, "if-match": true,
}

func checkTrailer(name string) error {
	if name = strings.ToLower(name); !token(name) || forbiddenTrailers[fieldName(name)] || credentialHeaders[fieldName(name)] || reroutes(name) {
		return errors.New("the request has a trailer that may be none")
	}
	return nil
}

// checkTrailers holds what comes after the last chunk, with the empty line, to the grammar.
func checkTrailers(section []byte) error {
	if bytes.Equal(section, crlf) {
		return nil
	}
	lines, err := splitLines(section)
	if err != nil {
		return err
	}
	for _, l := range lines {
		name, _, err := checkField(l)
		if err == nil {
			err = checkTrailer(name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// token reports whether s is one of RFC 9110.
func token(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0:
		default:
			return false
		}
	}
	return s != ""
}
