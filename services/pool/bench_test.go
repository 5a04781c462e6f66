package pool

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

// full is a pool of n that wait on three hosts, without a bus.
func full(tb testing.TB, n int) *entry {
	s := &server{cfg: NewConfig()}
	s.cfg.Templates = map[string]Template{"default": {Image: "i", Tier: "null", Limits: Limits{CPUMillis: 1, MemoryBytes: 1, Pids: 1, DiskBytes: 1}}}
	l := &leader{server: s, t: &tenure{}, ctx: tb.Context(), doubt: newSignal(), pools: map[string]*entry{}}
	l.fleet = newFleet(l)
	l.fleet.known = true
	e, err := l.newEntry(&poolv1.Spec{Template: "default", Tier: corev1.Tier_TIER_NULL, Minimum: uint32(n), Ceiling: uint32(n), InFlight: 2, Share: 1,
		MaxAge: durationpb.New(time.Hour), Wait: durationpb.New(0)}, nil, nil)
	if err != nil {
		tb.Fatal(err)
	}
	for i := range 3 {
		name := fmt.Sprint("h", i)
		h := &host{id: ids.Host(name), rec: &schedulerv1.HostRecord{Host: name, Alive: true, Tiers: []corev1.Tier{corev1.Tier_TIER_NULL}}, asked: time.Now(), heard: time.Now()}
		for range n / 3 {
			h.warm = append(h.warm, core.Sandbox{ID: ids.NewWarmID(), Template: "default", Tier: corev1.Tier_TIER_NULL, State: core.Ready, Digest: e.tpl.Digest, MadeAt: time.Now()})
		}
		l.fleet.hosts[name] = h
	}
	return e
}

func BenchmarkReserve(b *testing.B) {
	e := full(b, 300)
	e.status()
	hosts := []string{"h0", "h1", "h2"}
	for n := 0; b.Loop(); n++ {
		a, err := e.reserve(context.Background(), core.Ask{Tenant: "acme", Session: fmt.Sprint("s", n), Attempt: "1", Hosts: hosts})
		if err != nil || a.Verdict != core.Reserved {
			b.Fatal(a, err)
		}
		e.mu.Lock()
		e.core.Settle(core.Settled{Reservation: a.Reservation}, time.Now())
		e.mu.Unlock()
	}
}

func BenchmarkPlan(b *testing.B) {
	e := full(b, 300)
	for b.Loop() {
		e.mu.Lock()
		e.plan()
		e.mu.Unlock()
	}
}

func BenchmarkStatus(b *testing.B) {
	e := full(b, 300)
	for b.Loop() {
		e.status()
	}
}
