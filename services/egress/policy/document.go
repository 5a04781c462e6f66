package policy

import (
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/berth-dev/berth/services/egress/authority"
)

// Bounds of a file, and of what it may hold.
const (
	MaxFile   = 768 << 10
	MaxRules  = 10_000
	maxList   = 1_000
	maxInject = 8
)

// Document is a policy that was read: of one scope, complete and canonical. It is not to be changed.
type Document struct {
	// Contact is whom to ask; empty: nobody is named.
	Contact string
	// Rules in the order of the file, presets as the rules that they stand for.
	Rules []Rule

	once    sync.Once
	indexes [kinds]index
}

// Rule is one rule.
type Rule struct {
	Name string
	// Line of the file on which it begins.
	Line int
	// Deny: what it matches is denied, else allowed.
	Deny bool
	// ReportOnly: it decides nothing; what it would have decided is reported.
	ReportOnly bool
	Hosts      []Pattern
	// Ports, Protocol, Methods and Paths that it matches. Of a rule that denies an empty one is all; of one
	// that allows ports and protocol are always there.
	Ports    []uint16
	Protocol Protocol
	Methods  []string
	Paths    []string
	// Grant of a rule that allows.
	Grant
}

// Pattern is a host of a rule: one name, or all names below one, at any depth, but not itself.
type Pattern struct {
	Name  authority.Name
	Below bool
}

// String is the pattern as it is written.
func (p Pattern) String() string {
	if p.Below {
		return "*." + string(p.Name)
	}
	return string(p.Name)
}

// Matches reports whether n is one of the pattern.
func (p Pattern) Matches(n authority.Name) bool {
	if !p.Below {
		return p.Name == n
	}
	return len(n) > len(p.Name)+1 && n[len(n)-len(p.Name)-1] == '.' && n[len(n)-len(p.Name):] == p.Name
}

// looks reports whether the rule asks for more than names.
func (r *Rule) looks() bool {
	return len(r.Methods) > 0 || len(r.Paths) > 0 || len(r.Inject) > 0 || r.RefuseCredentials || r.Limit.RequestsPerSecond > 0
}

// whole reports whether a rule that denies leaves nothing of its hosts.
func (r *Rule) whole() bool {
	return len(r.Ports) == 0 && r.Protocol == "" && len(r.Methods) == 0 && len(r.Paths) == 0
}

// Parse reads a policy. An error says on which line what is wrong, in a sentence.
func Parse(raw []byte) (*Document, error) {
	root, err := readYAML(raw)
	if err != nil {
		return nil, err
	}
	f, err := root.fields("contact", "rules")
	if err != nil {
		return nil, err
	}
	d := &Document{}
	if n, ok := f["contact"]; ok {
		if d.Contact, err = n.sentence("contact", 200); err != nil {
			return nil, err
		}
	}
	n, ok := f["rules"]
	if !ok || n.Kind != 0 && n.Tag == "!!seq" && len(n.Content) == 0 {
		return d, nil
	}
	items, err := n.items("rules", MaxRules)
	if err != nil {
		return nil, err
	}
	lines := map[string]int{}
	for _, item := range items {
		rules, err := readRule(item)
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			if line, twice := lines[r.Name]; twice {
				return nil, item.fail("there is a rule %s already, on line %d", r.Name, line)
			}
			lines[r.Name] = r.Line
			d.Rules = append(d.Rules, r)
		}
	}
	if len(d.Rules) > MaxRules {
		return nil, fmt.Errorf("there are %d rules with those of presets; at most %d are read", len(d.Rules), MaxRules)
	}
	return d, nil
}

// String is the rule in one line, as it is told in a difference.
func (r Rule) String() string {
	words := []string{"allow"}
	if r.Deny {
		words[0] = "deny"
	}
	if r.ReportOnly {
		words[0] = "report " + words[0]
	}
	hosts := make([]string, len(r.Hosts))
	for i, h := range r.Hosts {
		hosts[i] = h.String()
	}
	add := func(what string, values []string) {
		if len(values) > 0 {
			words = append(words, what+" "+strings.Join(values, ","))
		}
	}
	if r.Protocol != "" {
		words = append(words, string(r.Protocol))
	}
	words = append(words, strings.Join(hosts, ","))
	add("ports", portWords(r.Ports))
	add("methods", r.Methods)
	add("paths", r.Paths)
	if l := r.Limit.String(); l != "" {
		words = append(words, l)
	}
	for _, in := range r.Inject {
		words = append(words, in.String())
	}
	if r.RefuseCredentials {
		words = append(words, "refusing other credentials")
	}
	ranges := make([]string, len(r.Addresses))
	for i, a := range r.Addresses {
		ranges[i] = a.String()
	}
	add("addresses", ranges)
	return strings.Join(words, " ")
}

// String says the limit; empty if there is none.
func (l Limit) String() string {
	var out []string
	if l.RequestsPerSecond > 0 {
		out = append(out, fmt.Sprintf("%s requests/s burst %d", strconv.FormatFloat(l.RequestsPerSecond, 'f', -1, 64), l.Burst))
	}
	if l.BytesPerDay > 0 {
		out = append(out, strconv.FormatUint(l.BytesPerDay, 10)+" bytes/day")
	}
	if l.Connections > 0 {
		out = append(out, strconv.Itoa(l.Connections)+" connections")
	}
	return strings.Join(out, ", ")
}

// String says where the secret of which name is put in.
func (i Injection) String() string {
	if i.Query != "" {
		return fmt.Sprintf("putting secret %s into query %s as %q for %s", i.Secret, i.Query, i.Format, i.Placeholder)
	}
	return fmt.Sprintf("putting secret %s into header %s as %q for %s", i.Secret, i.Header, i.Format, i.Placeholder)
}

func portWords(ports []uint16) []string {
	out := make([]string, len(ports))
	for i, p := range ports {
		out[i] = strconv.Itoa(int(p))
	}
	return out
}
