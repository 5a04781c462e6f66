package core

import (
	"fmt"
	"slices"
	"strings"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// ordered are the tiers that can be compared, weakest first. Wasm and null stand
// outside: they are used only where the template names them, and nothing is
// ever exchanged for them.
var ordered = [...]corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_KATA, corev1.Tier_TIER_MICROVM}

// Strength is the tier's place in the order, from 1; 0: it stands outside.
func Strength(t corev1.Tier) int { return slices.Index(ordered[:], t) + 1 }

// TierRules is a tier policy that was read and checked. Its methods are pure:
// the same arguments give the same answer, at any time, from any goroutine.
type TierRules interface {
	// Classes of data that the policy knows, least sensitive first.
	Classes() []string
	// EmulatedCounts: a virtual machine without hardware support counts as one.
	EmulatedCounts() bool
	// Tenant is what the policy says of one tenant; the zero value for nothing.
	Tenant(name string) TenantRule
	// Ask finds the rule that decides. An error is one sentence: the policy cannot
	// say, and the open is refused. offers are those of ready hosts.
	Ask(f Facts, known bool, offers []Offer) (Answer, error)
}

// TenantRule is what a policy fixes for one tenant beside its rules.
type TenantRule struct {
	// Floor is the weakest tier allowed, beside identity's own; 0: none.
	Floor corev1.Tier
	// Wasm is allowed although a floor is set.
	Wasm bool
}

// Answer is what a rule asks for: one of Tiers, the first that can be had, and
// nothing weaker than it. It can raise a tier, never lower one.
type Answer struct {
	Rule   string
	Tiers  []corev1.Tier
	Reason string
}

// Riskiest is the answer when no rule has one.
func Riskiest() Answer {
	return Answer{Rule: "(no rule)", Reason: "no rule of the tier policy fits",
		Tiers: []corev1.Tier{corev1.Tier_TIER_MICROVM, corev1.Tier_TIER_KATA, corev1.Tier_TIER_GVISOR}}
}

// TierAsk is all that the choice of a tier depends on.
type TierAsk struct {
	Risk         *identityv1.RiskFacts
	MinTier      corev1.Tier
	Template     string
	TemplateTier corev1.Tier
	// TemplateNamed: the caller named the template; else it is the plan's.
	TemplateNamed bool
	Persistence   corev1.Persistence
	Tenant, Plan  string
	Floor         corev1.Tier
	// Tiers that the installation allows.
	Tiers []corev1.Tier
	Fleet Fleet
}

// ChooseTier takes the strongest of what the template, the tenant, the caller
// and the rule ask for, and the weakest tier that is offered and not weaker than
// that. It walks only over tiers from the floor upwards, so that what a rule
// says cannot come out below it. why is one sentence for the session's terms.
func ChooseTier(rules TierRules, a TierAsk) (d *corev1.TierDecision, why string, err error) {
	if rules == nil {
		rules = noRules{}
	}
	c := choice{TierAsk: a, rules: rules, tenant: rules.Tenant(a.Tenant)}
	c.ready, c.away = a.Fleet.stand(a.Tiers)
	c.facts = Facts{MinTier: tierWord(a.MinTier), Template: a.Template, TemplateTier: tierWord(a.TemplateTier),
		Persistence: enumWord(a.Persistence.String(), "PERSISTENCE_"), Tenant: a.Tenant, Plan: a.Plan}
	c.facts.told(a.Risk, rules.Classes())
	d = &corev1.TierDecision{Unknown: c.facts.Unknown}
	defer func() { d.Facts = c.facts.words(a.Fleet, c.ready) }()
	if a.TemplateTier == corev1.Tier_TIER_NULL {
		return d, templateSays, c.null(d)
	}
	if err := c.floor(d); err != nil {
		return d, "", err
	}
	answer, err := rules.Ask(c.facts, a.Fleet.Known, c.ready)
	if err != nil {
		return d, "", fmt.Errorf("the tier policy cannot say which tier is needed: %w", err)
	}
	d.Rule, d.Least = answer.Rule, c.least(answer)
	if a.TemplateTier == corev1.Tier_TIER_WASM {
		return d, answer.Reason, c.wasm(d, answer)
	}
	return c.raise(d, answer)
}

// choice is one choice under way.
type choice struct {
	TierAsk
	rules       TierRules
	tenant      TenantRule
	facts       Facts
	ready, away []Offer
}

// Who asks for a floor.
const (
	templateSays = "the template's tier"
	tenantSays   = "the tenant's floor"
	policySays   = "the tier policy's floor for this tenant"
	callerSays   = "asked for by the caller"
)

// floor sets the weakest tier allowed, and who asks for it.
func (c *choice) floor(d *corev1.TierDecision) error {
	for _, f := range []struct {
		tier corev1.Tier
		from string
	}{{c.TemplateTier, templateSays}, {c.Floor, tenantSays}, {c.tenant.Floor, policySays}, {c.MinTier, callerSays}} {
		switch {
		case f.tier == corev1.Tier_TIER_UNSPECIFIED:
		case Strength(f.tier) > 0:
			if Strength(f.tier) > Strength(d.Floor) {
				d.Floor, d.FloorFrom = f.tier, f.from
			}
		case f.tier == corev1.Tier_TIER_WASM && c.TemplateTier == corev1.Tier_TIER_WASM && (f.from == templateSays || f.from == callerSays):
		default:
			return fmt.Errorf("%s is %s, which cannot be compared with other tiers", f.from, TierName(f.tier))
		}
	}
	if c.facts.Floor = tierWord(c.Floor); Strength(c.tenant.Floor) > Strength(c.Floor) {
		c.facts.Floor = tierWord(c.tenant.Floor)
	}
	return nil
}

// least is the weakest tier of an awake session that this open may join: the
// strongest of the tenant's floors, what the caller asks for, the template that it
// names, and, when it tells anything of the risk, the weakest tier that the rule
// is content with. An open that says nothing joins a session as it was opened:
// null, which every tier satisfies, unless the tenant has a floor.
func (c *choice) least(answer Answer) corev1.Tier {
	if c.TemplateTier == corev1.Tier_TIER_WASM && (c.TemplateNamed || c.MinTier == corev1.Tier_TIER_WASM) {
		return corev1.Tier_TIER_WASM
	}
	of := []corev1.Tier{c.Floor, c.tenant.Floor, c.MinTier}
	if c.TemplateNamed {
		of = append(of, c.TemplateTier)
	}
	if !silent(c.Risk) && c.TemplateTier != corev1.Tier_TIER_WASM {
		of = append(of, slices.MinFunc(inOrder(answer), byStrength))
	}
	if most := slices.MaxFunc(of, byStrength); Strength(most) > 0 {
		return most
	}
	return corev1.Tier_TIER_NULL
}

// inOrder are the tiers that a rule asks for, without those outside the order.
func inOrder(answer Answer) []corev1.Tier {
	wants := slices.DeleteFunc(slices.Clone(answer.Tiers), func(t corev1.Tier) bool { return Strength(t) == 0 })
	if len(wants) == 0 { // only wasm, which this template is not
		return Riskiest().Tiers
	}
	return wants
}

func byStrength(a, b corev1.Tier) int { return Strength(a) - Strength(b) }

// raise finds the first tier of the rule that can be had at or above the floor:
// among what ready hosts offer, else among what hosts that are away have.
func (c *choice) raise(d *corev1.TierDecision, answer Answer) (*corev1.TierDecision, string, error) {
	wants := inOrder(answer)
	for _, offers := range [][]Offer{c.ready, c.away} {
		var passed []string
		for _, want := range wants {
			if got := c.weakest(d.Floor, want, offers); got != corev1.Tier_TIER_UNSPECIFIED {
				d.Chosen, d.Wanted, d.PassedOver = got, want, passed
				return d, c.why(d, answer), nil
			}
			passed = append(passed, c.missing(want, offers))
		}
		if d.PassedOver == nil {
			d.PassedOver = passed
		}
	}
	d.Wanted = slices.MinFunc(wants, byStrength)
	return d, "", c.refusal(d, wants, answer)
}

// weakest is the weakest offer that is neither below the floor nor below want.
// A machine that is emulated stands in for nothing: it is taken only where
// template, tenant or caller name it, or the policy counts it as a machine.
func (c *choice) weakest(floor, want corev1.Tier, offers []Offer) corev1.Tier {
	least := max(Strength(floor), Strength(want), 1)
	for _, t := range ordered[least-1:] {
		i := slices.IndexFunc(offers, func(o Offer) bool { return o.Tier == t })
		if i >= 0 && (!offers[i].emulated() || t == floor || c.rules.EmulatedCounts()) {
			return t
		}
	}
	return corev1.Tier_TIER_UNSPECIFIED
}

// why is the sentence of the session's terms: who asked for the strongest.
func (c *choice) why(d *corev1.TierDecision, answer Answer) string {
	if Strength(d.Wanted) > Strength(d.Floor) {
		return answer.Reason
	}
	return d.FloorFrom
}

// missing says why a tier that a rule would like is not taken.
func (c *choice) missing(t corev1.Tier, offers []Offer) string {
	i := slices.IndexFunc(offers, func(o Offer) bool { return o.Tier == t })
	switch {
	case !slices.Contains(c.Tiers, t):
		return TierName(t) + ": this installation does not allow it"
	case i >= 0 && offers[i].emulated() && offers[i].Accel == "":
		return TierName(t) + ": no host has proved that it runs with hardware support"
	case i >= 0 && offers[i].emulated():
		return TierName(t) + ": it is emulated here (" + offers[i].Accel + "), which counts as no stronger than gvisor"
	case i >= 0:
		return TierName(t) + ": it is weaker than the floor"
	case c.Fleet.Absent[t] != "":
		return TierName(t) + ": no host offers it (" + c.Fleet.Absent[t] + ")"
	}
	return TierName(t) + ": no host offers it"
}

// refusal says which tier is needed, why, and what there is.
func (c *choice) refusal(d *corev1.TierDecision, wants []corev1.Tier, answer Answer) error {
	need, why, first := "tier "+TierName(d.Wanted), answer.Reason, d.Wanted
	if len(wants) > 1 {
		names := make([]string, len(wants))
		for i, t := range wants {
			names[i] = TierName(t)
		}
		need = "one of the tiers " + strings.Join(names, ", ")
	}
	if Strength(d.Floor) >= Strength(d.Wanted) {
		need, why, first = "tier "+TierName(d.Floor), d.FloorFrom, d.Floor
	}
	return fmt.Errorf("%s is needed (%s) and this installation does not offer it; it offers %s%s", need, why, c.offered(), c.hostsSay(first))
}

// hostsSay is why a tier is not there, in a host's words.
func (c *choice) hostsSay(t corev1.Tier) string {
	if why := c.Fleet.Absent[t]; why != "" {
		return "; a host says of " + TierName(t) + ": " + why
	}
	return ""
}

func (c *choice) offered() string {
	if len(c.ready) == 0 {
		return "nothing now"
	}
	return offerWords(c.ready)
}

// wasm is used where the template says so, the rule agrees, and nobody asks for
// a wall: it stands outside the order, so that it satisfies no floor.
func (c *choice) wasm(d *corev1.TierDecision, answer Answer) error {
	const t = corev1.Tier_TIER_WASM
	d.Wanted = t
	switch {
	case c.MinTier != 0 && c.MinTier != t:
		return fmt.Errorf("template %q runs in wasm, which is not comparable with the tier %s that the caller asks for", c.Template, TierName(c.MinTier))
	case d.Floor != 0 && !c.tenant.Wasm:
		return fmt.Errorf("template %q runs in wasm, which is not comparable with %s, %s; the tier policy does not allow wasm to this tenant", c.Template, d.FloorFrom, TierName(d.Floor))
	case !slices.Contains(answer.Tiers, t):
		d.Wanted = answer.Tiers[0]
		unsaid := ""
		if len(d.Unknown) > 0 {
			unsaid = "; not told: " + strings.Join(d.Unknown, ", ")
		}
		return fmt.Errorf("template %q runs in wasm and rule %q of the tier policy asks for %s: %s%s", c.Template, answer.Rule, TierName(answer.Tiers[0]), answer.Reason, unsaid)
	}
	return c.special(d, t)
}

// null is for tests: a template that names it gets it, unless anybody asks for more.
func (c *choice) null(d *corev1.TierDecision) error {
	const t = corev1.Tier_TIER_NULL
	d.Rule, d.Wanted, d.Least = "(null tier)", t, t
	if c.Floor != 0 || c.tenant.Floor != 0 || c.MinTier != 0 && c.MinTier != t {
		return fmt.Errorf("tier %s is weaker than what the tenant or the caller asks for", TierName(t))
	}
	return c.special(d, t)
}

func (c *choice) special(d *corev1.TierDecision, t corev1.Tier) error {
	for _, o := range slices.Concat(c.ready, c.away) {
		if o.Tier == t {
			d.Chosen = t
			return nil
		}
	}
	return fmt.Errorf("tier %s is needed (%s) and this installation does not offer it; it offers %s%s", TierName(t), templateSays, c.offered(), c.hostsSay(t))
}

// noRules is a policy that says nothing: everything is as risky as can be.
type noRules struct{}

func (noRules) Classes() []string                        { return nil }
func (noRules) EmulatedCounts() bool                     { return false }
func (noRules) Tenant(string) TenantRule                 { return TenantRule{} }
func (noRules) Ask(Facts, bool, []Offer) (Answer, error) { return Riskiest(), nil }
