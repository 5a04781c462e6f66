package tierpolicy

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
)

// maxCases of one file.
const maxCases = 5000

// Case is one question to a policy, and the answer that is wanted.
type Case struct {
	Name string
	Line int
	ask  core.TierAsk
	want want
}

// want is what must come out; what is empty is not looked at.
type want struct {
	tier, rule, refusal string
	unknown             []string
	checksUnknown       bool
}

// Result is what came out of one case.
type Result struct {
	Name string
	Line int
	// Tier is empty and Refusal says why when the open is refused.
	Tier, Rule, Reason, Refusal string
	Decision                    *corev1.TierDecision
	// Wrong says what is not as wanted; empty: passed.
	Wrong []string
}

// LoadCases reads a file of cases.
func LoadCases(path string) ([]Case, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, errs.E("read cases", errkind.Invalid, "", err)
	}
	return ParseCases(path, raw)
}

// ParseCases reads cases; file is how errors name it.
func ParseCases(file string, raw []byte) ([]Case, error) {
	doc, err := document(file, raw)
	if err != nil {
		return nil, err
	}
	top, err := node{doc, file, ""}.fields("cases")
	if err != nil {
		return nil, err
	}
	list, ok := top["cases"]
	if !ok {
		return nil, failure(file, 0, "cases are missing")
	}
	items, err := list.items()
	if err != nil {
		return nil, err
	}
	if len(items) == 0 || len(items) > maxCases {
		return nil, list.fail("there are %d cases; 1 to %d are needed", len(items), maxCases)
	}
	var out []Case
	for _, item := range items {
		c, err := readCase(item)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(o Case) bool { return o.Name == c.Name }) {
			return nil, item.fail("two cases are called %q", c.Name)
		}
		out = append(out, c)
	}
	return out, nil
}

func readCase(n node) (Case, error) {
	f, err := n.fields("name", "request", "tenant", "tiers", "offered", "not_held", "want")
	if err != nil {
		return Case{}, err
	}
	c := Case{Line: n.Line, ask: core.TierAsk{Template: "default", TemplateTier: corev1.Tier_TIER_GVISOR, Tenant: "acme", Plan: "default",
		Persistence: corev1.Persistence_PERSISTENCE_DURABLE}}
	name, ok := f["name"]
	if !ok {
		return Case{}, n.fail("a case has no name")
	}
	if c.Name, err = name.sentence(maxReason); err != nil {
		return Case{}, err
	}
	for key, v := range f {
		v.of = "case " + c.Name
		f[key] = v
	}
	n.of = "case " + c.Name
	if v, ok := f["want"]; !ok {
		return Case{}, n.fail("it wants nothing; say what must come out")
	} else if c.want, err = readWant(v); err != nil {
		return Case{}, err
	}
	if err := c.readFleet(f); err != nil {
		return Case{}, err
	}
	if v, ok := f["tenant"]; ok {
		if err := c.readTenant(v); err != nil {
			return Case{}, err
		}
	}
	if v, ok := f["request"]; ok {
		return c, c.readRequest(v)
	}
	return c, nil
}

func readWant(n node) (w want, err error) {
	f, err := n.fields("tier", "rule", "refusal", "unknown")
	if err != nil {
		return w, err
	}
	for key, to := range map[string]*string{"tier": &w.tier, "rule": &w.rule, "refusal": &w.refusal} {
		if v, ok := f[key]; ok {
			if *to, err = v.sentence(maxReason); err != nil {
				return w, err
			}
		}
	}
	if v, ok := f["unknown"]; ok {
		if w.unknown, err = v.words(); err != nil {
			return w, err
		}
		w.checksUnknown = true
	}
	switch {
	case (w.tier == "") == (w.refusal == ""):
		return w, n.fail("a tier or a refusal must be wanted, and not both")
	case w.tier != "":
		if _, err := core.ParseTier(w.tier); err != nil {
			return w, n.fail("there is no tier %.40q", w.tier)
		}
	}
	return w, nil
}

// readFleet reads what the installation allows and what ready hosts offer.
// Without offered scheduler could not be asked.
func (c *Case) readFleet(f map[string]node) error {
	names := tierNames
	if v, ok := f["tiers"]; ok {
		var err error
		if names, err = v.words(); err != nil {
			return err
		}
	}
	for _, name := range names {
		t, err := core.ParseTier(name)
		if err != nil {
			return f["tiers"].fail("there is no tier %.40q", name)
		}
		c.ask.Tiers = append(c.ask.Tiers, t)
	}
	n, ok := f["offered"]
	if !ok {
		return nil
	}
	c.ask.Fleet.Known = true
	offers, err := n.words()
	if err != nil {
		return err
	}
	for _, w := range offers {
		name, accel, _ := strings.Cut(w, "/")
		t, err := core.ParseTier(name)
		if err != nil || accel != "" && accel != "kvm" && accel != "tcg" {
			return n.fail("offered: %.40q is none of container, gvisor, kata/kvm, microvm/kvm, microvm/tcg, wasm", w)
		}
		c.ask.Fleet.Offers = append(c.ask.Fleet.Offers, core.Offer{Tier: t, Accel: accel})
	}
	if n, ok := f["not_held"]; ok {
		return n.pairs(func(name string, v node) error {
			limits, err := v.words()
			for i := range c.ask.Fleet.Offers {
				if core.TierName(c.ask.Fleet.Offers[i].Tier) == name {
					c.ask.Fleet.Offers[i].NotHeld = limits
				}
			}
			return err
		})
	}
	return nil
}

func (c *Case) readTenant(n node) error {
	f, err := n.fields("name", "plan", "floor")
	if err != nil {
		return err
	}
	if v, ok := f["name"]; ok {
		if c.ask.Tenant, err = v.sentence(maxName); err != nil {
			return err
		}
	}
	if v, ok := f["plan"]; ok {
		if c.ask.Plan, err = v.sentence(maxName); err != nil {
			return err
		}
	}
	return readEnum(f, "floor", &c.ask.Floor, "TIER_", corev1.Tier_value)
}

func (c *Case) readRequest(n node) error {
	f, err := n.fields("code_author", "tools", "data_class", "network", "tool_access", "untrusted_code", "min_tier", "template", "template_tier", "persistence")
	if err != nil {
		return err
	}
	risk := &identityv1.RiskFacts{}
	for _, key := range []string{"code_author", "tools", "data_class", "network", "tool_access", "untrusted_code"} {
		if _, ok := f[key]; ok {
			c.ask.Risk = risk
		}
	}
	if v, ok := f["template"]; ok {
		if c.ask.Template, err = v.sentence(maxName); err != nil {
			return err
		}
	}
	if v, ok := f["data_class"]; ok {
		if risk.DataClass, err = v.text(); err != nil {
			return err
		}
	}
	for key, to := range map[string]*bool{"tool_access": &risk.ToolAccess, "untrusted_code": &risk.UntrustedCode} {
		if v, ok := f[key]; ok {
			if *to, err = v.truth(); err != nil {
				return err
			}
		}
	}
	for _, err := range []error{
		readEnum(f, "code_author", &risk.CodeAuthor, "CODE_AUTHOR_", identityv1.CodeAuthor_value),
		readEnum(f, "tools", &risk.Tools, "TOOL_BREADTH_", identityv1.ToolBreadth_value),
		readEnum(f, "network", &risk.Network, "NETWORK_NEED_", identityv1.NetworkNeed_value),
		readEnum(f, "min_tier", &c.ask.MinTier, "TIER_", corev1.Tier_value),
		readEnum(f, "template_tier", &c.ask.TemplateTier, "TIER_", corev1.Tier_value),
		readEnum(f, "persistence", &c.ask.Persistence, "PERSISTENCE_", corev1.Persistence_value),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

// readEnum reads a word of the wire; a word that is not there leaves the value.
func readEnum[E ~int32](f map[string]node, key string, to *E, prefix string, values map[string]int32) error {
	n, ok := f[key]
	if !ok {
		return nil
	}
	w, err := n.text()
	if err != nil {
		return err
	}
	v, ok := values[prefix+strings.ToUpper(w)]
	if !ok || v == 0 {
		return n.fail("%s: %.40q is not known", key, w)
	}
	*to = E(v)
	return nil
}

// Run asks the policy every case.
func (p *Policy) Run(cases []Case) []Result {
	out := make([]Result, 0, len(cases))
	for _, c := range cases {
		d, why, err := core.ChooseTier(p, c.ask)
		r := Result{Name: c.Name, Line: c.Line, Decision: d, Rule: d.GetRule(), Reason: why}
		if err != nil {
			r.Reason, r.Refusal = "", err.Error()
		} else {
			r.Tier = core.TierName(d.GetChosen())
		}
		r.Wrong = c.want.compare(r)
		out = append(out, r)
	}
	return out
}

func (w want) compare(r Result) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	switch {
	case w.tier != "" && r.Tier != w.tier && r.Tier == "":
		say("tier %s is wanted, it is refused", w.tier)
	case w.tier != "" && r.Tier != w.tier:
		say("tier %s is wanted, it is %s", w.tier, r.Tier)
	case w.refusal != "" && r.Refusal == "":
		say("a refusal is wanted, it is tier %s", r.Tier)
	case w.refusal != "" && !strings.Contains(r.Refusal, w.refusal):
		say("a refusal that says %q is wanted", w.refusal)
	}
	if w.rule != "" && r.Rule != w.rule {
		say("rule %q is wanted, it is %q", w.rule, r.Rule)
	}
	if w.checksUnknown && !slices.Equal(w.unknown, r.Decision.GetUnknown()) {
		say("unknown must be %s, it is %s", words(w.unknown), words(r.Decision.GetUnknown()))
	}
	return wrong
}

func words(list []string) string {
	if len(list) == 0 {
		return "nothing"
	}
	return strings.Join(list, ", ")
}

// Rule is one rule for a reader.
type Rule struct {
	Tenant, Name, When, Reason string
	Tiers                      []string
}

// Rules lists the rules in the order in which they are asked: those of tenants first.
func (p *Policy) Rules() []Rule {
	var out []Rule
	add := func(tenant string, rules []rule) {
		for _, r := range rules {
			v := Rule{Tenant: tenant, Name: r.name, When: oneLine(r.when), Reason: r.reason}
			for _, t := range r.tiers {
				v.Tiers = append(v.Tiers, core.TierName(t))
			}
			out = append(out, v)
		}
	}
	for _, name := range p.tenantNames() {
		add(name, p.tenants[name].rules)
	}
	add("", p.rules)
	return out
}

// TenantRule is what the policy fixes for one tenant, for a reader.
type TenantRule struct {
	Tenant, Floor string
	Wasm          bool
}

// Tenants lists what the policy fixes for tenants, by name.
func (p *Policy) Tenants() []TenantRule {
	var out []TenantRule
	for _, name := range p.tenantNames() {
		t := TenantRule{Tenant: name, Wasm: p.tenants[name].Wasm}
		if f := p.tenants[name].Floor; f != 0 {
			t.Floor = core.TierName(f)
		}
		out = append(out, t)
	}
	return out
}

func (p *Policy) tenantNames() []string {
	var out []string
	for name := range p.tenants {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}
