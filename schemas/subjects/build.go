package subjects

import (
	"slices"
	"strings"
	"sync"

	"github.com/berth-dev/berth/schemas/ids"
)

// Request is where a frontend publishes a durable request.
func Request(t ids.Tenant, f ids.Frontend, verb string) string {
	return Prefix + "request." + tok(t) + "." + tok(f) + "." + tok(verb)
}

// Session is the subject of one event of a session.
func Session(t ids.Tenant, s ids.SessionKey, event string) string {
	return Prefix + "session." + tok(t) + "." + tok(s) + "." + tok(event)
}

// HostEvent is the subject of one event of a host.
func HostEvent(h ids.Host, event string) string {
	return Prefix + "host." + tok(h) + "." + tok(event)
}

// PoolEvent is the subject of one event of a pool.
func PoolEvent(t ids.Template, event string) string {
	return Prefix + "pool." + tok(t) + "." + tok(event)
}

// TimerSet is where a timer is armed; one subject per timer.
func TimerSet(t ids.Tenant, s ids.SessionKey, kind string) string {
	return Prefix + "timer.set." + tok(t) + "." + tok(s) + "." + tok(kind)
}

// TimerDue is where the timer appears when it is due.
func TimerDue(t ids.Tenant, s ids.SessionKey, kind string) string {
	return Prefix + "timer.due." + tok(t) + "." + tok(s) + "." + tok(kind)
}

// Audit is the subject of an audit record of a service. An empty tenant or
// session, not known, is written "none".
func Audit(service string, t ids.Tenant, s ids.SessionKey) string {
	return Prefix + "audit." + tok(service) + "." + orNone(t) + "." + orNone(s)
}

// Usage is the subject of a usage sample.
func Usage(t ids.Tenant, s ids.SessionKey) string {
	return Prefix + "usage." + tok(t) + "." + tok(s)
}

// Dead is where a service puts what it could not handle.
func Dead(service string) string { return Prefix + "dead." + tok(service) }

// leaders are the services of which one replica at a time answers.
var leaders = []string{"scheduler", "pool"}

// Leader reports whether of a service's replicas only the leader answers: a
// call of it waits until there is one.
func Leader(service string) bool { return slices.Contains(leaders, service) }

// Serving is where a service says that one of its replicas has begun to serve: whoever waits for an
// answer of one before asks again. A plain message without a body, not stored.
func Serving(service string) string { return Prefix + "serving." + service }

// ServingHost is where the agent of a host says so.
func ServingHost(h ids.Host) string { return Serving("host") + "." + string(h) }

// RPC is the subject on which caller calls a service's method.
func RPC(service, method string, caller Caller) string {
	return Prefix + "rpc." + tok(service) + "." + tok(method) + "." + caller.Token()
}

// HostRPC is the subject on which caller calls a method of one host.
func HostRPC(h ids.Host, method string, caller Caller) string {
	return Prefix + "rpc.host." + tok(h) + "." + tok(method) + "." + caller.Token()
}

// GateRPC is the subject on which caller calls a method of the gate of one host.
func GateRPC(h ids.Host, method string, caller Caller) string {
	return Prefix + "rpc.gate." + tok(h) + "." + tok(method) + "." + caller.Token()
}

// PerHost reports whether a service's methods are those of one host: their subjects name it.
func PerHost(service string) bool { return service == "host" || service == "gate" }

// Endpoints are the subjects on which the method is served, one per shape of
// caller; h is the host for methods of "host" and "gate", and empty otherwise.
func (m Method) Endpoints(h ids.Host) []string {
	base := Prefix + "rpc." + tok(m.Service) + "."
	if PerHost(m.Service) {
		base += tok(h) + "."
	}
	base += tok(m.Name)
	one, two := false, false
	for _, w := range m.Callers {
		if w == AnyFrontend {
			two = true
		} else {
			one = true
		}
	}
	var out []string
	if one {
		out = append(out, base+".*")
	}
	if two {
		out = append(out, base+".*.*")
	}
	return out
}

// BoxSubject is a subject of the data plane of one epoch of a session.
func BoxSubject(s ids.SessionKey, e ids.Epoch, method string) string {
	return Prefix + "box." + tok(s) + "." + tok(e.String()) + "." + tok(method)
}

// BoxFrames is where a host publishes the frames of a stream for a client.
func BoxFrames(client Caller, stream ids.StreamID) string {
	return client.Inbox() + ".box." + tok(stream)
}

// Wildcard turns a pattern of the catalogue into a NATS subject: every
// {placeholder} becomes *.
func Wildcard(pattern string) string {
	out := make([]byte, 0, len(pattern))
	for i := 0; i < len(pattern); i++ {
		if pattern[i] != '{' {
			out = append(out, pattern[i])
			continue
		}
		for i < len(pattern) && pattern[i] != '}' {
			i++
		}
		out = append(out, '*')
	}
	return string(out)
}

// EventType is the CloudEvents type of what is published on subject: the
// subject without its variable tokens, "dev.berth.v1.session.placed".
func EventType(subject string) string {
	for _, t := range eventTypes() {
		if Match(t.pattern, subject) {
			return t.name
		}
	}
	return "dev.berth.v1.other"
}

// eventType is the type of what is published within a pattern.
type eventType struct{ pattern, name string }

// eventTypes are those of the catalogue, made once: one is looked up for every event.
var eventTypes = sync.OnceValue(func() []eventType {
	out := make([]eventType, 0, len(Events))
	for i := range Events {
		out = append(out, eventType{Wildcard(Events[i].Subject), "dev." + literal(Events[i].Subject)})
	}
	return out
})

// Match reports whether subject lies within pattern, which may hold * and a
// last >.
func Match(pattern, subject string) bool {
	for {
		p, prest, pmore := strings.Cut(pattern, ".")
		s, srest, smore := strings.Cut(subject, ".")
		if p == ">" {
			return s != ""
		}
		if s == "" || p != "*" && p != s || pmore != smore {
			return false
		}
		if !pmore {
			return true
		}
		pattern, subject = prest, srest
	}
}

func literal(pattern string) string {
	kept := make([]string, 0, 6)
	for p := range strings.SplitSeq(pattern, ".") {
		if !strings.HasPrefix(p, "{") {
			kept = append(kept, p)
		}
	}
	return strings.Join(kept, ".")
}
