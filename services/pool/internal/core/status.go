package core

import (
	"fmt"
	"time"

	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"google.golang.org/protobuf/types/known/durationpb"
)

// maxSteps of a plan are told, each in a line.
const maxSteps = 32

// Status is the pool as it stands.
func (p *Pool) Status(now time.Time) *poolv1.Status {
	plan := p.Plan(now)
	short, long := p.demand.rates(now)
	out := &poolv1.Status{Spec: p.spec.Proto(), Goal: uint32(plan.Goal.N), GoalReason: plan.Goal.Reason, Active: uint32(p.active()),
		ClaimsShort: short, ClaimsLong: long, Hits: p.hits, Wakes: p.wakes,
		WaitP50: durationpb.New(p.desk.quantile(.5)), WaitP99: durationpb.New(p.desk.quantile(.99)), Unhealthy: plan.Unhealthy}
	for _, n := range p.desk.reserved {
		out.Reserved += uint32(n)
	}
	for _, m := range p.ordered() {
		h := p.hostStatus(m, now)
		if h.Warm+h.Preparing+h.Stale+h.Cap == 0 && m.Presence == Lost {
			continue
		}
		out.Warm, out.Preparing, out.Stale = out.Warm+h.Warm, out.Preparing+h.Preparing, out.Stale+h.Stale
		for _, s := range m.seen {
			out.IdleMemoryBytes += s.Memory
		}
		out.Hosts = append(out.Hosts, h)
	}
	out.Plan = Words(plan.Steps)
	if len(out.Plan) > maxSteps {
		out.Plan = append(out.Plan[:maxSteps-1:maxSteps-1], fmt.Sprintf("and %d more", len(out.Plan)-maxSteps+1))
	}
	return out
}

// hostStatus counts as warm what can be claimed, the old ones too; they are told as stale beside it.
func (p *Pool) hostStatus(m *member, now time.Time) *poolv1.HostStatus {
	out := &poolv1.HostStatus{Host: m.ID, Zone: m.Zone, Cap: uint32(p.caps[m.ID]), Reason: p.cannot(m, now), Preparing: uint32(m.coming())}
	for _, s := range m.seen {
		switch {
		case s.State == Preparing:
			out.Preparing++
		case s.State == Retiring:
		case p.useless(m, s) != "":
			out.Stale++
		default:
			out.Warm++
			if p.old(m, s, now) != "" {
				out.Stale++
			}
		}
	}
	return out
}

// Proto is the spec as it was declared.
func (s Spec) Proto() *poolv1.Spec {
	out := &poolv1.Spec{Template: s.Template, Tier: s.Tier, Minimum: uint32(s.Minimum), Ratio: s.Ratio, Ceiling: uint32(s.Ceiling),
		InFlight: uint32(s.InFlight), MaxAge: durationpb.New(s.MaxAge), Wait: durationpb.New(s.Wait), Share: s.Share, Zones: s.Zones}
	for _, slot := range s.Schedule {
		sc := &poolv1.Schedule{From: uint32(slot.From), To: uint32(slot.To), Minimum: uint32(slot.Minimum), TimeZone: slot.Zone.String()}
		for _, d := range slot.Days {
			sc.Days = append(sc.Days, uint32(d))
		}
		out.Schedule = append(out.Schedule, sc)
	}
	return out
}
