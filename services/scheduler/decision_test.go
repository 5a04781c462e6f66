package scheduler

import (
	"strings"
	"testing"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"google.golang.org/protobuf/proto"
)

// TestTheDecisionGoesFromTheWakeIntoTheEvent: unchanged when it is of a sensible
// size, bounded when it is not, absent when nobody said why.
func TestTheDecisionGoesFromTheWakeIntoTheEvent(t *testing.T) {
	told := func(d *corev1.TierDecision) *corev1.TierDecision {
		entry, err := core.Entry{Open: &core.Open{Decision: decisionOf(d)}}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		e, err := core.DecodeEntry(entry)
		if err != nil {
			t.Fatal(err)
		}
		out := &schedulerv1.Event{}
		detail(&core.Event{Kind: core.Admitted, Decision: e.Open.Decision}, out)
		return out.GetAdmitted().GetTierDecision()
	}
	d := &corev1.TierDecision{Chosen: corev1.Tier_TIER_GVISOR, Floor: corev1.Tier_TIER_CONTAINER, FloorFrom: "the template's tier", Rule: "foreign-code",
		Wanted: corev1.Tier_TIER_GVISOR, Facts: map[string]string{"request.tools": "any"}, Unknown: []string{"request.tools"}, PassedOver: []string{"kata: no host offers it"}}
	if got := told(d); !proto.Equal(got, d) {
		t.Errorf("told %v", got)
	}
	if got := told(nil); got != nil {
		t.Errorf("nobody said why, told %v", got)
	}
	for range 5000 {
		d.PassedOver = append(d.PassedOver, strings.Repeat("ä", 5000))
	}
	if got := told(d); proto.Size(got) > 10_000 {
		t.Errorf("%d bytes are told", proto.Size(got))
	}
	raised := decisionOf(d).Raised(corev1.Tier_TIER_MICROVM, "a virtual machine wrote the disk")
	if raised.Chosen != corev1.Tier_TIER_MICROVM || raised.FloorFrom != "a virtual machine wrote the disk" || (*core.Decision)(nil).Raised(corev1.Tier_TIER_KATA, "x") != nil {
		t.Errorf("raised to %+v", raised)
	}
}
