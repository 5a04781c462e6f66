package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/sdk"
)

func samplePools() poolsOut {
	spec := func(template string, tier corev1.Tier) *poolv1.Spec {
		return &poolv1.Spec{Template: template, Tier: tier, Minimum: 4, Ratio: 0.5, Ceiling: 12, InFlight: 2, MaxAge: durationpb.New(24 * time.Hour),
			Wait: durationpb.New(250 * time.Millisecond), Share: 0.5, Zones: []string{"z1", "z2"},
			Schedule: []*poolv1.Schedule{{Days: []uint32{1, 2, 3, 4, 5}, From: 8 * 60, To: 18*60 + 30, TimeZone: "Europe/Berlin", Minimum: 10}}}
	}
	plain := spec("microvm", corev1.Tier_TIER_MICROVM)
	plain.Zones, plain.Schedule, plain.Ratio, plain.Ceiling, plain.Minimum = nil, nil, 0, 2, 1
	return poolsOutOf([]*poolv1.Status{
		{Spec: spec("default", corev1.Tier_TIER_GVISOR), Goal: 5, GoalReason: "0.5 for each of 10 awake sessions", Warm: 3, Preparing: 1, Reserved: 1, Stale: 1,
			Active: 10, ClaimsShort: 0.25, ClaimsLong: 0.0711, Hits: 41, Wakes: 50, WaitP50: durationpb.New(0), WaitP99: durationpb.New(12500 * time.Microsecond),
			IdleMemoryBytes: 96 << 20, Hosts: []*poolv1.HostStatus{{Host: "host-1", Zone: "z1", Warm: 2, Cap: 4}, {Host: "host-2", Zone: "z2", Warm: 1, Preparing: 1, Stale: 1, Cap: 4},
				{Host: "host-3", Reason: "it is draining"}}, Plan: []string{"prepare one on host-1 (at most 4 there): the minimum is 4", "retire wabc on host-2: its image is another now"}},
		{Spec: plain, Goal: 1, GoalReason: "the minimum is 1", Unhealthy: "no host offers the tier microvm"},
	})
}

func samplePool() poolsOut { return poolsOut{Pools: samplePools().Pools[:1]} }

func poolEvent(what, why string) sdk.Event {
	return sdk.Event{Time: at, Pool: "default", Name: what, ID: what, Body: &poolv1.Event{Template: "default", Tier: corev1.Tier_TIER_GVISOR,
		At: timestamppb.New(at), What: what, Reason: why, Warm: 3, Goal: 5}}
}

// Who edits a file wants to know which line of which file is wrong, in one sentence.
func TestARefusedPoolFileIsNamedWithItsLine(t *testing.T) {
	c := poolApplyCmd{File: "pool.yaml"}
	err := c.refused(&sdk.Error{Op: "pool apply", Kind: errkind.Invalid, Reason: "line 7: minimum is 9, above the ceiling 4"})
	var e exitCode
	if !errors.As(err, &e) || e.code != 2 || e.text != "pool.yaml: line 7: minimum is 9, above the ceiling 4" {
		t.Errorf("%v", err)
	}
	other := &sdk.Error{Op: "pool apply", Kind: errkind.Unavailable, Reason: "nobody leads"}
	if err := c.refused(other); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("%v", err)
	}
}

func TestPoolCommandsCheckWhatIsTyped(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"pool show a.b", "template"}, {"pool remove UPPER", "template"}, {"pool apply", "--file"}, {"pool apply -f /nowhere/pool.yaml", "/nowhere/pool.yaml"},
		{"tail --pools --hosts", "two selections"}, {"tail --pools --tenant acme", "--tenant"},
	} {
		var out, said bytes.Buffer
		code := run(&app{ctx: t.Context(), stdin: strings.NewReader(""), stdout: &out, stderr: &said}, strings.Fields(c.args))
		if code != 2 || !strings.Contains(said.String(), c.want) {
			t.Errorf("berth %s: %d %s", c.args, code, &said)
		}
	}
}
