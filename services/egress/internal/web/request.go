package web

import (
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// target is what a request asks for, parted.
type target struct {
	scheme, host string // of the absolute form; empty otherwise
	path, query  string
	hasQuery     bool
}

func parseTarget(s string) (t target, err error) {
	if !strings.HasPrefix(s, "/") {
		scheme, rest, ok := strings.Cut(s, "://")
		t.scheme = strings.ToLower(scheme)
		if !ok || t.scheme != "http" && t.scheme != "https" {
			return t, errors.New("the request target is neither a path nor a URL")
		}
		end := strings.IndexAny(rest, "/?")
		if end < 0 {
			end = len(rest)
		}
		t.host, s = rest[:end], rest[end:]
		if t.host == "" {
			return t, errors.New("the request target names no host")
		}
		if !strings.HasPrefix(s, "/") {
			s = "/" + s
		}
	}
	t.path, t.query, t.hasQuery = strings.Cut(s, "?")
	return t, nil
}

func (l *link) standardPort(scheme string) uint16 {
	if scheme == "https" || scheme == "" && l.Secure {
		return 443
	}
	return 80
}

// read finds out what is asked for, in the one way in which it can be read.
func (x *exchange) read() *session.Refusal {
	x.req = policy.Request{Name: x.Name, Port: x.Port, Protocol: x.protocol()}
	if x.strict != nil {
		x.served++
		if x.strict.count() < x.served { // what was read is no head that was checked
			panic(http.ErrAbortHandler)
		}
		if err := x.strict.refused(x.served); err != nil {
			x.record.Authority, x.record.Method = "", ""
			return refuse(policy.Malformed, sentence(err))
		}
	}
	if x.r.Method == http.MethodConnect {
		x.raw = true
		return refuse(policy.Upgrade, "CONNECT is not spoken inside of a connection to a host.")
	}
	if err := checkTarget(x.r.RequestURI); err != nil {
		return refuse(policy.Malformed, sentence(err))
	}
	if !token(x.r.Method) || len(x.r.Method) > 32 {
		return refuse(policy.Malformed, "The method is none.")
	}
	var err error
	if x.target, err = parseTarget(x.r.RequestURI); err != nil {
		return refuse(policy.Malformed, sentence(err))
	}
	if no := x.readHost(); no != nil {
		return no
	}
	x.req.Method = x.r.Method
	if x.req.Path, err = policy.CanonicalPath(x.target.path); err != nil {
		return refuse(policy.Malformed, sentence(err))
	}
	return x.readUpgrade()
}

// readHost compares the one host that the request names with what the connection is for.
func (x *exchange) readHost() *session.Refusal {
	if others := x.r.Header["Host"]; len(others) > 1 || len(others) == 1 && others[0] != x.r.Host {
		return refuse(policy.Malformed, "The request names two hosts.")
	}
	if len(x.r.Header["Content-Length"]) > 1 {
		return refuse(policy.Malformed, "The request has more than one Content-Length field.")
	}
	name, port, err := authority.SplitHost(x.r.Host, x.standardPort(x.target.scheme))
	if err != nil {
		x.req.Name = "" // what was asked for stands in the record
		var bad *authority.Error
		if errors.As(err, &bad) && bad.Literal {
			return refuse(policy.Literal, "")
		}
		return refuse(policy.BadName, "")
	}
	x.req.Name, x.req.Port = name, port
	if x.target.host != "" {
		n, p, err := authority.SplitHost(x.target.host, x.standardPort(x.target.scheme))
		if err != nil || n != name || p != port {
			return refuse(policy.Mismatch, "")
		}
	}
	switch {
	case x.Name == "" && (x.Secure || x.target.scheme != "http"):
		return refuse(policy.Malformed, "A request to a proxy names its URL, of http; for https there is CONNECT.")
	case x.Name != "" && x.target.scheme != "" && x.target.scheme != string(x.protocol()):
		return refuse(policy.Mismatch, "")
	case x.Name != "" && (name != x.Name || port != x.Port):
		return refuse(policy.Mismatch, "")
	}
	return nil
}

// readUpgrade lets WebSocket through and nothing else.
func (x *exchange) readUpgrade() *session.Refusal {
	up := x.r.Header["Upgrade"]
	if len(up) == 0 && x.r.Header[":protocol"] == nil {
		return nil
	}
	x.raw = true
	h := x.r.Header
	key, err := base64.StdEncoding.DecodeString(h.Get("Sec-Websocket-Key"))
	switch {
	case x.strict == nil || len(up) != 1 || !strings.EqualFold(up[0], "websocket") || x.r.Method != http.MethodGet,
		!x.r.ProtoAtLeast(1, 1), !httpguts.HeaderValuesContainsToken(h["Connection"], "upgrade"):
		return refuse(policy.Upgrade, "")
	case len(h["Sec-Websocket-Key"]) != 1 || err != nil || len(key) != 16 || h.Get("Sec-Websocket-Version") != "13":
		return refuse(policy.Upgrade, "The request to open a WebSocket is malformed.")
	}
	x.socket = true
	return nil
}

// sentence is an error as a person reads it.
func sentence(err error) string {
	s := err.Error()
	return strings.ToUpper(s[:1]) + s[1:] + "."
}

// hopByHop are fields for one connection only.
var hopByHop = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade", "Http2-Settings", "Host", "Content-Length", ":protocol",
}

// endToEnd is a copy of h without the fields of one connection.
func endToEnd(h http.Header) http.Header {
	out := h.Clone()
	if out == nil {
		out = http.Header{}
	}
	for _, v := range h["Connection"] {
		for _, name := range strings.Split(v, ",") {
			out.Del(strings.Trim(name, " \t"))
		}
	}
	for _, name := range hopByHop {
		delete(out, name)
	}
	return out
}

// rerouting are fields by which some servers take a request for another than was judged: of another host, path
// or method, or from elsewhere. All that begin with X-Forwarded are too.
var rerouting = map[string]bool{
	"forwarded": true, "x-host": true, "x-original-host": true, "x-http-host-override": true, "x-original-url": true,
	"x-original-uri": true, "x-original-method": true, "x-rewrite-url": true, "x-http-path-override": true,
	"x-http-method-override": true, "x-http-method": true, "x-method-override": true, "x-real-ip": true,
}

// reroutes reports whether a field is one of them, in any spelling that a server may take for it.
func reroutes(name string) bool {
	name = fieldName(name)
	return rerouting[name] || strings.HasPrefix(name, "x-forwarded")
}

// fieldName is a name as servers compare it that know no difference between _ and -.
func fieldName(s string) string { return strings.ReplaceAll(strings.ToLower(s), "_", "-") }

// forwarded are the fields that go on.
func (x *exchange) forwarded() http.Header {
	h := endToEnd(x.r.Header)
	for name := range h {
		if reroutes(name) {
			delete(h, name)
		}
	}
	if httpguts.HeaderValuesContainsToken(x.r.Header["Te"], "trailers") {
		h.Set("Te", "trailers")
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = []string{""} // net/http would put its own in
	}
	if x.socket {
		h.Set("Connection", "Upgrade")
		h.Set("Upgrade", "websocket")
	}
	return h
}

// url is what is asked upstream: the path is the very text that was judged.
func (x *exchange) url() (*url.URL, *session.Refusal) {
	u := &url.URL{Scheme: string(x.req.Protocol), Host: string(x.req.Name) + ":" + strconv.Itoa(int(x.req.Port)),
		RawQuery: x.target.query, ForceQuery: x.target.hasQuery && x.target.query == ""}
	plain, err := url.PathUnescape(x.req.Path)
	if err != nil {
		return nil, refuse(policy.Malformed, "")
	}
	u.Path, u.RawPath = plain, x.req.Path
	if u.EscapedPath() != x.req.Path {
		u.Path, u.RawPath, u.Opaque = "", "", x.req.Path
	}
	want := x.req.Path
	if x.target.hasQuery {
		want += "?" + x.target.query
	}
	if u.RequestURI() != want {
		return nil, refuse(policy.Malformed, "The path cannot be sent as it was judged.")
	}
	return u, nil
}

// hostField is the canonical Host.
func (x *exchange) hostField() string {
	if x.req.Port == x.standardPort("") {
		return string(x.req.Name)
	}
	return string(x.req.Name) + ":" + strconv.Itoa(int(x.req.Port))
}
