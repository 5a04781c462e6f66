package subjects

import (
	"fmt"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
)

// RequestSubject is what a request's subject says.
type RequestSubject struct {
	Tenant   ids.Tenant
	Frontend ids.Frontend
	Verb     string
}

// Caller is the frontend that published the request.
func (r RequestSubject) Caller() Caller { return Frontend(r.Tenant, r.Frontend) }

// SessionSubject is what a session event's subject says.
type SessionSubject struct {
	Tenant  ids.Tenant
	Session ids.SessionKey
	Event   string
}

// HostSubject is what a host event's subject says.
type HostSubject struct {
	Host  ids.Host
	Event string
}

// PoolSubject is what a pool event's subject says.
type PoolSubject struct {
	Template ids.Template
	Event    string
}

// TimerSubject is what a timer's subject says.
type TimerSubject struct {
	Due     bool
	Tenant  ids.Tenant
	Session ids.SessionKey
	Kind    string
}

// AuditSubject is what an audit record's subject says; an unknown tenant or
// session is empty.
type AuditSubject struct {
	Service string
	Tenant  ids.Tenant
	Session ids.SessionKey
}

// Call is what an RPC subject says.
type Call struct {
	Service string
	Host    ids.Host // of methods of "host" and "gate"
	Method  string
	Caller  Caller
}

// BoxCall is what a data-plane subject says.
type BoxCall struct {
	Session ids.SessionKey
	Epoch   ids.Epoch
	Method  string
}

// ParseRequest reads what Request wrote.
func ParseRequest(subject string) (r RequestSubject, err error) {
	p := split(subject, "request", 3, &err)
	r.Tenant = part(p, 0, ids.ParseTenant, &err)
	r.Frontend = part(p, 1, ids.ParseFrontend, &err)
	r.Verb = part(p, 2, word, &err)
	return orZero(r, subject, err)
}

// ParseSession reads what Session wrote.
func ParseSession(subject string) (s SessionSubject, err error) {
	p := split(subject, "session", 3, &err)
	s.Tenant = part(p, 0, ids.ParseTenant, &err)
	s.Session = part(p, 1, ids.ParseSessionKey, &err)
	s.Event = part(p, 2, word, &err)
	return orZero(s, subject, err)
}

// ParseHostEvent reads what HostEvent wrote.
func ParseHostEvent(subject string) (h HostSubject, err error) {
	p := split(subject, "host", 2, &err)
	h.Host = part(p, 0, ids.ParseHost, &err)
	h.Event = part(p, 1, word, &err)
	return orZero(h, subject, err)
}

// ParsePoolEvent reads what PoolEvent wrote.
func ParsePoolEvent(subject string) (p PoolSubject, err error) {
	parts := split(subject, "pool", 2, &err)
	p.Template = part(parts, 0, ids.ParseTemplate, &err)
	p.Event = part(parts, 1, word, &err)
	return orZero(p, subject, err)
}

// ParseTimer reads what TimerSet and TimerDue wrote.
func ParseTimer(subject string) (t TimerSubject, err error) {
	p := split(subject, "timer", 4, &err)
	if err == nil {
		t.Due = p[0] == "due"
		if !t.Due && p[0] != "set" {
			err = fmt.Errorf("%w: %.64q is neither set nor due", ids.ErrInvalid, p[0])
		}
	}
	t.Tenant = part(p, 1, ids.ParseTenant, &err)
	t.Session = part(p, 2, ids.ParseSessionKey, &err)
	t.Kind = part(p, 3, word, &err)
	return orZero(t, subject, err)
}

// ParseAudit reads what Audit wrote.
func ParseAudit(subject string) (a AuditSubject, err error) {
	p := split(subject, "audit", 3, &err)
	a.Service = part(p, 0, word, &err)
	if err == nil && p[1] != ids.None {
		a.Tenant = part(p, 1, ids.ParseTenant, &err)
	}
	if err == nil && p[2] != ids.None {
		a.Session = part(p, 2, ids.ParseSessionKey, &err)
	}
	return orZero(a, subject, err)
}

// ParseUsage reads what Usage wrote.
func ParseUsage(subject string) (s SessionSubject, err error) {
	p := split(subject, "usage", 2, &err)
	s.Tenant = part(p, 0, ids.ParseTenant, &err)
	s.Session = part(p, 1, ids.ParseSessionKey, &err)
	return orZero(s, subject, err)
}

// ParseDead reads what Dead wrote: the service.
func ParseDead(subject string) (service string, err error) {
	p := split(subject, "dead", 1, &err)
	service = part(p, 0, word, &err)
	return orZero(service, subject, err)
}

// ParseBox reads what BoxSubject wrote.
func ParseBox(subject string) (b BoxCall, err error) {
	p := split(subject, "box", 3, &err)
	b.Session = part(p, 0, ids.ParseSessionKey, &err)
	b.Epoch = part(p, 1, ids.ParseEpoch, &err)
	b.Method = part(p, 2, word, &err)
	return orZero(b, subject, err)
}

// ParseRPC reads what RPC and HostRPC wrote. It refuses a method that is not
// in the catalogue and a caller that the catalogue does not allow it.
func ParseRPC(subject string) (Call, error) {
	rest, ok := strings.CutPrefix(subject, Prefix+"rpc.")
	if !ok || len(subject) > maxSubject {
		return Call{}, badShape(subject, "rpc")
	}
	p := strings.Split(rest, ".")
	var c Call
	if len(p) >= 4 && PerHost(p[0]) {
		h, err := ids.ParseHost(p[1])
		if err != nil {
			return Call{}, fmt.Errorf("subject %.300q: %w", subject, err)
		}
		c.Host = h
		p = append([]string{p[0]}, p[2:]...)
	}
	if len(p) != 3 && len(p) != 4 || PerHost(p[0]) && c.Host == "" {
		return Call{}, badShape(subject, "rpc")
	}
	m, ok := FindMethod(p[0], p[1])
	if !ok {
		return Call{}, fmt.Errorf("%w: subject %.300q names no method of the catalogue", ids.ErrInvalid, subject)
	}
	c.Service, c.Method = m.Service, m.Name
	caller, ok := m.caller(p[2:])
	if ok && m.own() {
		ok = caller.Host == c.Host
	}
	if !ok {
		return Call{}, fmt.Errorf("%w: subject %.300q names a caller that may not call the method", ids.ErrInvalid, subject)
	}
	c.Caller = caller
	return c, nil
}

// caller resolves the last tokens of an RPC subject.
func (m Method) caller(tokens []string) (Caller, bool) {
	if len(tokens) == 2 {
		t, err1 := ids.ParseTenant(tokens[0])
		f, err2 := ids.ParseFrontend(tokens[1])
		c := Caller{Role: RoleFrontend, Tenant: t, Frontend: f}
		return c, err1 == nil && err2 == nil && m.Allows(c)
	}
	var c Caller
	switch t := tokens[0]; {
	case t == "operator":
		c = Operator()
	case t == "keeper":
		c = Keeper()
	case knownService(t):
		c = Service(t)
	case strings.HasPrefix(t, gatePrefix):
		h, err := ids.ParseHost(t[len(gatePrefix):])
		if err != nil {
			return Caller{}, false
		}
		c = Caller{Role: RoleGate, Host: h}
	default:
		h, err := ids.ParseHost(t)
		if err != nil {
			return Caller{}, false
		}
		c = Caller{Role: RoleHost, Host: h}
	}
	return c, m.Allows(c)
}

const maxSubject = 512

func split(subject, kind string, n int, err *error) []string {
	rest, ok := strings.CutPrefix(subject, Prefix+kind+".")
	if !ok || len(subject) > maxSubject || strings.Count(rest, ".") != n-1 {
		*err = badShape(subject, kind)
		return nil
	}
	return strings.Split(rest, ".")
}

func badShape(subject, kind string) error {
	return fmt.Errorf("%w: subject %.300q does not have the form of %s%s", ids.ErrInvalid, subject, Prefix, kind)
}

func part[T any](p []string, i int, parse func(string) (T, error), err *error) (zero T) {
	if *err != nil {
		return zero
	}
	v, e := parse(p[i])
	*err = e
	return v
}

func word(s string) (string, error) {
	if !ids.IsToken(s) {
		return "", fmt.Errorf("%w: %.64q is not a subject token", ids.ErrInvalid, s)
	}
	return s, nil
}

func orZero[T any](v T, subject string, err error) (T, error) {
	if err != nil {
		var zero T
		return zero, fmt.Errorf("subject %.300q: %w", subject, err)
	}
	return v, nil
}
