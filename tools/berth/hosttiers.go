package main

import (
	"fmt"
	"slices"
	"strings"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// tierFactOut is what a host says of one isolation tier.
type tierFactOut struct {
	Tier    string   `json:"tier"`
	Offered bool     `json:"offered"`
	Accel   string   `json:"accel,omitempty"`
	Absent  string   `json:"absent,omitempty"`
	NotHeld []string `json:"not_held"`
}

func tierFactsOutOf(facts []*corev1.TierFact) []tierFactOut {
	out := []tierFactOut{}
	for _, f := range facts {
		o := tierFactOut{Tier: word(f.GetTier(), "TIER_"), Offered: f.GetAbsent() == "", Accel: f.GetAccel(), Absent: f.GetAbsent(), NotHeld: f.GetNotHeld()}
		if o.NotHeld == nil {
			o.NotHeld = []string{}
		}
		out = append(out, o)
	}
	return out
}

// tierWords are the tiers that a host offers, with what runs their kernel.
func tierWords(o hostOut) []string {
	out := slices.Clone(o.Tiers)
	for i, t := range out {
		for _, f := range o.TierFacts {
			if f.Tier == t && f.Accel != "" {
				out[i] = t + "(" + plain(f.Accel) + ")"
			}
		}
	}
	return out
}

// state is the word for whether sessions can have the tier.
func (f tierFactOut) state() string {
	switch {
	case !f.Offered:
		return "absent"
	case f.Accel != "":
		return "offered, " + f.Accel
	}
	return "offered"
}

// note says what a user of the tier must know.
func (f tierFactOut) note() string {
	var notes []string
	if len(f.NotHeld) > 0 {
		notes = append(notes, "NOT HELD: "+strings.Join(f.NotHeld, ", "))
	}
	if f.Offered && f.Accel == "tcg" {
		notes = append(notes, "emulated, which QEMU does not count as a wall")
	}
	if f.Absent != "" {
		notes = append(notes, f.Absent)
	}
	return strings.Join(notes, "; ")
}

// renderTiers writes what hosts say of their tiers, hosts that say the same in one row.
func (a *app) renderTiers(hosts []hostOut, named bool) {
	rows := [][]string{{"TIER", "STATE", "NOTE"}}
	var who []string
	for _, h := range hosts {
		for _, f := range h.TierFacts {
			row := []string{f.Tier, plain(f.state()), plain(f.note())}
			if i := slices.IndexFunc(rows, func(r []string) bool { return slices.Equal(r, row) }); i > 0 {
				who[i-1] += "," + h.Host
				continue
			}
			rows, who = append(rows, row), append(who, h.Host)
		}
	}
	if len(rows) == 1 {
		return
	}
	if named {
		rows[0] = append([]string{"HOSTS"}, rows[0]...)
		for i := range who {
			rows[i+1] = append([]string{who[i]}, rows[i+1]...)
		}
	}
	fmt.Fprintln(a.stdout)
	table(a.stdout, rows)
}
