// Package lifecycle owns when a session may be awake and under what terms:
// plans, templates, the choice of tier, idle time and retention. It guarantees
// that a refusal says why and changes nothing, that a timer which fires late,
// twice or for a session that moved on does nothing, and that losing its
// timers only delays a sleep or an expiry, never hastens one. The tier of a
// session is never weaker than the template, the tenant, the caller or the tier
// policy ask for, and no open is refused because of what hosts offered once.
package lifecycle

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/auditlog"
	"github.com/berth-dev/berth/internal/bus"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
	"github.com/berth-dev/berth/services/lifecycle/tierpolicy"
)

// Plan, Snapshots, Template, Limits and Policy are the configuration of terms.
type (
	Plan      = core.Plan
	Snapshots = core.Snapshots
	Template  = core.Template
	Limits    = core.Limits
	Policy    = core.Policy
)

// Config of the service.
type Config struct {
	Policy Policy `yaml:"policy"`
	// TierPolicy is a file of rules that choose the isolation tier by risk; empty: the default that is
	// built in (docs/howto/tier-policy.md).
	TierPolicy string `yaml:"tier_policy"`
	// HostsEvery is how often scheduler is asked which tiers hosts offer.
	HostsEvery time.Duration `yaml:"hosts_every"`
	// Workers handle events and timers at once.
	Workers int `yaml:"workers"`
	// RebuildEvery: how often timers that are missing are armed again.
	RebuildEvery time.Duration `yaml:"rebuild_every"`
}

// NewConfig returns the defaults: one plan "default" with the template
// "default" in gVisor, which is to be given its image, and a template for each
// other tier.
func NewConfig() Config {
	const gib = 1 << 30
	limits := Limits{CPUMillis: 1000, MemoryBytes: gib, Pids: 512, DiskBytes: 4 * gib}
	call := limits
	call.MemoryBytes, call.Pids = gib/2, 64 // room for a process that waits for the next script
	snapshots := core.DefaultSnapshots()
	return Config{
		Workers: 8, RebuildEvery: 15 * time.Minute, HostsEvery: 10 * time.Second,
		Policy: Policy{
			Tiers: []string{"container", "gvisor", "kata", "microvm", "wasm"},
			Templates: map[string]Template{
				"default":   {Image: "default", Tier: "gvisor", Limits: limits},
				"container": {Image: "default", Tier: "container", Limits: limits},
				"microvm":   {Image: "default", Tier: "microvm", Limits: limits},
				"wasm":      {Image: "default", Tier: "wasm", Limits: call},
			},
			Plans: map[string]Plan{"default": {Template: "default", Idle: 15 * time.Minute, Retention: 30 * 24 * time.Hour,
				Snapshots: &snapshots}},
		},
	}
}

// service is the running lifecycle.
type service struct {
	conn   *bus.Conn
	events *auditlog.Log // what lifecycle tells, beside its answers
	policy Policy
	source *tierpolicy.Policy // of policy.Rules
	fleet  *fleet
	log    *slog.Logger
	now    func() time.Time
}

// Run serves until ctx ends. conn is the identity svc-lifecycle. ready, when
// not nil, is called once requests are served.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	if err := cfg.Policy.Validate(); err != nil {
		return fmt.Errorf("lifecycle: %w", err)
	}
	if cfg.RebuildEvery <= 0 {
		return fmt.Errorf("lifecycle: rebuild_every is %s, it must be more than 0", cfg.RebuildEvery)
	}
	if cfg.HostsEvery < time.Second {
		return fmt.Errorf("lifecycle: hosts_every is %s, it must be at least 1 s", cfg.HostsEvery)
	}
	rules, err := tierpolicy.Load(cfg.TierPolicy)
	if err != nil {
		return fmt.Errorf("lifecycle: %w", err)
	}
	cfg.Policy.Rules = rules
	s := &service{conn: conn, policy: cfg.Policy, source: rules, fleet: newFleet(conn, cfg.HostsEvery, log), log: log, now: time.Now, events: auditlog.New(conn, log)}
	defer s.told() // last: until then something may be told
	micro, err := conn.Serve(ctx, bus.ServiceConfig{Name: "lifecycle", Description: "when, and under what terms"})
	if err != nil {
		return err
	}
	defer stop(micro, log)
	if err := s.serve(micro); err != nil {
		return err
	}
	stopConsumers, err := s.consume(ctx, micro, cfg.Workers)
	if err != nil {
		return err
	}
	defer stopConsumers()
	if err := micro.Announce(); err != nil {
		log.Warn("cannot say that lifecycle serves", "error", err)
	}
	if ready != nil {
		ready()
	}
	var background sync.WaitGroup
	background.Go(func() { s.rebuild(ctx, cfg.RebuildEvery) })
	background.Go(func() { s.fleet.run(ctx) })
	<-ctx.Done()
	background.Wait()
	return nil
}

// told waits a while for what was told to be stored.
func (s *service) told() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s.events.Close(ctx)
}

// consume follows scheduler's events and the timers that are due.
func (s *service) consume(ctx context.Context, micro *bus.Service, workers int) (stop func(), err error) {
	sessions, err := s.conn.Consume(ctx, bus.Spec("lifecycle-sessions", workers), func(ctx context.Context, m *bus.Msg) error {
		ev := &schedulerv1.Event{}
		if err := m.Decode(ev); err != nil {
			return err
		}
		return s.onSession(ctx, ev)
	})
	if err != nil {
		return nil, err
	}
	timers, err := s.conn.Consume(ctx, bus.Spec("lifecycle-timers", workers), func(ctx context.Context, m *bus.Msg) error {
		t := &lifecyclev1.Timer{}
		if err := m.Decode(t); err != nil {
			return err
		}
		return s.onTimer(ctx, t)
	})
	if err != nil {
		return nil, err
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		sessions.Stop(ctx)
		timers.Stop(ctx)
	}, micro.HandleRetry(sessions, timers)
}

func stop(micro *bus.Service, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := micro.Stop(ctx); err != nil {
		log.Warn("stopping lifecycle's endpoints", "error", err)
	}
}
