package session

import (
	"encoding/json"
	"sync"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
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

// sentence says to a user what was refused, why, and whom to ask.
func (s *Bound) sentence(r *egressv1.Record) string {
	return policy.Sentence(
		policy.Request{Name: authority.Name(r.GetAuthority()), Port: uint16(r.GetPort()), Protocol: policy.Protocol(r.GetProtocol()),
			Method: r.GetMethod(), Path: r.GetPath()},
		policy.Decision{Reason: policy.Reason(r.GetReason()), Rule: r.GetRule(), Layer: r.GetLayer(), Generation: r.GetPolicyGeneration(),
			Ask: s.Policy().Ask()})
}
