package policy

import (
	"errors"
	"fmt"
	"strings"

	"github.com/berth-dev/berth/services/egress/authority"
)

// Probe is a request that somebody asks about. Bad is why it could not even be judged: then Request has what
// is known of it.
type Probe struct {
	Text    string
	Request Request
	Bad     Reason
}

// schemes of URLs, and the ports that they imply.
var schemes = map[string]struct {
	protocol Protocol
	port     uint16
}{
	"https": {HTTPS, 443}, "wss": {HTTPS, 443}, "http": {HTTP, 80}, "ws": {HTTP, 80}, "tls": {TLS, 443}, "tcp": {TCP, 0},
}

// ParseProbe reads "GET https://host/path", where GET may be left out, or tls://host, tcp://host:port.
// What a sandbox could send and no policy could allow, such as an address, is read and has Bad.
func ParseProbe(text string) (Probe, error) {
	method, target := "", strings.TrimSpace(text)
	if m, rest, two := strings.Cut(target, " "); two {
		method, target = m, strings.TrimSpace(rest)
	}
	scheme, rest, ok := strings.Cut(target, "://")
	s, known := schemes[strings.ToLower(scheme)]
	if !ok || !known {
		return Probe{}, fmt.Errorf("%s is no request: it is written as in \"GET https://example.com/path\", tls://example.com or tcp://example.com:5432", short(text))
	}
	host, path := rest, ""
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		host, path = rest[:i], rest[i:]
	}
	p := Probe{Text: text, Request: Request{Port: s.port, Protocol: s.protocol}}
	name, port, err := authority.SplitHost(host, s.port)
	if err != nil {
		p.Bad = BadName
		if e := (*authority.Error)(nil); errors.As(err, &e) && e.Literal {
			p.Bad = Literal
		}
		return p, nil
	}
	p.Request.Name, p.Request.Port = name, port
	if port == 0 {
		return Probe{}, fmt.Errorf("%s names no port", short(text))
	}
	return p, p.readWeb(method, path)
}

func (p *Probe) readWeb(method, path string) error {
	if p.Request.opaque() {
		if method != "" || path != "" && path != "/" {
			return fmt.Errorf("%s has a method or a path, which %s has not", short(p.Text), p.Request.Protocol)
		}
		return nil
	}
	if method == "" {
		method = "GET"
	}
	path, _, _ = strings.Cut(path, "#")
	path, _, _ = strings.Cut(path, "?")
	if path == "" {
		path = "/"
	}
	p.Request.Method = method
	var err error
	if p.Request.Path, err = CanonicalPath(path); err != nil {
		p.Request.Path, p.Bad = path, Malformed
	}
	return nil
}

// Probe decides on a probe.
func (p *Policy) Probe(q Probe) Decision {
	if d := p.Judge(q.Request); q.Bad == "" || d.Reason == NoPolicy {
		return d
	}
	return p.none(q.Bad)
}

// String is the probe as a person reads it.
func (p Probe) String() string {
	if p.Request.Name == "" {
		return p.Text
	}
	return p.Request.String()
}

// Sentence is what a person reads of the decision on a probe.
func (p Probe) Sentence(d Decision) string { return sentence(p.String(), d) }
