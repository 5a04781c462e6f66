package tierpolicy

import (
	_ "embed"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
)

//go:embed default.yaml
var defaultSource []byte

// DefaultName is the source of the policy that is in force when none is named.
const DefaultName = "built-in default"

// Bounds of a policy.
const (
	maxRules   = 100 // of one list
	maxTenants = 10_000
	maxClasses = 32
	maxName    = 64
	maxReason  = 200
)

// Policy is a policy that was read and checked. It is never changed; its methods
// may be called from any goroutine.
type Policy struct {
	// Source is where it was read from, Text what was read.
	Source string
	Text   []byte

	classes  []string
	ranks    map[string]int64
	emulated bool
	rules    []rule
	tenants  map[string]tenant
}

// tenant is the section of one tenant: its rules are asked first.
type tenant struct {
	core.TenantRule
	rules []rule
}

// rule is one rule, compiled.
type rule struct {
	name   string
	line   int
	when   string
	tiers  []corev1.Tier
	reason string
	prog   program
}

// Default is the policy that Berth comes with.
func Default() *Policy {
	p, err := Parse(DefaultName, defaultSource)
	if err != nil {
		panic(err) // a test reads it
	}
	return p
}

// Load reads a policy; an empty path is the default.
func Load(path string) (*Policy, error) {
	if path == "" {
		return Default(), nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, errs.E("read tier policy", errkind.Invalid, "", err)
	}
	return Parse(path, raw)
}

// Parse reads and checks a policy. file is how errors name it.
func Parse(file string, raw []byte) (*Policy, error) {
	doc, err := document(file, raw)
	if err != nil {
		return nil, err
	}
	top, err := node{doc, file, ""}.fields("data_classes", "emulated_counts", "rules", "tenants")
	if err != nil {
		return nil, err
	}
	p := &Policy{Source: file, Text: slices.Clone(raw), ranks: map[string]int64{}, tenants: map[string]tenant{}}
	if err := p.readClasses(node{doc, file, ""}, top); err != nil {
		return nil, err
	}
	if n, ok := top["emulated_counts"]; ok {
		if p.emulated, err = n.truth(); err != nil {
			return nil, err
		}
	}
	n, ok := top["rules"]
	if !ok {
		return nil, failure(file, 0, "rules are missing")
	}
	if p.rules, err = p.readRules(n, ""); err != nil {
		return nil, err
	}
	if n, ok := top["tenants"]; ok {
		if len(n.Content)/2 > maxTenants {
			return nil, n.fail("it names more than %d tenants", maxTenants)
		}
		if err := n.pairs(p.readTenant); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *Policy) readClasses(doc node, top map[string]node) error {
	n, ok := top["data_classes"]
	if !ok {
		return doc.fail("data_classes are missing: the words for data, least sensitive first")
	}
	words, err := n.words()
	if err != nil {
		return err
	}
	if len(words) == 0 || len(words) > maxClasses {
		return n.fail("data_classes has %d words; 1 to %d are needed", len(words), maxClasses)
	}
	for i, w := range words {
		if !ids.IsToken(w) {
			return n.fail("data_classes: %.80q is no word; a word has 1 to 63 characters of a-z, 0-9, _ and -", w)
		}
		if slices.Contains(words[:i], w) {
			return n.fail("data_classes: %s is there twice", w)
		}
		p.ranks[w] = int64(i)
	}
	p.classes = words
	return nil
}

func (p *Policy) readTenant(name string, n node) error {
	if _, err := ids.ParseTenant(name); err != nil {
		return n.fail("tenants: %.80q is no tenant", name)
	}
	n.of = "tenant " + name
	f, err := n.fields("floor", "wasm", "rules")
	if err != nil {
		return err
	}
	t := tenant{}
	if v, ok := f["floor"]; ok {
		word, err := v.text()
		if err != nil {
			return err
		}
		if t.Floor, err = core.ParseTier(word); err != nil || core.Strength(t.Floor) == 0 {
			return v.fail("floor %.40q is none of container, gvisor, kata, microvm", word)
		}
	}
	if v, ok := f["wasm"]; ok {
		if t.Wasm, err = v.truth(); err != nil {
			return err
		}
	}
	if v, ok := f["rules"]; ok {
		if t.rules, err = p.readRules(v, n.of); err != nil {
			return err
		}
	}
	p.tenants[name] = t
	return nil
}

func (p *Policy) readRules(n node, of string) ([]rule, error) {
	items, err := n.items()
	if err != nil {
		return nil, err
	}
	if len(items) == 0 || len(items) > maxRules {
		return nil, n.fail("there are %d rules; 1 to %d are needed", len(items), maxRules)
	}
	var out []rule
	for _, item := range items {
		r, err := p.readRule(item, of)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(o rule) bool { return o.name == r.name }) {
			return nil, item.fail("two rules are called %q", r.name)
		}
		out = append(out, r)
	}
	return out, nil
}

func (p *Policy) readRule(n node, of string) (rule, error) {
	f, err := n.fields("name", "when", "tier", "reason")
	if err != nil {
		return rule{}, err
	}
	r := rule{line: n.Line}
	name, ok := f["name"]
	if !ok {
		return rule{}, n.fail("a rule has no name")
	}
	if r.name, err = name.sentence(maxName); err != nil {
		return rule{}, err
	}
	n.of = strings.TrimPrefix(of+", rule "+r.name, ", ")
	for key, v := range f {
		v.of = n.of
		f[key] = v
	}
	for _, key := range []string{"when", "tier", "reason"} {
		if _, ok := f[key]; !ok {
			return rule{}, n.fail("%s is missing", key)
		}
	}
	if r.tiers, err = readTiers(f["tier"]); err != nil {
		return rule{}, err
	}
	if r.reason, err = f["reason"].sentence(maxReason); err != nil {
		return rule{}, err
	}
	if r.when, err = f["when"].text(); err != nil {
		return rule{}, err
	}
	r.prog, err = p.compile(f["when"], r.when)
	return r, err
}

func readTiers(n node) ([]corev1.Tier, error) {
	words, err := n.words()
	if err != nil {
		return nil, err
	}
	if len(words) == 0 || len(words) > 8 {
		return nil, n.fail("tier names %d tiers; one, or some in order of preference, are needed", len(words))
	}
	var out []corev1.Tier
	for _, w := range words {
		t, err := core.ParseTier(w)
		if err != nil || t == corev1.Tier_TIER_NULL || strings.ToLower(w) != w {
			return nil, n.fail("there is no tier %.40q; there are container, gvisor, kata, microvm and wasm", w)
		}
		if slices.Contains(out, t) {
			return nil, n.fail("tier %s is there twice", w)
		}
		out = append(out, t)
	}
	return out, nil
}

// Classes are the data classes, least sensitive first.
func (p *Policy) Classes() []string { return p.classes }

// EmulatedCounts reports whether an emulated machine counts as a machine.
func (p *Policy) EmulatedCounts() bool { return p.emulated }

// Tenant is what the policy fixes for one tenant.
func (p *Policy) Tenant(name string) core.TenantRule { return p.tenants[name].TenantRule }

// Ask finds the first rule that is true: the tenant's, then everybody's. A rule
// that asks for wasm alone is passed by for other templates.
func (p *Policy) Ask(f core.Facts, known bool, offers []core.Offer) (core.Answer, error) {
	vars := p.variables(f, known, offers)
	for _, rules := range [][]rule{p.tenants[f.Tenant].rules, p.rules} {
		for _, r := range rules {
			if len(r.tiers) == 1 && r.tiers[0] == corev1.Tier_TIER_WASM && f.TemplateTier != "wasm" {
				continue
			}
			yes, err := r.prog.eval(vars)
			if err != nil {
				return core.Answer{}, fmt.Errorf("rule %q: %w", r.name, err)
			}
			if yes {
				return core.Answer{Rule: r.name, Tiers: r.tiers, Reason: r.reason}, nil
			}
		}
	}
	return core.Riskiest(), nil
}
