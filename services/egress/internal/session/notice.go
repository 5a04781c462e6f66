package session

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/policy"
)

// notice is /run/berth/egress.json.
type notice struct {
	Session    string `json:"session"`
	Generation uint64 `json:"policy_generation"`
	// Contact is whom to ask.
	Contact string `json:"contact,omitempty"`
	// Closed says why nothing leaves now.
	Closed string `json:"closed,omitempty"`
	// Allowed is what may leave; Omitted of it are not listed, because they are too many.
	Allowed []policy.Allowance `json:"allowed"`
	Omitted int                `json:"omitted,omitempty"`
	// Refused is what was last refused, the latest first.
	Refused []refused `json:"refused"`
}

// refused is one refusal, or like ones.
type refused struct {
	At       time.Time `json:"at"`
	Host     string    `json:"host"`
	Port     uint32    `json:"port,omitempty"`
	Protocol string    `json:"protocol,omitempty"`
	Method   string    `json:"method,omitempty"`
	Path     string    `json:"path,omitempty"`
	Reason   string    `json:"reason"`
	Rule     string    `json:"rule,omitempty"`
	Text     string    `json:"text"`
	Times    uint64    `json:"times"`
}

// remember keeps a refusal for the notice; the lock of told is held.
func (s *Bound) remember(r *egressv1.Record, now time.Time) {
	x := refused{At: now.UTC(), Host: r.GetAuthority(), Port: r.GetPort(), Protocol: r.GetProtocol(), Method: r.GetMethod(),
		Path: short(r.GetPath(), 200), Reason: r.GetReason(), Rule: r.GetRule(), Times: 1}
	list := s.told.refused
	for i, old := range list {
		if old.Host == x.Host && old.Port == x.Port && old.Reason == x.Reason && old.Protocol == x.Protocol && old.Method == x.Method && old.Path == x.Path {
			x.Times, x.Text = old.Times+1, old.Text
			copy(list[i:], list[i+1:])
			list[len(list)-1] = x
			return
		}
	}
	x.Text = s.sentence(r)
	if len(list) == lastRefused {
		copy(list, list[1:])
		list = list[:lastRefused-1]
	}
	s.told.refused = append(list, x)
}

// Notice is the content of /run/berth/egress.json as it is now.
func (s *Bound) Notice() []byte {
	p := s.Policy()
	list := s.t.lists.of(p)
	n := notice{Session: s.binding.GetSession().GetSession(), Generation: p.Generation(), Contact: p.Ask(), Closed: s.t.Closed(),
		Allowed: list.first, Omitted: list.omitted, Refused: []refused{}}
	s.told.mu.Lock()
	for i := len(s.told.refused) - 1; i >= 0; i-- {
		n.Refused = append(n.Refused, s.told.refused[i])
	}
	s.told.mu.Unlock()
	for most := maxListed; ; most /= 2 {
		if over := len(n.Allowed) - most; over > 0 {
			n.Allowed, n.Omitted = n.Allowed[:most], n.Omitted+over
		}
		raw, err := json.MarshalIndent(n, "", "  ")
		if err == nil && (len(raw) <= maxNotice || most == 0) {
			return append(raw, '\n')
		}
		if err != nil {
			return []byte("{}\n") // no value of it can fail
		}
	}
}

// maxListed is how much of what is allowed a notice lists at most.
const maxListed = 500

// allowances are those of one policy, as notices list them.
type allowances struct {
	first   []policy.Allowance
	omitted int
}

// lists are made once for all sessions that have a policy in common.
type lists struct {
	mu sync.Mutex
	by map[*policy.Policy]*allowances
}

// maxLists is how many are kept.
const maxLists = 256

func (l *lists) of(p *policy.Policy) *allowances {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a, ok := l.by[p]; ok {
		return a
	}
	all := p.Allowances()
	n := min(len(all), maxListed)
	a := &allowances{first: append(make([]policy.Allowance, 0, n), all[:n]...), omitted: len(all) - n}
	if l.by == nil || len(l.by) >= maxLists {
		l.by = map[*policy.Policy]*allowances{}
	}
	l.by[p] = a
	return a
}

// forget drops all: policies changed.
func (l *lists) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.by = nil
}

// because are the reasons as a user reads them; %s is the host.
var because = map[policy.Reason]string{
	policy.NoPolicy:    "nothing may leave this session: no policy allows it",
	policy.NoRule:      "no rule allows %s",
	policy.DeniedRule:  "a rule denies %s",
	policy.BadPort:     "%s is allowed, but not on this port",
	policy.BadMethod:   "%s is allowed, but not with this method",
	policy.BadPath:     "%s is allowed, but not below this path",
	policy.BadName:     "%s is no host name",
	policy.Literal:     "%s is an address; only hosts that are named may be reached",
	policy.Mismatch:    "the connection and the request name different hosts, one of them %s",
	policy.NoName:      "the TLS connection does not say whom it is for",
	policy.Hidden:      "the TLS connection hides whom it is for",
	policy.Private:     "%s leads to a private address, which the rule does not allow",
	policy.Unresolved:  "%s could not be looked up",
	policy.Unreachable: "%s does not answer",
	policy.Certificate: "the certificate that %s shows is not its own, or not valid",
	policy.Malformed:   "the request to %s breaks the rules of its protocol",
	policy.Upgrade:     "the connection to %s may become a WebSocket and nothing else",
	policy.Credentials: "the rule for %s lets no credentials through but those that are put in",
	policy.Placeholder: "the placeholder of a secret was sent to %s, where it does not belong",
	policy.SecretAway:  "the secret for %s could not be had",
	policy.Echo:        "the answer of %s held a secret",
	policy.Rate:        "%s was asked more often than is allowed",
	policy.Bytes:       "more was sent to and got from %s today than is allowed",
	policy.Protocols:   "%s is allowed, but by another protocol",
	policy.AuditAway:   "nothing leaves now, because it could not be recorded",
	policy.NoLease:     "nothing leaves now, because the host has lost its lease",
	policy.Revoked:     "%s was allowed and is not any more",
	policy.NoIdentity:  "it came over no link of this session",
}

// sentence says to a user what was refused, why, and whom to ask.
func (s *Bound) sentence(r *egressv1.Record) string {
	host := r.GetAuthority()
	if host == "" {
		host = "a host"
	}
	if p := r.GetPort(); p != 0 {
		host = fmt.Sprintf("%s:%d", host, p)
	}
	text, ok := because[policy.Reason(r.GetReason())]
	if !ok {
		text = "%s was refused"
	}
	text = capital(text)
	if strings.Contains(text, "%s") {
		text = fmt.Sprintf(text, host)
	}
	if rule := r.GetRule(); rule != "" {
		text += fmt.Sprintf(" (rule %s of the %s's policy)", rule, policy.LayerName(r.GetLayer()))
	}
	if ask := s.Policy().Ask(); ask != "" {
		text += ". Ask " + ask
	}
	return text + "."
}

func capital(s string) string {
	if s != "" && s[0] >= 'a' && s[0] <= 'z' {
		return string(s[0]-'a'+'A') + s[1:]
	}
	return s
}
