package tierpolicy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"
)

const (
	container = corev1.Tier_TIER_CONTAINER
	gvisor    = corev1.Tier_TIER_GVISOR
	kata      = corev1.Tier_TIER_KATA
	microvm   = corev1.Tier_TIER_MICROVM
	wasm      = corev1.Tier_TIER_WASM
	null      = corev1.Tier_TIER_NULL
)

// expressions are what rules of a random policy say: some sensible, some that
// are always true, that fail when asked, or that cost too much.
var expressions = []string{
	"true", "false", `request.code_author == "user"`, `request.code_author in ["model", "third_party"]`,
	`request.tools != "any" && !request.tool_access`, `classes[request.data_class] > 0`, `tenant.name == "acme"`,
	`tenant.floor == ""`, `"microvm" in fleet.tiers`, `fleet.accel["microvm"] == "kvm"`, `fleet.not_held["container"].size() > 0`,
	`fleet.known`, `1 / fleet.tiers.size() > 0`, `classes[tenant.name] > 0`, `fleet.tiers[9] == "x"`,
	`fleet.tiers.all(a, fleet.tiers.all(b, fleet.tiers.all(c, fleet.tiers.all(d, fleet.tiers.all(e, a + b + c + d + e != "")))))`,
	`request.template.matches("(a|aa)+$")`,
}

func drawPolicy(t *rapid.T) *Policy {
	var b strings.Builder
	b.WriteString("data_classes: [public, internal, secret]\nemulated_counts: " + fmt.Sprint(rapid.Bool().Draw(t, "emulated")) + "\n")
	rules := func(indent, label string) {
		for i := range rapid.IntRange(1, 5).Draw(t, label) {
			tiers := rapid.SliceOfNDistinct(rapid.SampledFrom(tierNames), 1, 4, rapid.ID[string]).Draw(t, "tiers")
			fmt.Fprintf(&b, "%s- {name: r%d, when: %q, tier: [%s], reason: because of %d}\n", indent, i,
				rapid.SampledFrom(expressions).Draw(t, "when"), strings.Join(tiers, ", "), i)
		}
	}
	b.WriteString("rules:\n")
	rules("  ", "rules")
	if rapid.Bool().Draw(t, "section") {
		fmt.Fprintf(&b, "tenants:\n  acme:\n    wasm: %t\n", rapid.Bool().Draw(t, "wasm"))
		if f := rapid.SampledFrom([]string{"", "container", "gvisor", "kata", "microvm"}).Draw(t, "policy floor"); f != "" {
			b.WriteString("    floor: " + f + "\n")
		}
		b.WriteString("    rules:\n")
		rules("      ", "tenant rules")
	}
	p, err := Parse("random.yaml", []byte(b.String()))
	if err != nil {
		t.Fatalf("%v\n%s", err, b.String())
	}
	return p
}

func drawRisk(t *rapid.T) *identityv1.RiskFacts {
	if rapid.IntRange(0, 9).Draw(t, "silent") == 0 {
		return nil
	}
	return &identityv1.RiskFacts{
		UntrustedCode: rapid.Bool().Draw(t, "untrusted"), ToolAccess: rapid.Bool().Draw(t, "access"),
		DataClass:  rapid.SampledFrom([]string{"", "public", "internal", "secret", "purple", "'; true //"}).Draw(t, "class"),
		CodeAuthor: identityv1.CodeAuthor(rapid.Int32Range(0, 5).Draw(t, "author")),
		Tools:      identityv1.ToolBreadth(rapid.Int32Range(0, 4).Draw(t, "tools")),
		Network:    identityv1.NetworkNeed(rapid.Int32Range(0, 4).Draw(t, "network")),
	}
}

func drawOffers(t *rapid.T, label string) []core.Offer {
	var out []core.Offer
	for _, tier := range rapid.SliceOfDistinct(rapid.SampledFrom([]corev1.Tier{container, gvisor, kata, microvm, wasm, null}), rapid.ID[corev1.Tier]).Draw(t, label) {
		o := core.Offer{Tier: tier}
		if tier == kata || tier == microvm {
			o.Accel = rapid.SampledFrom([]string{"", "kvm", "tcg"}).Draw(t, "accel")
		}
		if rapid.Bool().Draw(t, "not held") {
			o.NotHeld = []string{"disk_io"}
		}
		out = append(out, o)
	}
	return out
}

func drawAsk(t *rapid.T) core.TierAsk {
	any := rapid.SampledFrom([]corev1.Tier{0, 0, 0, 0, container, container, gvisor, gvisor, kata, microvm, wasm, null, 99})
	a := core.TierAsk{Risk: drawRisk(t), Template: "aaaaaaaaaaaaaaab", Tenant: rapid.SampledFrom([]string{"acme", "globex"}).Draw(t, "tenant"), Plan: "p",
		TemplateTier: rapid.SampledFrom([]corev1.Tier{container, container, gvisor, kata, microvm, wasm, null}).Draw(t, "template"),
		MinTier:      any.Draw(t, "min"), Floor: any.Draw(t, "floor"),
		Persistence: corev1.Persistence_PERSISTENCE_DURABLE,
		Tiers:       rapid.SliceOfDistinct(rapid.SampledFrom([]corev1.Tier{container, gvisor, kata, microvm, wasm, null}), rapid.ID[corev1.Tier]).Draw(t, "allowed")}
	if a.Fleet.Known = rapid.Bool().Draw(t, "known"); a.Fleet.Known {
		a.Fleet.Offers, a.Fleet.Away = drawOffers(t, "ready"), drawOffers(t, "away")
	}
	return a
}

// TestNoPolicyChoosesATierBelowTheFloor: whatever rules, facts and offers there
// are, also hostile ones, what is chosen is offered, allowed, and not weaker than
// what template, tenant, caller and the policy's own floor ask for.
func TestNoPolicyChoosesATierBelowTheFloor(t *testing.T) {
	chosen, refusedN := 0, 0
	check := func(t *rapid.T) {
		p, a := drawPolicy(t), drawAsk(t)
		d, why, err := core.ChooseTier(p, a)
		if err != nil {
			refusedN++
			if d.GetChosen() != 0 || err.Error() == "" || strings.Contains(err.Error(), "\n") {
				t.Fatalf("refused with %q and tier %s", err, d.GetChosen())
			}
			return
		}
		chosen++
		got := d.GetChosen()
		floors := []corev1.Tier{a.TemplateTier, a.Floor, p.Tenant(a.Tenant).Floor, a.MinTier}
		switch got {
		case wasm:
			floor := a.Floor != 0 || p.Tenant(a.Tenant).Floor != 0
			if a.TemplateTier != wasm || a.MinTier != 0 && a.MinTier != wasm || floor && !p.Tenant(a.Tenant).Wasm {
				t.Fatalf("wasm for template %s, floor %s, caller %s", a.TemplateTier, a.Floor, a.MinTier)
			}
		case null:
			if a.TemplateTier != null || a.Floor != 0 || a.MinTier != 0 && a.MinTier != null {
				t.Fatalf("null for template %s, floor %s, caller %s", a.TemplateTier, a.Floor, a.MinTier)
			}
		default:
			for _, f := range floors {
				if f != 0 && core.Strength(f) == 0 {
					t.Fatalf("%s, though %s was asked for", got, f)
				}
				if core.Strength(got) < core.Strength(f) {
					t.Fatalf("%s is weaker than %s", got, f)
				}
			}
			if core.Strength(got) < core.Strength(d.GetWanted()) {
				t.Fatalf("%s is weaker than the rule's %s", got, d.GetWanted())
			}
		}
		if !slices.Contains(a.Tiers, got) || a.Fleet.Known && !offered(a, got) {
			t.Fatalf("%s is not there", got)
		}
		if emulatedOnly(a, got) && !p.EmulatedCounts() && !slices.Contains(floors, got) {
			t.Fatalf("an emulated %s that nobody named", got)
		}
		if why == "" {
			t.Fatal("chosen without a reason")
		}
	}
	for range 10 { // few checks (go test -short) need not meet both outcomes
		if rapid.Check(t, check); chosen > 0 && refusedN > 0 {
			break
		}
	}
	if chosen == 0 || refusedN == 0 {
		t.Errorf("%d were chosen, %d refused", chosen, refusedN)
	}
}

func offered(a core.TierAsk, tier corev1.Tier) bool {
	is := func(o core.Offer) bool { return o.Tier == tier }
	return slices.ContainsFunc(a.Fleet.Offers, is) || slices.ContainsFunc(a.Fleet.Away, is)
}

// emulatedOnly: no offer of the tier is known to run with hardware support.
func emulatedOnly(a core.TierAsk, tier corev1.Tier) bool {
	real := func(o core.Offer) bool { return o.Tier == tier && o.Accel == "kvm" }
	return (tier == kata || tier == microvm) && !slices.ContainsFunc(a.Fleet.Offers, real) && !slices.ContainsFunc(a.Fleet.Away, real)
}

// TestWhatNobodyToldCountsAsTheRiskiest: leaving facts out decides exactly as
// telling the riskiest value of each, for every policy; and the decision says so.
func TestWhatNobodyToldCountsAsTheRiskiest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, a := drawPolicy(t), drawAsk(t)
		told := a
		told.Risk = riskiest(a.Risk)
		d1, why1, err1 := core.ChooseTier(p, a)
		d2, why2, err2 := core.ChooseTier(p, told)
		// A refusal says besides what was not told.
		refused1, _, _ := strings.Cut(fmt.Sprint(err1), "; not told: ")
		if d1.GetChosen() != d2.GetChosen() || why1 != why2 || strings.TrimSuffix(refused1, ")") != strings.TrimSuffix(fmt.Sprint(err2), ")") || d1.GetRule() != d2.GetRule() {
			t.Fatalf("left out: %s by %q (%v); told: %s by %q (%v)", d1.GetChosen(), d1.GetRule(), err1, d2.GetChosen(), d2.GetRule(), err2)
		}
		if len(d2.GetUnknown()) > 0 {
			t.Fatalf("everything was told and %v is unknown", d2.GetUnknown())
		}
		for _, fact := range d1.GetUnknown() {
			if d1.GetFacts()[fact] != d2.GetFacts()[fact] {
				t.Fatalf("%s counted as %q", fact, d1.GetFacts()[fact])
			}
		}
	})
}

// riskiest tells every fact that is left out, with the value that counts for it.
func riskiest(r *identityv1.RiskFacts) *identityv1.RiskFacts {
	if r == nil {
		r = &identityv1.RiskFacts{}
	}
	out := proto.Clone(r).(*identityv1.RiskFacts)
	if proto.Equal(r, &identityv1.RiskFacts{}) {
		out.ToolAccess = true
	}
	if _, known := identityv1.CodeAuthor_name[int32(r.GetCodeAuthor())]; !known || r.GetCodeAuthor() == 0 {
		out.CodeAuthor = identityv1.CodeAuthor_CODE_AUTHOR_THIRD_PARTY
	}
	if _, known := identityv1.ToolBreadth_name[int32(r.GetTools())]; !known || r.GetTools() == 0 {
		out.Tools = identityv1.ToolBreadth_TOOL_BREADTH_ANY
	}
	if _, known := identityv1.NetworkNeed_name[int32(r.GetNetwork())]; !known || r.GetNetwork() == 0 {
		out.Network = identityv1.NetworkNeed_NETWORK_NEED_OPEN
	}
	if !slices.Contains([]string{"public", "internal", "secret"}, r.GetDataClass()) {
		out.DataClass = "secret"
	}
	return out
}

// TestTellingLessNeverWeakens: with the default policy an open that leaves a fact
// out never gets a weaker tier than the one that tells it, whatever it tells.
func TestTellingLessNeverWeakens(t *testing.T) {
	p := Default()
	rapid.Check(t, func(t *rapid.T) {
		a := drawAsk(t)
		a.TemplateTier = rapid.SampledFrom([]corev1.Tier{container, gvisor, kata, microvm}).Draw(t, "wall")
		a.Floor, a.MinTier = 0, 0
		less := a
		less.Risk = proto.Clone(a.Risk).(*identityv1.RiskFacts)
		if less.Risk != nil {
			switch rapid.IntRange(0, 4).Draw(t, "left out") {
			case 0:
				less.Risk.CodeAuthor = 0
			case 1:
				less.Risk.Tools = 0
			case 2:
				less.Risk.Network = 0
			case 3:
				less.Risk.DataClass = ""
			case 4:
				less.Risk = nil
			}
		}
		d, _, err := core.ChooseTier(p, a)
		d2, _, err2 := core.ChooseTier(p, less)
		if err == nil && err2 == nil && core.Strength(d2.GetChosen()) < core.Strength(d.GetChosen()) {
			t.Fatalf("%v gets %s, and with less told, %v, %s", a.Risk, d.GetChosen(), less.Risk, d2.GetChosen())
		}
	})
}

// TestAnExpressionThatCostsTooMuchIsARefusal: no rule runs without a bound, and
// one that fails lets nothing through.
func TestAnExpressionThatCostsTooMuchIsARefusal(t *testing.T) {
	for when, say := range map[string]string{
		expressions[15]:            "cost limit exceeded",
		`fleet.tiers[9] == "x"`:    "index out of bounds",
		`classes[tenant.name] > 0`: "no such key",
	} {
		p, err := Parse("p.yaml", []byte(head+"  - {name: one, when: '"+strings.ReplaceAll(when, "'", "''")+"', tier: container, reason: r}\n"))
		if err != nil {
			t.Fatal(err)
		}
		var offers []core.Offer
		for _, tier := range []corev1.Tier{container, gvisor, kata, microvm, wasm} {
			offers = append(offers, core.Offer{Tier: tier})
		}
		_, _, err = core.ChooseTier(p, core.TierAsk{TemplateTier: container, Tenant: "acme", Tiers: []corev1.Tier{container, gvisor, kata, microvm, wasm}, Fleet: core.Fleet{Known: true, Offers: offers}})
		if err == nil || !strings.Contains(err.Error(), say) || !strings.Contains(err.Error(), `rule "one"`) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", when, err)
		}
	}
}

func BenchmarkChooseTier(b *testing.B) {
	p := Default()
	a := core.TierAsk{TemplateTier: gvisor, Tenant: "acme", Tiers: []corev1.Tier{container, gvisor, kata, microvm, wasm},
		Risk:  &identityv1.RiskFacts{CodeAuthor: identityv1.CodeAuthor_CODE_AUTHOR_USER, Tools: identityv1.ToolBreadth_TOOL_BREADTH_FIXED, Network: identityv1.NetworkNeed_NETWORK_NEED_NAMED, DataClass: "internal"},
		Fleet: core.Fleet{Known: true, Offers: []core.Offer{{Tier: container}, {Tier: gvisor}, {Tier: microvm, Accel: "tcg"}}}}
	for b.Loop() {
		if _, _, err := core.ChooseTier(p, a); err != nil {
			b.Fatal(err)
		}
	}
}
