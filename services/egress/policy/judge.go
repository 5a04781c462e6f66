package policy

import (
	"slices"

	"github.com/berth-dev/berth/services/egress/authority"
)

// opaque reports whether nothing of a request but names is seen.
func (r Request) opaque() bool { return r.Protocol == TLS || r.Protocol == TCP }

// sound is why a request cannot be judged at all; empty if it can.
func (r Request) sound() Reason {
	if n, err := authority.ParseStrict(string(r.Name)); err != nil || n != r.Name {
		if _, is := authority.ParseLiteral(string(r.Name)); is {
			return Literal
		}
		return BadName
	}
	if r.Port == 0 {
		return BadPort
	}
	switch r.Protocol {
	case TLS, TCP:
		if r.Method != "" || r.Path != "" {
			return Malformed
		}
		return ""
	case HTTP, HTTPS:
		if c, err := CanonicalPath(r.Path); err != nil || c != r.Path || r.Method == "" {
			return Malformed
		}
		return ""
	}
	return Protocols
}

// carries reports whether a rule that allows protocol p allows q: bytes of any kind are also TLS, and TLS
// that is passed through may hold any request.
func carries(p, q Protocol) bool {
	return p == q || p == TCP || p == TLS && q == HTTPS
}

// allows reports whether a rule that allows does so for the request; if not, how far it came.
func (r *Rule) allows(q *Request) (ok bool, miss Reason) {
	switch {
	case !slices.Contains(r.Ports, q.Port):
		return false, BadPort
	case q.Protocol == TLS && r.Protocol == HTTPS && !r.looks():
		return true, "" // its names decide, so TLS is passed through
	case !carries(r.Protocol, q.Protocol):
		return false, Protocols
	case len(r.Methods) > 0 && !slices.Contains(r.Methods, q.Method):
		return false, BadMethod
	case len(r.Paths) > 0 && !belowAny(q.Path, r.Paths, false):
		return false, BadPath
	}
	return true, ""
}

// denies reports whether a rule that denies matches. What cannot be seen into is denied where a part of it
// would be: by method or path, or as a protocol that it may carry.
func (r *Rule) denies(q *Request) bool {
	if len(r.Ports) > 0 && !slices.Contains(r.Ports, q.Port) {
		return false
	}
	if r.Protocol != "" && !carries(r.Protocol, q.Protocol) && !carries(q.Protocol, r.Protocol) {
		return false
	}
	if q.opaque() {
		return true
	}
	return (len(r.Methods) == 0 || slices.Contains(r.Methods, q.Method)) && (len(r.Paths) == 0 || belowAny(q.Path, r.Paths, true))
}

// partial reports whether a rule that denies does so by what is inside of a connection.
func (r *Rule) partial() bool { return len(r.Methods) > 0 || len(r.Paths) > 0 }

// deniesAll reports whether a rule that denies leaves no request of a protocol on a port.
func (r *Rule) deniesAll(port uint16, web Protocol) bool {
	return !r.partial() && r.denies(&Request{Port: port, Protocol: web})
}

// puts reports whether the rule puts a secret into what goes to the port.
func (r *Rule) puts(port uint16) bool { return len(r.Inject) > 0 && slices.Contains(r.Ports, port) }

// misses by how near they were, the nearest last.
var misses = []Reason{NoRule, BadPort, Protocols, BadMethod, BadPath}

// Judge decides on one request.
func (p *Policy) Judge(r Request) Decision {
	if p == nil || len(p.layers) == 0 {
		return p.none(NoPolicy)
	}
	if bad := r.sound(); bad != "" {
		return p.none(bad)
	}
	d := p.decide(&r)
	if e, is := p.first(reporting, r.Name, func(e *Rule) bool { return e.otherwise(&r, d) }); is {
		d.Reported = e.Name
	}
	return d
}

func (p *Policy) decide(r *Request) Decision {
	partly := hit{} // a denial of what could be inside of what is not seen into
	e, is := p.first(denying, r.Name, func(e *Rule) bool { return e.denies(r) && !(r.opaque() && e.partial()) })
	if is {
		return p.by(e, false, DeniedRule)
	}
	if r.opaque() {
		partly, _ = p.first(denying, r.Name, func(e *Rule) bool { return e.denies(r) })
	}
	nearest := 0
	e, is = p.first(allowing, r.Name, func(e *Rule) bool {
		ok, miss := e.allows(r)
		if !ok {
			nearest = max(nearest, slices.Index(misses, miss))
		}
		return ok
	})
	switch {
	case !is:
		return p.none(misses[nearest])
	case partly.Rule != nil:
		return p.by(partly, false, DeniedRule)
	case !r.opaque():
		return p.by(e, true, Allowed)
	}
	if in, is := p.first(allowing, r.Name, func(e *Rule) bool { return e.puts(r.Port) }); is {
		return p.by(in, false, Protocols) // what takes a secret is never passed unseen
	}
	return p.by(e, true, Allowed)
}

// otherwise reports whether a rule in report-only mode would have decided otherwise.
func (r *Rule) otherwise(q *Request, d Decision) bool {
	if r.Deny {
		return d.Allowed && r.denies(q)
	}
	if d.Allowed || d.Reason == DeniedRule {
		return false
	}
	ok, _ := r.allows(q)
	return ok
}

// none is a denial by no rule.
func (p *Policy) none(why Reason) Decision {
	return Decision{Reason: why, Ask: p.Ask(), Generation: p.Generation()}
}

// by is the decision of a rule.
func (p *Policy) by(h hit, allowed bool, reason Reason) Decision {
	l := p.layers[h.layer]
	d := Decision{Allowed: allowed, Reason: reason, Rule: h.Name, Layer: l.Scope.GetLayer(), Generation: l.Generation, Ask: p.ask}
	if allowed {
		d.Grant = h.Grant
	}
	return d
}

// Resolve decides whether a name is answered for: whether any request to it could be allowed.
func (p *Policy) Resolve(n authority.Name) Decision {
	if p == nil || len(p.layers) == 0 {
		return p.none(NoPolicy)
	}
	if e, is := p.first(denying, n, (*Rule).whole); is {
		return p.by(e, false, DeniedRule)
	}
	all := func(*Rule) bool { return true }
	d := p.none(NoRule)
	if e, is := p.first(allowing, n, all); is {
		d = p.by(e, true, Allowed)
	}
	if e, is := p.first(reporting, n, func(e *Rule) bool { return e.Deny == d.Allowed && (!e.Deny || e.whole()) }); is {
		d.Reported = e.Name
	}
	return d
}

// MayResolve reports whether a name is answered for. What it refuses Judge denies on every port.
func (p *Policy) MayResolve(n authority.Name) bool { return p.Resolve(n).Allowed }

// Need is what a connection to a host and port takes, and why when it is refused. tlsSeen: it begins with TLS.
// With Intercept each request is judged by itself; with Pass and Raw the decision holds for all of it.
func (p *Policy) Need(n authority.Name, port uint16, tlsSeen bool) (Need, Decision) {
	whole := Request{Name: n, Port: port, Protocol: TCP}
	web := HTTP
	if tlsSeen {
		whole.Protocol, web = TLS, HTTPS
	}
	d := p.Judge(whole)
	if p == nil || len(p.layers) == 0 || whole.sound() != "" {
		return Refuse, d
	}
	reader, reads := p.first(allowing, n, func(r *Rule) bool {
		if !d.Allowed {
			return slices.Contains(r.Ports, port) && carries(r.Protocol, web) // part of it may be allowed
		}
		return slices.Contains(r.Ports, port) && r.Protocol == web && (web == HTTP || r.looks())
	})
	if d.Allowed {
		unseen, _ := p.first(allowing, n, func(r *Rule) bool { ok, _ := r.allows(&whole); return ok })
		if !reads || !reader.before(unseen) {
			return p.unread(whole, unseen, d)
		}
	}
	if !reads {
		return Refuse, d
	}
	if shut, is := p.first(denying, n, func(r *Rule) bool { return r.deniesAll(port, web) }); is {
		return Refuse, p.by(shut, false, DeniedRule)
	}
	return Intercept, p.by(reader, true, Allowed)
}

// unread is what passes as it is: as TLS by its names, or as any bytes where a rule of TCP lets it.
func (p *Policy) unread(q Request, by hit, d Decision) (Need, Decision) {
	if by.Protocol == TCP {
		q.Protocol = TCP
		if raw := p.Judge(q); raw.Allowed {
			return Raw, raw
		}
	}
	return Pass, d
}
