package main

import (
	"fmt"
	"strconv"
	"strings"
)

func (a *app) renderPools(p poolsOut) {
	if len(p.Pools) == 0 {
		fmt.Fprintln(a.stdout, "no pools")
		return
	}
	rows := [][]string{{"TEMPLATE", "TIER", "WARM", "GOAL", "CEILING", "PREPARING", "RESERVED", "STALE", "CLAIMS/S", "HITS", "WAIT P99", "MEMORY", "NOTE"}}
	for _, o := range p.Pools {
		rows = append(rows, []string{o.Template, o.Tier, num(o.Warm), num(o.Goal), num(o.Ceiling), num(o.Preparing), num(o.Reserved), num(o.Stale),
			rate(o.ClaimsShort), hitWord(o), waitedWord(o, o.WaitP99MS), bytesWord(o.IdleMemoryBytes), plain(o.Unhealthy)})
	}
	table(a.stdout, rows)
}

func num(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

func rate(perSecond float64) string { return strconv.FormatFloat(perSecond, 'f', 2, 64) }

// hitWord is how many of the wakes were served warm.
func hitWord(o poolOut) string {
	if o.Wakes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%% of %d", float64(o.Hits)/float64(o.Wakes)*100, o.Wakes)
}

// waitedWord is how long reservations waited, once there were any.
func waitedWord(o poolOut, ms float64) string {
	if o.Wakes == 0 {
		return "-"
	}
	return msWord(ms)
}

func (a *app) renderPool(o poolOut) {
	ratio, zones := "", strings.Join(o.Zones, ", ")
	if o.Ratio > 0 {
		ratio = fmt.Sprintf("%g for each awake session, of which there are %d", o.Ratio, o.Active)
	}
	pairs := []string{"template", o.Template, "tier", o.Tier, "unhealthy", o.Unhealthy, "warm", num(o.Warm),
		"goal", strings.TrimSuffix(num(o.Goal)+": "+o.GoalReason, ": "), "preparing", num(o.Preparing), "reserved", num(o.Reserved), "stale", num(o.Stale),
		"minimum", num(o.Minimum), "ratio", ratio}
	for _, w := range o.Schedule {
		pairs = append(pairs, "schedule", w.String())
	}
	pairs = append(pairs, "ceiling", num(o.Ceiling), "in flight", fmt.Sprintf("at most %d on one host", o.InFlight), "share", fmt.Sprintf("at most %g of the ceiling for one tenant", o.Share),
		"max age", span(o.MaxAgeMS), "wait", orCold(o), "zones", zones, "claims", rate(o.ClaimsShort)+" a second in the last minute, "+rate(o.ClaimsLong)+" in the last 15",
		"hits", hitWord(o), "waited", "p50 "+waitedWord(o, o.WaitP50MS)+", p99 "+waitedWord(o, o.WaitP99MS), "memory", bytesWord(o.IdleMemoryBytes)+" may be used by what is there")
	a.fields(pairs...)
	if len(o.Hosts) > 0 {
		rows := [][]string{{"HOST", "ZONE", "WARM", "PREPARING", "STALE", "CAP", "NOTE"}}
		for _, h := range o.Hosts {
			rows = append(rows, []string{h.Host, or(plain(h.Zone), "-"), num(h.Warm), num(h.Preparing), num(h.Stale), num(h.Cap), plain(h.Reason)})
		}
		fmt.Fprintln(a.stdout)
		table(a.stdout, rows)
	}
	a.renderSteps("what follows:", o.Plan)
}

// orCold is what an open does that finds none.
func orCold(o poolOut) string {
	if o.WaitMS == 0 {
		return "none: cold at once"
	}
	return "up to " + span(o.WaitMS) + " for one, then cold"
}

func (a *app) renderSteps(title string, steps []string) {
	if len(steps) == 0 {
		return
	}
	fmt.Fprintf(a.stdout, "\n%s\n", title)
	for _, s := range steps {
		fmt.Fprintln(a.stdout, "  "+plain(s))
	}
}

func (a *app) renderApplied(p poolsOut, dry bool) {
	if len(p.Pools) == 0 {
		fmt.Fprintln(a.stdout, "the file names no pools; those that are declared stay as they are")
		return
	}
	a.renderPools(p)
	for _, o := range p.Pools {
		what := "what follows for " + o.Template + ":"
		if dry {
			what = "what would follow for " + o.Template + ":"
		}
		steps := o.Plan
		if len(steps) == 0 && len(o.Hosts) == 0 {
			steps = []string{"not known yet: no host has said what it has; ask again in some seconds"}
		}
		a.renderSteps(what, steps)
	}
	if dry {
		fmt.Fprintln(a.stdout, "\nnothing was changed")
	}
}

func (a *app) renderPoolRemoved(o poolRemovedOut) {
	fmt.Fprintf(a.stdout, "the pool of template %s is removed; what waits in it is retired\n", o.Template)
}
