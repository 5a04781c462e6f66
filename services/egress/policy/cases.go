package policy

import (
	"fmt"
)

// MaxCases is the largest number of cases in a file.
const MaxCases = 10_000

// Case is a request and what is wanted of a policy.
type Case struct {
	Name  string
	Line  int
	Probe Probe
	// Allowed is wanted, else denied.
	Allowed bool
	// Rule and Reason that are wanted; empty: any.
	Rule   string
	Reason Reason
}

// Result of a case.
type Result struct {
	Case
	Decision Decision
	// Resolves: the name is answered for.
	Resolves bool
	// Wrong says what is not as wanted; none: nothing is.
	Wrong []string
	// Sentence is what its user would read.
	Sentence string
}

// ParseCases reads a file of cases:
//
//	cases:
//	  - name: reading is allowed
//	    request: GET https://api.example.com/v1/things
//	    want: allowed
//	    rule: api
func ParseCases(raw []byte) ([]Case, error) {
	root, err := readYAML(raw)
	if err != nil {
		return nil, err
	}
	f, err := root.fields("cases")
	if err != nil {
		return nil, err
	}
	list, ok := f["cases"]
	if !ok {
		return nil, root.fail("there are no cases")
	}
	items, err := list.items("cases", MaxCases)
	if err != nil {
		return nil, err
	}
	out := make([]Case, 0, len(items))
	for _, item := range items {
		c, err := readCase(item)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

func readCase(n node) (Case, error) {
	c := Case{Line: n.Line}
	f, err := n.fields("name", "request", "want", "rule", "reason")
	if err != nil {
		return c, err
	}
	request, ok := f["request"]
	if !ok {
		return c, n.fail("the case has no request")
	}
	text, err := request.sentence("request", maxPath)
	if err != nil {
		return c, err
	}
	if c.Probe, err = ParseProbe(text); err != nil {
		return c, request.fail("%s", err)
	}
	c.Name = text
	if v, ok := f["name"]; ok {
		if c.Name, err = v.sentence("name", 200); err != nil {
			return c, err
		}
	}
	want, ok := f["want"]
	if !ok || want.Value != "allowed" && want.Value != "denied" {
		return c, n.fail("want is allowed or denied")
	}
	c.Allowed = want.Value == "allowed"
	if v, ok := f["rule"]; ok {
		if c.Rule, err = v.text("rule"); err != nil {
			return c, err
		}
	}
	if v, ok := f["reason"]; ok {
		var reason string
		if reason, err = v.text("reason"); err != nil {
			return c, err
		}
		if _, known := because[Reason(reason)]; !known && Reason(reason) != Allowed && Reason(reason) != DeniedRule {
			return c, v.fail("%s is no reason", short(reason))
		}
		c.Reason = Reason(reason)
	}
	return c, nil
}

// Run asks the policy each case.
func (p *Policy) Run(cases []Case) []Result {
	out := make([]Result, 0, len(cases))
	for _, c := range cases {
		out = append(out, p.run(c))
	}
	return out
}

func (p *Policy) run(c Case) Result {
	d := p.Probe(c.Probe)
	r := Result{Case: c, Decision: d, Resolves: p.MayResolve(c.Probe.Request.Name), Sentence: c.Probe.Sentence(d)}
	if d.Allowed != c.Allowed {
		r.Wrong = append(r.Wrong, fmt.Sprintf("it is %s, not %s", verdict(d.Allowed), verdict(c.Allowed)))
	}
	if c.Rule != "" && c.Rule != d.Rule {
		r.Wrong = append(r.Wrong, fmt.Sprintf("by %s, not by rule %s", ruleWord(d.Rule), c.Rule))
	}
	if c.Reason != "" && c.Reason != d.Reason {
		r.Wrong = append(r.Wrong, fmt.Sprintf("the reason is %s, not %s", d.Reason, c.Reason))
	}
	return r
}

func verdict(allowed bool) string {
	if allowed {
		return "allowed"
	}
	return "denied"
}

func ruleWord(name string) string {
	if name == "" {
		return "no rule"
	}
	return "rule " + name
}
