package core

import (
	"fmt"
	"slices"
	"strings"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
)

// Fleet is what the hosts offer, as scheduler told it. The zero value is that
// nothing is known: then the configured tiers count as offered, and no machine
// counts as proved to run on real hardware support. It is never that nothing is
// there.
type Fleet struct {
	Known bool
	// Offers of hosts that take sessions now, one a tier.
	Offers []Offer
	// Away are tiers of hosts that take none now: lost, draining or not well.
	// An open that needs one waits for it.
	Away []Offer
	// Absent says why a tier is not there, as a host told it.
	Absent map[corev1.Tier]string
}

// Offer is one tier that can be had.
type Offer struct {
	Tier corev1.Tier
	// Accel is what runs the tier's kernel: kvm only if every host that offers the tier says so, since a
	// session may land on any of them. Empty in tiers without a kernel of their own, or when not told.
	Accel string
	// NotHeld are limits that some host does not enforce in this tier.
	NotHeld []string
}

// hasKernel reports whether each sandbox of the tier runs a kernel of its own.
func hasKernel(t corev1.Tier) bool {
	return t == corev1.Tier_TIER_KATA || t == corev1.Tier_TIER_MICROVM
}

// emulated reports that the tier's machine is not known to run with hardware
// support: emulation is no security boundary.
func (o Offer) emulated() bool { return hasKernel(o.Tier) && o.Accel != "kvm" }

func (o Offer) String() string {
	if !hasKernel(o.Tier) {
		return TierName(o.Tier)
	}
	accel := o.Accel
	if accel == "" {
		accel = "not proved"
	}
	return fmt.Sprintf("%s (%s)", TierName(o.Tier), accel)
}

const maxAbsent = 120 // characters of a host's own words that are kept

// FleetOf reads scheduler's listing. Without any host nothing is known: a cell
// that has just started waits for its hosts.
func FleetOf(hosts []*schedulerv1.HostRecord) Fleet {
	f := Fleet{Absent: map[corev1.Tier]string{}}
	for _, h := range hosts {
		f.Known = true
		ready := h.GetAlive() && !h.GetLost() && !h.GetDraining() && h.GetUnhealthy() == ""
		for _, t := range h.GetTiers() {
			o := Offer{Tier: t, Accel: "kvm"}
			fact := factOf(h, t)
			if !hasKernel(t) {
				o.Accel = ""
			} else if fact.GetAccel() != "kvm" {
				o.Accel = map[bool]string{true: "tcg"}[fact.GetAccel() == "tcg"]
			}
			o.NotHeld = slices.Clone(fact.GetNotHeld())
			if ready {
				f.Offers = merge(f.Offers, o)
			} else {
				f.Away = merge(f.Away, o)
			}
		}
		for _, fact := range h.GetTierFacts() {
			if why := plainWords(fact.GetAbsent()); why != "" && f.Absent[fact.GetTier()] == "" {
				f.Absent[fact.GetTier()] = why
			}
		}
	}
	return f
}

func factOf(h *schedulerv1.HostRecord, t corev1.Tier) *corev1.TierFact {
	for _, fact := range h.GetTierFacts() {
		if fact.GetTier() == t {
			return fact
		}
	}
	return nil
}

// plainWords makes one short line of what a host said.
func plainWords(s string) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(s, "")), " ")
	if r := []rune(s); len(r) > maxAbsent {
		s = string(r[:maxAbsent])
	}
	return s
}

// merge adds what another host offers; of one tier the worst counts.
func merge(all []Offer, o Offer) []Offer {
	for i := range all {
		if all[i].Tier != o.Tier {
			continue
		}
		if o.Accel != "kvm" && all[i].Accel == "kvm" {
			all[i].Accel = o.Accel
		}
		for _, l := range o.NotHeld {
			if !slices.Contains(all[i].NotHeld, l) {
				all[i].NotHeld = append(all[i].NotHeld, l)
			}
		}
		slices.Sort(all[i].NotHeld)
		return all
	}
	return append(all, o)
}

// within keeps what the installation allows, in the order of strength; tiers
// outside the order come last.
func within(offers []Offer, tiers []corev1.Tier) []Offer {
	var out []Offer
	for _, t := range append(slices.Clone(ordered[:]), corev1.Tier_TIER_WASM, corev1.Tier_TIER_NULL) {
		if i := slices.IndexFunc(offers, func(o Offer) bool { return o.Tier == t }); i >= 0 && slices.Contains(tiers, t) {
			out = append(out, offers[i])
		}
	}
	return out
}

// stand are the offers that count: those of ready hosts; without any word of
// hosts, what is configured.
func (f Fleet) stand(tiers []corev1.Tier) (ready, away []Offer) {
	if f.Known {
		return within(f.Offers, tiers), within(f.Away, tiers)
	}
	var all []Offer
	for _, t := range tiers {
		all = merge(all, Offer{Tier: t})
	}
	return within(all, tiers), nil
}
