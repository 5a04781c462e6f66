package core

import (
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// Decision is why a session got its isolation tier, as lifecycle explained it. It
// is told in the event admitted and kept nowhere else.
type Decision struct {
	Chosen    corev1.Tier `json:"chosen,omitempty"`
	Floor     corev1.Tier `json:"floor,omitempty"`
	FloorFrom string      `json:"from,omitempty"`
	Rule      string      `json:"rule,omitempty"`
	Wanted    corev1.Tier `json:"wanted,omitempty"`
	// Least is the weakest tier of an awake session that the open may join.
	Least corev1.Tier `json:"least,omitempty"`

	Facts      map[string]string `json:"facts,omitempty"`
	Unknown    []string          `json:"unknown,omitempty"`
	PassedOver []string          `json:"passed,omitempty"`
}

// Raised is the decision when a stronger tier is taken for a reason of scheduler's own.
func (d *Decision) Raised(to corev1.Tier, why string) *Decision {
	if d == nil || d.Chosen == to {
		return d
	}
	n := *d
	n.Chosen, n.Floor, n.FloorFrom = to, to, why
	return &n
}
