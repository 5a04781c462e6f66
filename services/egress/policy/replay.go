package policy

import (
	"cmp"
	"iter"
	"slices"

	"github.com/berth-dev/berth/services/egress/authority"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// Replayed is what a policy would have made of recorded traffic.
type Replayed struct {
	// Records that were read, and how often what they stand for happened.
	Records int    `json:"records"`
	Times   uint64 `json:"times"`
	// Same would be judged as it was, Unknown could not be judged again.
	Same    uint64 `json:"same"`
	Unknown uint64 `json:"unknown"`
	// Changed would not, those that would be denied first, then by how often they happened.
	Changed []Turn `json:"changed"`
}

// Turn is traffic that would be judged otherwise now.
type Turn struct {
	Protocol  string         `json:"protocol"`
	Authority authority.Name `json:"authority"`
	Port      uint16         `json:"port"`
	Method    string         `json:"method,omitempty"`
	Path      string         `json:"path,omitempty"`
	// Was and Now: it is allowed. Rule and Reason are of now.
	Was      bool   `json:"was_allowed"`
	Now      bool   `json:"now_allowed"`
	WasRule  string `json:"was_rule,omitempty"`
	Rule     string `json:"rule,omitempty"`
	Reason   Reason `json:"reason"`
	Times    uint64 `json:"times"`
	Sessions int    `json:"sessions"`
}

// Request of the turn.
func (t Turn) Request() Request {
	return Request{Name: t.Authority, Port: t.Port, Protocol: Protocol(t.Protocol), Method: t.Method, Path: t.Path}
}

// judged are the reasons of policies; of the others a policy had allowed what was recorded.
var judged = []Reason{NoPolicy, NoRule, DeniedRule, BadPort, BadMethod, BadPath, Protocols}

// Replay asks what would be judged otherwise. policyOf is the policy of a record's session.
func Replay(records iter.Seq[*egressv1.Record], policyOf func(*egressv1.Record) *Policy) Replayed {
	out := Replayed{Changed: []Turn{}}
	at := map[Turn]*Turn{}
	sessions := map[Turn]map[string]bool{}
	for r := range records {
		times := max(1, r.GetTimes())
		out.Records++
		out.Times += times
		turn, known := replayOne(r, policyOf(r))
		switch {
		case !known:
			out.Unknown += times
			continue
		case turn.Was == turn.Now:
			out.Same += times
			continue
		}
		if at[turn] == nil {
			t := turn
			at[turn], sessions[turn] = &t, map[string]bool{}
		}
		at[turn].Times += times
		sessions[turn][r.GetSession().GetTenant()+"/"+r.GetSession().GetSession()] = true
	}
	for key, t := range at {
		t.Sessions = len(sessions[key])
		out.Changed = append(out.Changed, *t)
	}
	slices.SortFunc(out.Changed, compareTurns)
	return out
}

func compareTurns(a, b Turn) int {
	if a.Now != b.Now {
		if b.Now {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(b.Times, a.Times), cmp.Compare(a.Authority, b.Authority), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(a.Method, b.Method), cmp.Compare(a.Path, b.Path), cmp.Compare(a.WasRule, b.WasRule), cmp.Compare(a.Reason, b.Reason))
}

// replayOne judges one record again. It is not known when it named no host, or was too broken to be judged.
func replayOne(r *egressv1.Record, p *Policy) (Turn, bool) {
	reason := Reason(r.GetReason())
	t := Turn{Protocol: r.GetProtocol(), Port: uint16(r.GetPort()), Method: r.GetMethod(), Path: r.GetPath(), WasRule: r.GetRule()}
	t.Was = r.GetVerdict() != egressv1.Verdict_VERDICT_DENIED || reason != "" && !slices.Contains(judged, reason)
	name, err := authority.ParseStrict(r.GetAuthority())
	if err != nil || r.GetPort() > 65535 || reason == Malformed || reason == BadName || reason == Literal {
		return t, false
	}
	t.Authority = name
	d, known := p.again(&t)
	t.Now, t.Rule, t.Reason = d.Allowed, d.Rule, d.Reason
	return t, known
}

// again judges a turn. Where no request was read it counts whether any would be let in.
func (p *Policy) again(t *Turn) (Decision, bool) {
	if t.Protocol == "websocket" {
		t.Protocol = string(HTTPS)
		if t.Port == 80 {
			t.Protocol = string(HTTP)
		}
	}
	switch q := t.Request(); {
	case q.Protocol == dns:
		t.Port = 0
		return p.Resolve(t.Authority), true
	case q.Protocol == TLS || q.Protocol == TCP:
		q.Method, q.Path = "", ""
		d := p.Judge(q)
		if need, other := p.Need(q.Name, q.Port, q.Protocol == TLS); !d.Allowed && need == Intercept {
			d = other
		}
		return d, true
	case q.Protocol == HTTP || q.Protocol == HTTPS:
		if q.Method == "" || q.Path == "" {
			_, d := p.Need(q.Name, q.Port, q.Protocol == HTTPS)
			return d, true
		}
		d := p.Judge(q)
		return d, d.Reason != Malformed
	}
	return Decision{}, false
}
