package tierpolicy

import (
	"testing"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
)

// TestFaultAnOpenJoinsWhatItsRuleRefuses: a decision names the weakest tier of an awake session that
// the open may join, and that is neither below the floor nor below what the rule is content with. An
// open that tells nothing, as one that goes on with a session does, asks for the tenant's floor alone.
func TestFaultAnOpenJoinsWhatItsRuleRefuses(t *testing.T) {
	const null, container, gvisor, microvm = corev1.Tier_TIER_NULL, corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_MICROVM
	own := &identityv1.RiskFacts{CodeAuthor: identityv1.CodeAuthor_CODE_AUTHOR_USER, Tools: identityv1.ToolBreadth_TOOL_BREADTH_FIXED,
		Network: identityv1.NetworkNeed_NETWORK_NEED_NONE, DataClass: "internal"}
	model := &identityv1.RiskFacts{CodeAuthor: identityv1.CodeAuthor_CODE_AUTHOR_MODEL}
	fleet := core.Fleet{Known: true, Offers: []core.Offer{{Tier: container}, {Tier: gvisor}, {Tier: microvm, Accel: "kvm"}}}
	tiers := []corev1.Tier{container, gvisor, microvm}
	for name, c := range map[string]struct {
		risk          *identityv1.RiskFacts
		floor         corev1.Tier
		named         bool
		least, chosen corev1.Tier
	}{
		"the user's own code":                  {own, 0, false, container, container},
		"its own code, a tenant with a floor":  {own, gvisor, false, gvisor, gvisor},
		"a model's code: gvisor is enough":     {model, 0, false, gvisor, microvm},
		"nothing told":                         {nil, 0, false, null, microvm},
		"nothing told but the template":        {nil, 0, true, container, microvm},
		"nothing told, a tenant with machines": {nil, microvm, true, microvm, microvm},
	} {
		d, _, err := core.ChooseTier(Default(), core.TierAsk{Risk: c.risk, Template: "t", TemplateTier: container, TemplateNamed: c.named, Tenant: "acme", Floor: c.floor, Tiers: tiers, Fleet: fleet})
		if err != nil || d.GetLeast() != c.least || d.GetChosen() != c.chosen {
			t.Errorf("%s: least %s, chosen %s (%v), want %s and %s", name, d.GetLeast(), d.GetChosen(), err, c.least, c.chosen)
		}
	}
}
