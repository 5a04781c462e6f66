package core

import (
	"fmt"
	"slices"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// strength orders the tiers that can be compared, weakest first. Wasm and null
// stand outside: they are as strong as themselves only.
var strength = []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_KATA, corev1.Tier_TIER_MICROVM}

// weaker reports whether a session in tier have is no place for an open that needs at least need.
// Null is the need of an open that asks for nothing.
func weaker(have, need corev1.Tier) bool {
	return have != need && need != corev1.Tier_TIER_NULL && (!slices.Contains(strength, need) || slices.Index(strength, have) < slices.Index(strength, need))
}

// least is the weakest tier that the open may find the session in. When nobody
// said, it is the one that it would be given.
func (o *Open) least() corev1.Tier {
	if o.Decision != nil && o.Decision.Least != corev1.Tier_TIER_UNSPECIFIED {
		return o.Decision.Least
	}
	return o.Terms.Tier
}

// tooWeakIn reports whether the session is no place for the open in that tier. A disk that a virtual
// machine wrote is opened in machines only, whatever tier outside the order was asked for.
func (o *Open) tooWeakIn(s *Session, t corev1.Tier) bool {
	need := o.least()
	if s.VM != corev1.Tier_TIER_UNSPECIFIED && OwnKernel(t) && !slices.Contains(strength, need) {
		return false
	}
	return weaker(t, need)
}

// raises reports whether the wake that is noted is in a tier that is too weak for the open, and the
// open's own tier does for those who noted it.
func (x *tx) raises(s *Session, o *Open) bool {
	return x.v >= vmSince && s.Wake != nil && o.tooWeakIn(s, s.Wake.Terms.Tier) && !weaker(o.Terms.Tier, s.Wake.Terms.Tier)
}

// waitsForAnOpen reports whether the wake that is noted is a handoff that nobody asked for: an open
// takes its place.
func (s *Session) waitsForAnOpen() bool {
	return s.Wake != nil && s.Wake.Request == "" && s.Wake.Cause == handoffCause && !s.waits(VerbOpen)
}

// tooWeak keeps an open from joining a session in a weaker tier than it needs:
// one that is awake or wakes is refused to it, and the end of a sleep is waited
// for. A sandbox changes its tier only by a sleep, which nobody but its user asks for.
func (x *tx) tooWeak(s *Session, o *Open) *Outcome {
	if x.v < vmSince {
		return nil
	}
	terms, is := s.Terms, "is awake"
	switch s.State {
	case Active:
	case Waking:
		terms, is = s.Wake.Terms, "wakes"
	case Sleeping:
		if o.tooWeakIn(s, terms.Tier) {
			return &Outcome{Wait: true, Session: s}
		}
		fallthrough
	default:
		if s.Wake == nil || s.waitsForAnOpen() || x.raises(s, o) {
			return nil
		}
		terms, is = s.Wake.Terms, "waits to wake"
	}
	if !o.tooWeakIn(s, terms.Tier) {
		return nil
	}
	why := "the tier policy"
	if d := o.Decision; d != nil && d.FloorFrom != "" && d.Floor == d.Least {
		why = d.FloorFrom
	} else if d != nil && d.Rule != "" {
		why = fmt.Sprintf("rule %q of the tier policy", d.Rule)
	}
	out := refuse(errkind.Refused, "the session %s in tier %s, and this open needs %s (%s): close it, then open it again",
		is, tierName(terms), tierName(&Terms{Tier: o.least()}), why)
	return &out
}
