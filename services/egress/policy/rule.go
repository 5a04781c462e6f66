package policy

import (
	"regexp"
	"slices"
	"strings"

	"github.com/berth-dev/berth/services/egress/authority"
)

var (
	ruleName   = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	methodName = regexp.MustCompile(`^[A-Z][A-Z-]{0,31}$`)
)

// readRule reads one rule; a preset is several.
func readRule(n node) ([]Rule, error) {
	f, err := n.fields("name", "preset", "allow", "deny", "limits", "inject", "refuse_credentials", "addresses", "report_only")
	if err != nil {
		return nil, err
	}
	if _, ok := f["preset"]; ok {
		return readPreset(n, f)
	}
	r := Rule{Line: n.Line}
	name, ok := f["name"]
	if !ok {
		return nil, n.fail("the rule has no name")
	}
	if r.Name, err = readName(name); err != nil {
		return nil, err
	}
	allow, isAllow := f["allow"]
	deny, isDeny := f["deny"]
	switch {
	case isAllow == isDeny:
		err = n.fail("rule %s needs one of allow, deny and preset", r.Name)
	case isAllow:
		err = readMatch(allow, &r)
	default:
		r.Deny = true
		err = readMatch(deny, &r)
	}
	if err == nil {
		err = readTerms(f, &r)
	}
	if err == nil {
		err = fit(n, &r)
	}
	return []Rule{r}, err
}

func readName(n node) (string, error) {
	s, err := n.text("name")
	if err == nil && !ruleName.MatchString(s) {
		err = n.fail("%s is no name of a rule: 1 to 63 small letters, digits and -", short(s))
	}
	return s, err
}

// readMatch reads what a rule matches.
func readMatch(n node, r *Rule) error {
	f, err := n.fields("hosts", "ports", "protocol", "methods", "paths")
	if err != nil {
		return err
	}
	hosts, ok := f["hosts"]
	if !ok {
		return n.fail("rule %s names no hosts", r.Name)
	}
	if r.Hosts, err = list(hosts, "hosts", readPattern); err != nil {
		return err
	}
	if p, ok := f["ports"]; ok {
		if r.Ports, err = list(p, "ports", readPort); err != nil {
			return err
		}
	}
	if p, ok := f["protocol"]; ok {
		if r.Protocol, err = readProtocol(p); err != nil {
			return err
		}
	}
	if m, ok := f["methods"]; ok {
		if r.Methods, err = list(m, "methods", readMethod); err != nil {
			return err
		}
	}
	if p, ok := f["paths"]; ok {
		r.Paths, err = list(p, "paths", readPath)
	}
	return err
}

// list reads entries that differ.
func list[T comparable](n node, what string, read func(node) (T, error)) ([]T, error) {
	items, err := n.items(what, maxList)
	if err != nil {
		return nil, err
	}
	out := make([]T, 0, len(items))
	seen := make(map[T]bool, len(items))
	for _, item := range items {
		v, err := read(item)
		if err != nil {
			return nil, err
		}
		if seen[v] {
			return nil, item.fail("%s is there twice", short(item.Value))
		}
		seen[v] = true
		out = append(out, v)
	}
	return out, nil
}

func readPattern(n node) (Pattern, error) {
	s, err := n.text("a host")
	if err != nil {
		return Pattern{}, err
	}
	text, below := strings.CutPrefix(s, "*.")
	if strings.Contains(text, "*") || s == "*" {
		return Pattern{}, n.fail("%s is no host: a star stands only before a name, as in *.example.com", short(s))
	}
	if below && strings.Count(text, ".") == 0 {
		return Pattern{}, n.fail("%s would match too much: at least two labels follow the star", short(s))
	}
	name, err := authority.ParseStrict(text)
	if err != nil {
		return Pattern{}, n.fail("%s", err)
	}
	return Pattern{Name: name, Below: below}, nil
}

func readPort(n node) (uint16, error) {
	p, err := n.whole("a port", 1, 65535)
	return uint16(p), err
}

func readProtocol(n node) (Protocol, error) {
	s, err := n.text("protocol")
	if err == nil && !slices.Contains([]Protocol{HTTP, HTTPS, TLS, TCP}, Protocol(s)) {
		err = n.fail("%s is no protocol; there are http, https, tls and tcp", short(s))
	}
	return Protocol(s), err
}

func readMethod(n node) (string, error) {
	s, err := n.text("a method")
	if err == nil && !methodName.MatchString(s) {
		err = n.fail("%s is no method: capital letters and -", short(s))
	}
	if err == nil && s == "CONNECT" {
		err = n.fail("CONNECT is no method of a request; name the host")
	}
	return s, err
}

func readPath(n node) (string, error) {
	s, err := n.text("a path")
	if err != nil {
		return "", err
	}
	c, err := CanonicalPath(s)
	switch {
	case err != nil:
		return "", n.fail("%s is no path: %s", short(s), err)
	case c != s:
		return "", n.fail("%s is not how this path is written: write %s", short(s), c)
	case s == "*" || looseReading(s) != s:
		return "", n.fail("%s is no path of a rule: it begins with /, without empty segments and encoded slashes", short(s))
	}
	return s, nil
}

// fit holds a rule to what belongs together, and fills in what follows from its protocol.
func fit(n node, r *Rule) error {
	if r.Protocol == "" && !r.Deny {
		r.Protocol = HTTPS
	}
	web := r.Protocol == HTTP || r.Protocol == HTTPS || r.Protocol == ""
	if !web && (len(r.Methods) > 0 || len(r.Paths) > 0) {
		return n.fail("rule %s: methods and paths need the protocol http or https", r.Name)
	}
	if r.Deny {
		if len(r.Inject) > 0 || r.RefuseCredentials || len(r.Addresses) > 0 || r.Limit != (Limit{}) {
			return n.fail("rule %s denies: limits, inject, refuse_credentials and addresses belong to rules that allow", r.Name)
		}
		return nil
	}
	if len(r.Ports) == 0 {
		switch r.Protocol {
		case HTTP:
			r.Ports = []uint16{80}
		case HTTPS, TLS:
			r.Ports = []uint16{443}
		default:
			return n.fail("rule %s: the protocol tcp needs ports", r.Name)
		}
	}
	exact := !slices.ContainsFunc(r.Hosts, func(p Pattern) bool { return p.Below })
	switch {
	case r.Protocol == TCP && !exact:
		return n.fail("rule %s: the protocol tcp needs exact hosts", r.Name)
	case len(r.Inject) > 0 && r.Protocol != HTTPS:
		return n.fail("rule %s: a secret is put in only where the protocol is https", r.Name)
	case len(r.Inject) > 0 && !exact:
		return n.fail("rule %s: a secret is put in only for exact hosts", r.Name)
	case !web && r.RefuseCredentials:
		return n.fail("rule %s: refuse_credentials needs the protocol http or https", r.Name)
	case !web && r.Limit.RequestsPerSecond > 0:
		return n.fail("rule %s: requests_per_second needs the protocol http or https", r.Name)
	}
	return nil
}
