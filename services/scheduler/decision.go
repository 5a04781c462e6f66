package scheduler

import (
	"strings"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// Bounds of what is kept of an explanation: it is in the log once and in one event.
const (
	maxFacts   = 32
	maxPassed  = 16
	maxExplain = 300 // bytes of one text
)

// decisionOf reads why a tier was chosen; nil when nobody said.
func decisionOf(d *corev1.TierDecision) *core.Decision {
	if d == nil {
		return nil
	}
	out := &core.Decision{Chosen: d.GetChosen(), Floor: d.GetFloor(), FloorFrom: short(d.GetFloorFrom()), Rule: short(d.GetRule()),
		Wanted: d.GetWanted(), Least: d.GetLeast(), Unknown: shortAll(d.GetUnknown(), maxFacts), PassedOver: shortAll(d.GetPassedOver(), maxPassed)}
	if n := len(d.GetFacts()); n > 0 && n <= maxFacts {
		out.Facts = map[string]string{}
		for k, v := range d.GetFacts() {
			out.Facts[short(k)] = short(v)
		}
	}
	return out
}

func short(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxExplain)], "") }

func shortAll(list []string, most int) (out []string) {
	for _, s := range list[:min(len(list), most)] {
		out = append(out, short(s))
	}
	return out
}

func protoDecision(d *core.Decision) *corev1.TierDecision {
	if d == nil {
		return nil
	}
	return &corev1.TierDecision{Chosen: d.Chosen, Floor: d.Floor, FloorFrom: d.FloorFrom, Rule: d.Rule, Wanted: d.Wanted, Least: d.Least,
		Facts: d.Facts, Unknown: d.Unknown, PassedOver: d.PassedOver}
}
