package web

import (
	"bytes"
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// Placeholders begin so unless a rule names another.
const placeholderStart = "BERTH_SECRET_"

// defaults asks the session's policy.
func (c *Config) defaults() {
	if c.Judge == nil {
		c.Judge = func(s session.Session, r policy.Request) policy.Decision { return s.Policy().Judge(r) }
	}
	if c.Injections == nil {
		c.Injections = func(s session.Session) []policy.Injection {
			var all []policy.Injection
			for _, l := range s.Policy().Layers() {
				for i := range l.Document.Rules {
					all = append(all, l.Document.Rules[i].Inject...)
				}
			}
			return all
		}
	}
}

// credentialHeaders and credentialParameters carry what lets somebody in.
var credentialHeaders = map[string]bool{
	"authorization": true, "proxy-authorization": true, "cookie": true, "cookie2": true, "x-api-key": true, "api-key": true,
	"apikey": true, "x-goog-api-key": true, "x-auth-token": true, "x-access-token": true, "private-token": true,
	"job-token": true, "deploy-token": true, "x-amz-security-token": true, "x-amz-authorization": true,
	"x-ms-authorization-auxiliary": true, "x-vault-token": true, "x-github-token": true, "x-jwt-assertion": true,
	"ocp-apim-subscription-key": true, "x-subscription-token": true, "x-session-token": true, "x-auth-key": true,
	"x-figma-token": true, "x-shopify-access-token": true, "x-consul-token": true, "dd-api-key": true,
	"dd-application-key": true, "token": true, "authentication": true, "x-authorization": true, "x-auth": true,
	"x-token": true, "x-secret-key": true, "x-api-token": true, "x-gitlab-token": true, "x-nomad-token": true,
}

var credentialParameters = map[string]bool{
	"key": true, "api_key": true, "apikey": true, "api-key": true, "access_token": true, "token": true, "auth": true,
	"auth_token": true, "authorization": true, "oauth_token": true, "private_token": true, "id_token": true,
	"x-amz-signature": true, "x-amz-credential": true, "x-amz-security-token": true, "awsaccesskeyid": true,
	"signature": true, "sig": true, "x-goog-signature": true, "x-goog-credential": true, "googleaccessid": true,
	"client_secret": true, "password": true, "subscription-key": true, "jwt": true,
}

// place is where a secret goes: between two texts of the policy, which the sandbox does not choose.
type place struct {
	policy.Injection
	before, after string
	basic         bool // they are what Basic carries
	// dropped is what the sandbox had there, without the placeholder of this secret.
	dropped []string
}

// secretMark is where a format has the secret.
const secretMark = "{secret}"

// newPlace is that of an injection. In a format "Basic user:{secret}" the gate writes the base64.
func newPlace(in policy.Injection) place {
	p := place{Injection: in}
	format := in.Format
	if user, ok := strings.CutPrefix(format, basicScheme); ok && in.Header != "" && strings.Contains(user, ":") {
		p.basic, format = true, user
	}
	p.before, p.after, _ = strings.Cut(format, secretMark)
	return p
}

func (p *place) fill(secret string) string {
	v := p.before + secret + p.after
	if p.basic {
		v = basicScheme + base64.StdEncoding.EncodeToString([]byte(v))
	}
	return v
}

// examine finds the places of secrets, takes away what the sandbox put there, and refuses placeholders and
// credentials anywhere else.
func (x *exchange) examine() *session.Refusal {
	if len(x.decision.Inject) > 0 && !x.Secure {
		return refuse(policy.SecretAway, "A secret is put in only where the host's certificate was verified.")
	}
	var params []string
	if x.target.hasQuery {
		params = strings.Split(x.target.query, "&")
	}
	for _, in := range x.decision.Inject {
		p, ok := newPlace(in), true
		if in.Header != "" {
			ok = p.takeHeader(x.header)
		} else {
			params, ok = p.takeQuery(params)
		}
		if !ok {
			return refuse(policy.Placeholder, "Beside a placeholder may stand what the rule's format has, and nothing else.")
		}
		x.places = append(x.places, p)
	}
	if x.placeholderIn(params) {
		return refuse(policy.Placeholder, "")
	}
	if x.decision.RefuseCredentials && x.credentialsIn(params) {
		return refuse(policy.Credentials, "")
	}
	x.target.query = strings.Join(params, "&")
	return nil
}

// takeHeader takes the sandbox's own value of the header away. false: it holds the placeholder otherwise than
// the format has the secret.
func (p *place) takeHeader(h http.Header) bool {
	mark, vs := p.Placeholder, h.Values(p.Header)
	h.Del(p.Header)
	for _, v := range vs {
		b, is := basic(v)
		switch user, wrapped := strings.CutSuffix(b, ":"+mark); {
		case is && wrapped && p.takes(user):
			p.before, p.after, p.basic = user+":", "", true
		case indexMark(b, mark) >= 0, indexMark(v, mark) >= 0 && !p.alike(v):
			return false
		}
		p.dropped = append(p.dropped, without(v, mark), without(b, mark))
	}
	return true
}

// takes reports whether the secret may go in as the password of a user that the sandbox names: where the
// format is Basic and names none.
func (p *place) takes(user string) bool {
	format, is := strings.CutPrefix(p.Format, basicScheme)
	if !is {
		return false
	}
	if own, _, named := strings.Cut(format, ":"); named {
		return user+":"+secretMark == format && own == user
	}
	return format == secretMark && len(user) <= maxUser && !strings.Contains(user, ":") && printable([]byte(user))
}

// alike reports whether a value is the format with the placeholder in it. A scheme has no case.
func (p *place) alike(v string) bool {
	before, after, _ := strings.Cut(p.Format, secretMark)
	i := indexMark(v, p.Placeholder)
	return i >= 0 && strings.EqualFold(v[:i], before) && v[i+len(p.Placeholder):] == after
}

// takeQuery does the same with the parameter, and leaves it without a value.
func (p *place) takeQuery(params []string) ([]string, bool) {
	mark, kept, at := p.Placeholder, params[:0:0], -1
	for _, param := range params {
		k, v, _ := strings.Cut(param, "=")
		if name, err := url.QueryUnescape(k); err != nil || name != p.Query {
			kept = append(kept, param)
			continue
		}
		value, err := url.QueryUnescape(v)
		switch {
		case err == nil && indexMark(value, mark) >= 0 && !p.alike(value):
			return nil, false
		case err == nil && indexMark(value, mark) >= 0 && at < 0:
			at = len(kept)
		}
		p.dropped = append(p.dropped, without(v, mark), without(value, mark))
	}
	if at < 0 {
		at = len(kept)
	}
	return slices.Insert(kept, at, url.QueryEscape(p.Query)+"="), true
}

// indexMark finds a placeholder that does not go on behind it, as another's would.
func indexMark(text, mark string) int {
	for from := 0; ; {
		i := strings.Index(text[from:], mark)
		if i < 0 {
			return -1
		}
		end := from + i + len(mark)
		if end == len(text) || !markByte(text[end]) {
			return from + i
		}
		from = end
	}
}

func without(text, mark string) string {
	for {
		i := indexMark(text, mark)
		if i < 0 {
			return text
		}
		text = text[:i] + " " + text[i+len(mark):]
	}
}

const (
	basicScheme = "Basic "
	maxUser     = 64 // bytes of a user's name before a secret
)

// basic is what the Basic scheme carries.
func basic(v string) (string, bool) {
	scheme, rest, _ := strings.Cut(v, " ")
	if !strings.EqualFold(scheme, "Basic") {
		return "", false
	}
	b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(rest))
	return string(b), err == nil
}

// marked are the placeholders of one policy. Policies do not change.
type marked struct {
	of    *policy.Policy
	marks []string
}

// marks are the placeholders of the policy in force that do not begin as all others do.
func (x *exchange) marks() []string {
	p := x.Session.Policy()
	if m := x.marked.Load(); m != nil && p != nil && m.of == p {
		return m.marks
	}
	var out []string
	for _, in := range x.e.Injections(x.Session) {
		if m := in.Placeholder; !strings.HasPrefix(m, placeholderStart) && !slices.Contains(out, m) {
			out = append(out, m)
		}
	}
	x.marked.Store(&marked{of: p, marks: out})
	return out
}

// holds reports whether a text holds a placeholder.
func holds(text string, marks []string) bool {
	for _, m := range marks {
		if strings.Contains(text, m) {
			return true
		}
	}
	for {
		_, rest, ok := strings.Cut(text, placeholderStart)
		if !ok {
			return false
		}
		if rest != "" && markByte(rest[0]) {
			return true
		}
		text = rest
	}
}

func markByte(c byte) bool { return c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' }

func (x *exchange) placeholderIn(params []string) bool {
	marks := x.marks()
	plain, _ := url.PathUnescape(x.req.Path)
	texts := []string{x.req.Path, plain}
	for _, p := range params {
		u, _ := url.QueryUnescape(p)
		texts = append(texts, p, u)
	}
	for _, p := range x.places {
		texts = append(texts, p.dropped...)
	}
	for name, vs := range x.header {
		texts = append(texts, strings.ToUpper(strings.ReplaceAll(name, "-", "_")))
		for _, v := range vs {
			b, _ := basic(v)
			u, _ := url.PathUnescape(v)
			texts = append(texts, v, b, u)
		}
	}
	return slices.ContainsFunc(texts, func(t string) bool { return holds(t, marks) })
}

func (x *exchange) credentialsIn(params []string) bool {
	if len(x.r.Header["Proxy-Authorization"]) > 0 {
		return true
	}
	for name := range x.header {
		if credentialHeaders[fieldName(name)] {
			return true
		}
	}
	if slices.ContainsFunc(x.header["Sec-Websocket-Protocol"], credentialProtocol) {
		return true
	}
	// Some servers part parameters at a semicolon too.
	for _, p := range strings.FieldsFunc(strings.Join(params, "&"), func(r rune) bool { return r == '&' || r == ';' }) {
		k, v, _ := strings.Cut(p, "=")
		name, err := url.QueryUnescape(k)
		if err != nil || credentialParameters[strings.ToLower(name)] && (v != "" || !x.placed(name)) {
			return true
		}
	}
	return false
}

// credentialProtocol: browsers can put a token nowhere else. Names of protocols are short and have no dot.
func credentialProtocol(v string) bool { return len(v) > 64 || strings.Contains(v, ".") }

// placed reports whether a secret goes into the parameter.
func (x *exchange) placed(name string) bool {
	return slices.ContainsFunc(x.places, func(p place) bool { return p.Header == "" && p.Query == name })
}

// inject reveals the secrets and puts them in their places.
func (x *exchange) inject() *session.Refusal {
	if len(x.places) == 0 {
		return nil
	}
	var values [][]byte
	var names []string
	params := strings.Split(x.target.query, "&")
	for i := range x.places {
		p := &x.places[i]
		if x.e.Secrets == nil {
			return refuse(policy.SecretAway, "")
		}
		s, err := x.e.Secrets.Reveal(x.ctx, x.Session, p.Secret)
		if err != nil || len(s.Value) < 8 || !printable(s.Value) {
			return refuse(policy.SecretAway, "")
		}
		if !slices.Contains(s.Hosts, x.req.Name) {
			return refuse(policy.SecretAway, "The secret that the rule puts in may not be sent to this host.")
		}
		if p.Header != "" {
			x.header.Add(p.Header, p.fill(string(s.Value)))
		} else {
			j := slices.Index(params, url.QueryEscape(p.Query)+"=")
			if j < 0 {
				return refuse(policy.SecretAway, "")
			}
			params[j] += url.QueryEscape(p.fill(string(s.Value)))
			x.target.hasQuery = true
		}
		values, names = append(values, s.Value), append(names, p.Secret)
	}
	x.target.query = strings.Join(params, "&")
	x.record.Injected = strings.Join(names, ",")
	x.scrub = x.e.scrubbers.of(x.e.Now, values)
	// What would make the answer unreadable here, or let it come in pieces too small to know.
	for _, name := range []string{"Range", "If-Range", "Grpc-Accept-Encoding", "Connect-Accept-Encoding", "Sec-Websocket-Extensions", "A-Im", "Want-Digest", "Want-Repr-Digest", "Want-Content-Digest"} {
		x.header.Del(name)
	}
	x.header.Set("Accept-Encoding", "identity")
	return nil
}

func printable(b []byte) bool {
	return !slices.ContainsFunc(b, func(c byte) bool { return c < ' ' || c >= 0x7f })
}

// scanned is how much of a body is searched for placeholders.
const scanned = 64 << 10

// bodyScan searches a body that goes by. Placeholders of secrets that go to this host anyway are text there.
type bodyScan struct {
	marks []string
	own   []string
	tail  []byte
	seen  int
}

// hit reports whether the bytes that came, with those before, hold a placeholder that belongs elsewhere.
func (s *bodyScan) hit(p []byte) bool {
	if s.seen >= scanned {
		return false
	}
	p = p[:min(len(p), scanned-s.seen)]
	s.seen += len(p)
	b := append(s.tail, p...)
	for _, m := range s.marks {
		if bytes.Contains(b, []byte(m)) {
			return true
		}
	}
	for from := 0; ; {
		i := bytes.Index(b[from:], []byte(placeholderStart))
		if i < 0 {
			break
		}
		from += i + len(placeholderStart)
		end := from
		for end < len(b) && markByte(b[end]) {
			end++
		}
		name := string(b[from-len(placeholderStart) : end])
		if end > from && !s.owns(name, end == len(b)) {
			return true
		}
	}
	s.tail = append([]byte(nil), b[max(0, len(b)-256):]...)
	return false
}

// owns reports whether a placeholder is of this host; more: it may go on in the next bytes.
func (s *bodyScan) owns(name string, more bool) bool {
	return slices.ContainsFunc(s.own, func(o string) bool { return o == name || more && strings.HasPrefix(o, name) })
}
