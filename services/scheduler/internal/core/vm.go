package core

import (
	"fmt"
	"strings"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// OwnKernel reports whether sandboxes of a tier have a kernel of their own, which writes the session's
// disk itself.
func OwnKernel(t corev1.Tier) bool {
	return t == corev1.Tier_TIER_KATA || t == corev1.Tier_TIER_MICROVM
}

// wroteVM notes for ever that a virtual machine may have written the disk. tier is in which, if that is
// known.
func (x *tx) wroteVM(s *Session, tier corev1.Tier) {
	switch {
	case x.v < vmSince || s.VM != corev1.Tier_TIER_UNSPECIFIED:
	case OwnKernel(tier):
		s.VM = tier
	default:
		s.VM = corev1.Tier_TIER_MICROVM
	}
}

// Raised are the terms that apply to a wake of s for which t were asked: in the tier of the virtual
// machine that wrote the disk if t name one without a kernel of its own.
func (s *Session) Raised(t Terms) Terms {
	if s == nil || s.VM == corev1.Tier_TIER_UNSPECIFIED || OwnKernel(t.Tier) {
		return t
	}
	asked := tierName(&t)
	t.Tier = s.VM
	t.TierReason = fmt.Sprintf("%s instead of %s: %s, which is then opened in virtual machines only", tierName(&t), asked, errkind.VMWritten)
	return t
}

// raise is Raised for the terms of a wake, which are shared.
func (x *tx) raise(s *Session, t *Terms) *Terms {
	if s.VM == corev1.Tier_TIER_UNSPECIFIED || OwnKernel(t.Tier) {
		return t
	}
	n := s.Raised(*t)
	return x.s.in.termsOf(&n)
}

// raiseWake has the wake that is noted, if any, be in a tier in which the disk may be used.
func (x *tx) raiseWake(s *Session) {
	if s.Wake == nil {
		return
	}
	if t := x.raise(s, s.Wake.Terms); t != s.Wake.Terms {
		w := *s.Wake
		w.Terms = t
		s.Wake = &w
	}
}

// refusedVM reports whether a host refused a wake because a virtual machine wrote the disk.
func refusedVM(f Failure) bool {
	return f.Kind == errkind.Refused && strings.Contains(f.Reason, errkind.VMWritten)
}
