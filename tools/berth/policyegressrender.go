package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/policy"
)

// scopeOut is what a policy is for.
type scopeOut struct {
	Layer  string `json:"layer"`
	Name   string `json:"name,omitempty"`
	Tenant string `json:"tenant,omitempty"`
}

func scopeOutOf(s *egressv1.Scope) scopeOut {
	return scopeOut{policy.LayerName(s.GetLayer()), s.GetName(), s.GetTenant()}
}

func (s scopeOut) String() string {
	if s.Name == "" {
		return s.Layer
	}
	return s.Layer + " " + s.Name
}

type egressAppliedOut struct {
	scopeOut
	// Replaced is the generation before, 0: none. Generation is the new one; absent with --dry-run.
	Replaced   uint64         `json:"replaced"`
	Generation uint64         `json:"generation,omitempty"`
	DryRun     bool           `json:"dry_run"`
	Rules      int            `json:"rules"`
	Changes    policy.Changes `json:"changes"`
}

func (a *app) renderEgressApplied(o egressAppliedOut) {
	fmt.Fprint(a.stdout, plainLines(o.Changes.String()))
	switch {
	case o.DryRun:
		fmt.Fprintf(a.stdout, "the policy of %s would have %s; nothing was applied\n", o.scopeOut, count(o.Rules, "rule", "rules"))
	case o.Replaced == 0:
		fmt.Fprintf(a.stdout, "the policy of %s has %s: generation %d, the first\n", o.scopeOut, count(o.Rules, "rule", "rules"), o.Generation)
	default:
		fmt.Fprintf(a.stdout, "the policy of %s has %s: generation %d, in place of %d\n", o.scopeOut, count(o.Rules, "rule", "rules"), o.Generation, o.Replaced)
	}
}

// plainLines is plain for text of several lines.
func plainLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = plain(lines[i])
	}
	return strings.Join(lines, "\n")
}

type egressPoliciesOut struct {
	Policies []egressPolicyOut `json:"policies"`
}

type egressPolicyOut struct {
	scopeOut
	Generation uint64    `json:"generation"`
	AppliedAt  time.Time `json:"applied_at"`
	AppliedBy  string    `json:"applied_by"`
	Contact    string    `json:"contact,omitempty"`
	Rules      []ruleOut `json:"rules"`
	Document   string    `json:"document"`
	// Unreadable is why this version cannot read the document.
	Unreadable string `json:"unreadable,omitempty"`
}

// ruleOut is one rule, presets as those that they stand for.
type ruleOut struct {
	Name string `json:"name"`
	Line int    `json:"line"`
	Text string `json:"text"`
}

func egressPoliciesOutOf(all []*egressv1.Policy) egressPoliciesOut {
	out := egressPoliciesOut{Policies: []egressPolicyOut{}}
	for _, p := range all {
		o := egressPolicyOut{scopeOut: scopeOutOf(p.GetScope()), Generation: p.GetGeneration(), AppliedAt: p.GetAppliedAt().AsTime(), AppliedBy: p.GetAppliedBy(),
			Rules: []ruleOut{}, Document: string(p.GetDocument())}
		d, err := policy.Parse(p.GetDocument())
		if err != nil {
			o.Unreadable = err.Error()
		} else {
			o.Contact = d.Contact
			for _, r := range d.Rules {
				o.Rules = append(o.Rules, ruleOut{r.Name, r.Line, r.String()})
			}
		}
		out.Policies = append(out.Policies, o)
	}
	return out
}

func (a *app) renderEgressPolicies(out egressPoliciesOut, one bool) {
	if one && len(out.Policies) == 1 {
		p := out.Policies[0]
		fmt.Fprintf(a.stdout, "# policy of %s, generation %d, applied %s by %s\n", p.scopeOut, p.Generation, when(p.AppliedAt), plain(or(p.AppliedBy, "somebody")))
		fmt.Fprintln(a.stdout, strings.TrimSuffix(plainLines(p.Document), "\n"))
		return
	}
	if len(out.Policies) == 0 {
		fmt.Fprintln(a.stdout, "no policies: nothing may leave any sandbox")
		return
	}
	rows := [][]string{{"LAYER", "NAME", "GENERATION", "RULES", "APPLIED", "BY"}}
	for _, p := range out.Policies {
		rules := strconv.Itoa(len(p.Rules))
		if p.Unreadable != "" {
			rules = "unreadable"
		}
		rows = append(rows, []string{p.Layer, plain(or(p.Name, "-")), strconv.FormatUint(p.Generation, 10), rules, p.AppliedAt.UTC().Format(time.DateTime), plain(or(p.AppliedBy, "-"))})
	}
	table(a.stdout, rows)
}

type egressRemovedOut struct {
	scopeOut
	Generation uint64 `json:"generation"`
	Removed    bool   `json:"removed"`
}

type egressDiffOut struct {
	Scope      *scopeOut      `json:"scope,omitempty"`
	Generation uint64         `json:"generation,omitempty"`
	Changes    policy.Changes `json:"changes"`
}

func (a *app) renderEgressDiff(out egressDiffOut) {
	if out.Changes.None() {
		fmt.Fprintln(a.stdout, "nothing would change")
		return
	}
	fmt.Fprint(a.stdout, plainLines(out.Changes.String()))
}

type egressTestOut struct {
	Layers []layerOut      `json:"layers"`
	Passed int             `json:"passed"`
	Failed int             `json:"failed"`
	Cases  []egressCaseOut `json:"cases"`

	single bool
}

// layerOut is a layer that was asked, the most specific first; generation 0 is a file's.
type layerOut struct {
	scopeOut
	Generation uint64 `json:"generation"`
	Rules      int    `json:"rules"`
}

type egressCaseOut struct {
	Name       string   `json:"name"`
	Line       int      `json:"line,omitempty"`
	Request    string   `json:"request"`
	Passed     bool     `json:"passed"`
	Allowed    bool     `json:"allowed"`
	Reason     string   `json:"reason"`
	Rule       string   `json:"rule,omitempty"`
	Layer      string   `json:"layer,omitempty"`
	Generation uint64   `json:"generation,omitempty"`
	Reported   string   `json:"reported,omitempty"`
	Resolves   bool     `json:"resolves"`
	Text       string   `json:"text"`
	Wrong      []string `json:"wrong"`
}

func egressTestOutOf(p *policy.Policy, results []policy.Result, single bool) egressTestOut {
	out := egressTestOut{Layers: []layerOut{}, Cases: []egressCaseOut{}, single: single}
	for _, l := range p.Layers() {
		out.Layers = append(out.Layers, layerOut{scopeOutOf(l.Scope), l.Generation, len(l.Document.Rules)})
	}
	for _, r := range results {
		d := r.Decision
		c := egressCaseOut{Name: r.Name, Line: r.Line, Request: r.Probe.String(), Passed: single || len(r.Wrong) == 0, Allowed: d.Allowed, Reason: string(d.Reason), Rule: d.Rule,
			Layer: policy.LayerName(d.Layer), Generation: d.Generation, Reported: d.Reported, Resolves: r.Resolves, Text: r.Sentence, Wrong: []string{}}
		if c.Passed {
			out.Passed++
		} else {
			out.Failed++
			c.Wrong = append(c.Wrong, r.Wrong...)
		}
		out.Cases = append(out.Cases, c)
	}
	return out
}

func allowedWord(is bool) string {
	if is {
		return "allowed"
	}
	return "denied"
}

func (a *app) renderEgressTest(out egressTestOut) {
	if out.single {
		c := out.Cases[0]
		resolves := ""
		if !c.Resolves {
			resolves = "the name is not answered for"
		}
		a.fields("request", c.Request, "verdict", allowedWord(c.Allowed), "reason", c.Reason, "rule", c.Rule, "layer", c.Layer, "report-only", c.Reported, "dns", resolves, "says", c.Text)
		return
	}
	rows := [][]string{{"", "CASE", "VERDICT", "RULE", "REASON, OR WHAT IS NOT AS WANTED"}}
	for _, c := range out.Cases {
		result, why := "pass", c.Reason
		if !c.Passed {
			result, why = "FAIL", strings.Join(c.Wrong, "; ")
		}
		rows = append(rows, []string{result, plain(c.Name), allowedWord(c.Allowed), or(c.Rule, "-"), why})
	}
	table(a.stdout, rows)
	var by []string
	for _, l := range out.Layers {
		by = append(by, l.String())
	}
	fmt.Fprintf(a.stdout, "%d passed, %d failed, by the policies of %s\n", out.Passed, out.Failed, or(plain(strings.Join(by, ", ")), "nobody"))
}

type egressReplayOut struct {
	scopeOut
	Since string `json:"since"`
	policy.Replayed
}

func (a *app) renderEgressReplay(out egressReplayOut) {
	if len(out.Changed) > 0 {
		rows := [][]string{{"NOW", "TIMES", "SESSIONS", "REQUEST", "RULE", "REASON"}}
		for _, c := range out.Changed {
			rows = append(rows, []string{allowedWord(c.Now), strconv.FormatUint(c.Times, 10), strconv.Itoa(c.Sessions), plain(c.Request().String()), or(c.Rule, "-"), string(c.Reason)})
		}
		table(a.stdout, rows)
	}
	var denied, allowed uint64
	for _, c := range out.Changed {
		if c.Now {
			allowed += c.Times
		} else {
			denied += c.Times
		}
	}
	fmt.Fprintf(a.stdout, "of %d in the last %s: %d would be denied now, %d allowed, %d as before", out.Times, out.Since, denied, allowed, out.Same)
	if out.Unknown > 0 {
		fmt.Fprintf(a.stdout, "; %d named nothing that a policy could judge", out.Unknown)
	}
	fmt.Fprintln(a.stdout)
}

type egressAllowedOut struct {
	scopeOut
	Replaced   uint64 `json:"replaced"`
	Generation uint64 `json:"generation,omitempty"`
	DryRun     bool   `json:"dry_run"`
	Rule       string `json:"rule"`
	Text       string `json:"text"`
	Document   string `json:"document"`
}

func (a *app) renderEgressAllowed(o egressAllowedOut) {
	fmt.Fprintf(a.stdout, "+ %s: %s\n", o.Rule, plain(o.Text))
	if o.DryRun {
		fmt.Fprintf(a.stdout, "the policy of %s would have this rule; nothing was applied\n", o.scopeOut)
		return
	}
	fmt.Fprintf(a.stdout, "the policy of %s has this rule: generation %d\n", o.scopeOut, o.Generation)
}
