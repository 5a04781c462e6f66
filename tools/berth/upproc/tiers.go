package upproc

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
)

// unproved is in the reason of a tier whose proof by a real sandbox is still under way, opening in
// that of one whose driver finds out what this machine can do.
const (
	unproved = "not done yet"
	opening  = "is being opened"
)

// AwaitTier waits until a host offers the isolation tier, or says why none does: machines are proved
// after the start. absent is that reason, empty once it is offered.
func (p *Process) AwaitTier(ctx context.Context, tier string) (absent string, err error) {
	op, err := p.operator(ctx)
	if err != nil {
		return "", err
	}
	defer op.Close()
	want := corev1.Tier(corev1.Tier_value["TIER_"+strings.ToUpper(tier)])
	for {
		reply := &schedulerv1.HostsReply{}
		if err := op.Call(ctx, "scheduler", "hosts", &schedulerv1.HostsRequest{}, reply); err != nil {
			return "", err
		}
		if absent = absence(reply.GetHosts(), want); absent == "" || !strings.Contains(absent, unproved) && !strings.Contains(absent, opening) {
			return absent, nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("wait for a host with tier %s: %w: %s", tier, ctx.Err(), absent)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// absence is why no host offers a tier; empty if one does.
func absence(hosts []*schedulerv1.HostRecord, want corev1.Tier) string {
	why := "no host has said anything of it: " + unproved
	for _, h := range hosts {
		for _, t := range h.GetTiers() {
			if t == want {
				return ""
			}
		}
		for _, f := range h.GetTierFacts() {
			if f.GetTier() == want {
				why = f.GetAbsent()
			}
			if f.GetTier() == want && why == "" {
				why = "offered, and " + unproved + " in scheduler's record"
			}
		}
	}
	return why
}
