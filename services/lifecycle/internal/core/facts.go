package core

import (
	"slices"
	"strings"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// Facts are what a tier policy may look at, all of it in words. They are
// complete: what nobody told has the riskiest value, and its name stands in
// Unknown, so that no rule ever sees that something was left out.
type Facts struct {
	// CodeAuthor is operator, user, model or third_party.
	CodeAuthor string
	// Tools is bounded, fixed or any.
	Tools string
	// DataClass is one of the classes that the policy knows.
	DataClass string
	// Network is none, named or open.
	Network string
	// ToolAccess: the code can call tools.
	ToolAccess bool
	// MinTier is the weakest tier that the caller accepts; empty: not told, which asks for nothing.
	MinTier string
	// Template and its tier.
	Template, TemplateTier string
	// Persistence is durable or ephemeral.
	Persistence string
	// Tenant, its plan, and the weakest tier that it allows (empty: any).
	Tenant, Plan, Floor string
	// Unknown names the facts that nobody told, in the order of factNames.
	Unknown []string
}

// Names of the facts about risk, as rules write them.
const (
	factAuthor     = "request.code_author"
	factTools      = "request.tools"
	factData       = "request.data_class"
	factNetwork    = "request.network"
	factToolAccess = "request.tool_access"
)

// Words of the facts of a request, least risky first. The last one is what
// counts when nobody told.
var (
	CodeAuthors = []string{"operator", "user", "model", "third_party"}
	ToolWords   = []string{"bounded", "fixed", "any"}
	NetworkNeed = []string{"none", "named", "open"}
)

// told adds what is known of the risk. classes are the data classes that the
// policy knows, least sensitive first.
func (f *Facts) told(r *identityv1.RiskFacts, classes []string) {
	f.Unknown = nil
	word := func(fact, said string, words []string) string {
		if slices.Contains(words, said) {
			return said
		}
		f.Unknown = append(f.Unknown, fact)
		if len(words) == 0 {
			return ""
		}
		return words[len(words)-1]
	}
	f.CodeAuthor = word(factAuthor, author(r), CodeAuthors)
	f.Tools = word(factTools, enumWord(r.GetTools().String(), "TOOL_BREADTH_"), ToolWords)
	f.DataClass = word(factData, r.GetDataClass(), classes)
	f.Network = word(factNetwork, enumWord(r.GetNetwork().String(), "NETWORK_NEED_"), NetworkNeed)
	if f.ToolAccess = r.GetToolAccess(); silent(r) {
		f.ToolAccess = true
		f.Unknown = append(f.Unknown, factToolAccess)
	}
}

// author is who wrote the code. That the user did not write it, the older fact,
// is never unsaid by the newer one.
func author(r *identityv1.RiskFacts) string {
	said := enumWord(r.GetCodeAuthor().String(), "CODE_AUTHOR_")
	if r.GetUntrustedCode() && said != "model" {
		return "third_party"
	}
	return said
}

// silent reports that the frontend told nothing at all: then a false is no answer.
func silent(r *identityv1.RiskFacts) bool {
	return !r.GetUntrustedCode() && !r.GetToolAccess() && r.GetDataClass() == "" &&
		r.GetCodeAuthor() == 0 && r.GetTools() == 0 && r.GetNetwork() == 0
}

func enumWord(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}

// words are the facts by name, for a person who asks why.
func (f Facts) words(fleet Fleet, offers []Offer) map[string]string {
	access := map[bool]string{false: "false", true: "true"}[f.ToolAccess]
	out := map[string]string{
		factAuthor: f.CodeAuthor, factTools: f.Tools, factData: f.DataClass, factNetwork: f.Network, factToolAccess: access,
		"request.min_tier": f.MinTier, "request.template": f.Template, "request.template_tier": f.TemplateTier,
		"request.persistence": f.Persistence, "tenant.name": f.Tenant, "tenant.plan": f.Plan, "tenant.floor": f.Floor,
		"fleet.tiers": offerWords(offers),
	}
	if !fleet.Known {
		out["fleet.tiers"] += " (as configured: no host was asked)"
	}
	for k, v := range out {
		if v == "" {
			delete(out, k)
		}
	}
	return out
}

func offerWords(offers []Offer) string {
	var out []string
	for _, o := range offers {
		out = append(out, o.String())
	}
	return strings.Join(out, ", ")
}

// tierWord is a tier's name, empty for none.
func tierWord(t corev1.Tier) string {
	if t == corev1.Tier_TIER_UNSPECIFIED {
		return ""
	}
	return TierName(t)
}
