package main

import (
	"fmt"
	"strings"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/lifecycle/tierpolicy"
)

type policyCmd struct {
	Tier   policyTierCmd   `cmd:"" help:"The policy that chooses the isolation tier by risk."`
	Egress policyEgressCmd `cmd:"" help:"The policies that say what may leave a sandbox."`
}

type policyTierCmd struct {
	Test policyTestCmd `cmd:"" help:"Ask a policy the cases of a file and say which come out as wanted."`
	Show policyShowCmd `cmd:"" help:"Print the policy in force, or a file (--policy): rules in the order in which they are asked."`
	Lint policyLintCmd `cmd:"" help:"Check a policy file."`
}

// policyFlag names a policy.
type policyFlag struct {
	Policy string `help:"File of the policy; default: the one that is built in." type:"path" placeholder:"FILE"`
}

// load reads the policy; a file that is wrong is wrong usage.
func (f policyFlag) load() (*tierpolicy.Policy, error) {
	p, err := tierpolicy.Load(f.Policy)
	if err != nil {
		return nil, exitCode{2, err.Error()}
	}
	return p, nil
}

type policyTestCmd struct {
	policyFlag
	File string `arg:"" help:"File of cases." type:"path" placeholder:"FILE"`
}

func (c *policyTestCmd) Run(a *app) error {
	p, err := c.load()
	if err != nil {
		return err
	}
	cases, err := tierpolicy.LoadCases(c.File)
	if err != nil {
		return exitCode{2, err.Error()}
	}
	out := policyTestOutOf(p, cases)
	if err := a.print(out, func() { a.renderPolicyTest(out) }); err != nil {
		return err
	}
	if out.Failed > 0 {
		return exitCode{1, fmt.Sprintf("%d of %s came out otherwise", out.Failed, count(len(out.Cases), "case", "cases"))}
	}
	return nil
}

type policyTestOut struct {
	Policy string          `json:"policy"`
	Passed int             `json:"passed"`
	Failed int             `json:"failed"`
	Cases  []policyCaseOut `json:"cases"`
}

type policyCaseOut struct {
	Name    string `json:"name"`
	Line    int    `json:"line"`
	Passed  bool   `json:"passed"`
	Tier    string `json:"tier,omitempty"`
	Rule    string `json:"rule,omitempty"`
	Reason  string `json:"reason,omitempty"`
	Refusal string `json:"refusal,omitempty"`
	// Wrong says what is not as wanted.
	Wrong    []string     `json:"wrong"`
	Decision *decisionOut `json:"decision,omitempty"`
}

// decisionOut is why an isolation tier was chosen.
type decisionOut struct {
	Chosen     string            `json:"chosen,omitempty"`
	Floor      string            `json:"floor,omitempty"`
	FloorFrom  string            `json:"floor_from,omitempty"`
	Rule       string            `json:"rule,omitempty"`
	Wanted     string            `json:"wanted,omitempty"`
	Least      string            `json:"least,omitempty"`
	Facts      map[string]string `json:"facts"`
	Unknown    []string          `json:"unknown"`
	PassedOver []string          `json:"passed_over"`
}

func decisionOutOf(d *corev1.TierDecision) *decisionOut {
	if d == nil {
		return nil
	}
	out := &decisionOut{Chosen: word(d.GetChosen(), "TIER_"), Floor: word(d.GetFloor(), "TIER_"), FloorFrom: d.GetFloorFrom(),
		Rule: d.GetRule(), Wanted: word(d.GetWanted(), "TIER_"), Least: word(d.GetLeast(), "TIER_"), Facts: map[string]string{},
		Unknown: append([]string{}, d.GetUnknown()...), PassedOver: append([]string{}, d.GetPassedOver()...)}
	for k, v := range d.GetFacts() {
		out.Facts[k] = v
	}
	return out
}

func policyTestOutOf(p *tierpolicy.Policy, cases []tierpolicy.Case) policyTestOut {
	out := policyTestOut{Policy: p.Source, Cases: []policyCaseOut{}}
	for _, r := range p.Run(cases) {
		c := policyCaseOut{Name: r.Name, Line: r.Line, Passed: len(r.Wrong) == 0, Tier: r.Tier, Rule: r.Rule, Reason: r.Reason,
			Refusal: r.Refusal, Wrong: append([]string{}, r.Wrong...), Decision: decisionOutOf(r.Decision)}
		out.Cases = append(out.Cases, c)
		if c.Passed {
			out.Passed++
		} else {
			out.Failed++
		}
	}
	return out
}

func (a *app) renderPolicyTest(out policyTestOut) {
	rows := [][]string{{"", "CASE", "TIER", "RULE", "WHY, OR WHAT IS NOT AS WANTED"}}
	for _, c := range out.Cases {
		verdict, why := "pass", or(c.Reason, c.Refusal)
		if !c.Passed {
			verdict, why = "FAIL", strings.Join(c.Wrong, "; ")
			if c.Refusal != "" {
				why += " (" + c.Refusal + ")"
			}
		}
		rows = append(rows, []string{verdict, plain(c.Name), or(c.Tier, "refused"), plain(or(c.Rule, "-")), plain(why)})
	}
	table(a.stdout, rows)
	fmt.Fprintf(a.stdout, "%d passed, %d failed, by the policy of %s\n", out.Passed, out.Failed, plain(out.Policy))
}

type policyShowCmd struct {
	Policy  string `help:"Show this file instead of the policy in force." type:"path" placeholder:"FILE" xor:"which"`
	BuiltIn bool   `help:"Show the default that is built in." xor:"which"`
}

func (c *policyShowCmd) Run(a *app) error {
	var p *tierpolicy.Policy
	var err error
	if c.Policy != "" || c.BuiltIn {
		p, err = policyFlag{c.Policy}.load()
	} else {
		p, err = a.policyInForce()
	}
	if err != nil {
		return err
	}
	out := policyOutOf(p)
	return a.print(out, func() { a.renderPolicy(out) })
}

// policyInForce is what lifecycle goes by now.
func (a *app) policyInForce() (*tierpolicy.Policy, error) {
	op, err := a.operator()
	if err != nil {
		return nil, err
	}
	defer op.Close()
	reply := &lifecyclev1.TierPolicyReply{}
	if err := op.Call(a.ctx, "lifecycle", "tier_policy", &lifecyclev1.TierPolicyRequest{}, reply); err != nil {
		return nil, err
	}
	return tierpolicy.Parse(reply.GetSource(), []byte(reply.GetText()))
}

type policyOut struct {
	Source         string            `json:"source"`
	DataClasses    []string          `json:"data_classes"`
	EmulatedCounts bool              `json:"emulated_counts"`
	Tenants        []policyTenantOut `json:"tenants"`
	Rules          []policyRuleOut   `json:"rules"`
	// Text is the whole file.
	Text string `json:"text"`
}

type policyTenantOut struct {
	Tenant string `json:"tenant"`
	Floor  string `json:"floor,omitempty"`
	Wasm   bool   `json:"wasm"`
}

type policyRuleOut struct {
	Tenant string   `json:"tenant,omitempty"`
	Name   string   `json:"name"`
	When   string   `json:"when"`
	Tier   []string `json:"tier"`
	Reason string   `json:"reason"`
}

func policyOutOf(p *tierpolicy.Policy) policyOut {
	out := policyOut{Source: p.Source, DataClasses: append([]string{}, p.Classes()...), EmulatedCounts: p.EmulatedCounts(),
		Tenants: []policyTenantOut{}, Rules: []policyRuleOut{}, Text: string(p.Text)}
	for _, t := range p.Tenants() {
		out.Tenants = append(out.Tenants, policyTenantOut{t.Tenant, t.Floor, t.Wasm})
	}
	for _, r := range p.Rules() {
		out.Rules = append(out.Rules, policyRuleOut{r.Tenant, r.Name, r.When, r.Tiers, r.Reason})
	}
	return out
}

func (a *app) renderPolicy(p policyOut) {
	emulated := "counts as no stronger than gvisor: no rule chooses it"
	if p.EmulatedCounts {
		emulated = "counts like one with hardware support"
	}
	a.fields("source", p.Source, "data classes", strings.Join(p.DataClasses, " < ")+" (another word counts as the last)", "an emulated machine", emulated)
	for _, t := range p.Tenants {
		wasm := ""
		if t.Wasm {
			wasm = ", wasm is allowed"
		}
		fmt.Fprintf(a.stdout, "tenant %s: floor %s%s\n", t.Tenant, or(t.Floor, "-"), wasm)
	}
	rows := [][]string{{"RULE", "OF", "TIER", "REASON"}}
	for _, r := range p.Rules {
		rows = append(rows, []string{r.Name, or(r.Tenant, "everybody"), strings.Join(r.Tier, ", "), r.Reason})
	}
	fmt.Fprintln(a.stdout)
	table(a.stdout, rows)
	fmt.Fprintf(a.stdout, "\n%s", strings.TrimRight(p.Text, "\n")+"\n")
}

type policyLintCmd struct {
	File string `arg:"" help:"File of the policy." type:"path" placeholder:"FILE"`
}

func (c *policyLintCmd) Run(a *app) error {
	p, err := tierpolicy.Load(c.File)
	if err != nil {
		return exitCode{1, err.Error()}
	}
	out := policyLintOut{File: c.File, Rules: len(p.Rules()), Tenants: len(p.Tenants())}
	return a.print(out, func() { a.renderPolicyLint(out) })
}

func (a *app) renderPolicyLint(out policyLintOut) {
	fmt.Fprintf(a.stdout, "%s is a tier policy: %s, %s\n", plain(out.File), count(out.Rules, "rule", "rules"), count(out.Tenants, "section of a tenant", "sections of tenants"))
}

type policyLintOut struct {
	File    string `json:"file"`
	Rules   int    `json:"rules"`
	Tenants int    `json:"tenants"`
}

// riskFlags say what is known of the code that will run. What is left out counts as the riskiest.
type riskFlags struct {
	CodeAuthor string `help:"Who wrote the code: operator, user, model or third_party." placeholder:"WHO"`
	Tools      string `help:"What it is asked to do: bounded (one call), fixed (programs of the template) or any." placeholder:"BREADTH"`
	DataClass  string `help:"How sensitive its data is, in a word of the tier policy, for example internal." placeholder:"WORD"`
	Network    string `help:"How far it must reach: none, named or open. Chooses the tier only; what it can reach, its egress policy says." placeholder:"REACH"`
	ToolAccess bool   `help:"It can call tools."`
	Untrusted  bool   `help:"The code was not written by the user."`
}

func (f riskFlags) risk() sdk.Risk {
	return sdk.Risk{CodeAuthor: sdk.CodeAuthor(f.CodeAuthor), Tools: sdk.ToolBreadth(f.Tools), Network: sdk.NetworkNeed(f.Network),
		DataClass: f.DataClass, ToolAccess: f.ToolAccess, UntrustedCode: f.Untrusted}
}

// tierSentences say why the isolation tier is what it is.
func tierSentences(d *decisionOut) (out []string) {
	if d == nil {
		return nil
	}
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	floor := "nobody asked for more"
	if d.Floor != "" {
		floor = "nothing weaker than " + d.Floor + " was allowed (" + d.FloorFrom + ")"
	}
	say("Its tier is %s: rule %q of the tier policy asked for %s, and %s.", d.Chosen, d.Rule, or(d.Wanted, "nothing"), floor)
	if len(d.Unknown) > 0 {
		say("Not told, or not in a word of the policy: %s. That counted as the riskiest.", strings.Join(d.Unknown, ", "))
	}
	if len(d.PassedOver) > 0 {
		say("Better tiers were passed over: %s.", strings.Join(d.PassedOver, "; "))
	}
	return out
}
