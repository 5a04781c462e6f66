package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type poolCmd struct {
	Apply  poolApplyCmd  `cmd:"" help:"Declare pools of warm sandboxes: docs/howto/pools.md. Pools that the file does not name stay as they are."`
	Show   poolShowCmd   `cmd:"" help:"Show how pools stand, and what follows."`
	Remove poolRemoveCmd `cmd:"" help:"End a pool: what waits in it is retired."`
}

// maxPoolFile is the largest file that the platform takes.
const maxPoolFile = 64 << 10

type poolApplyCmd struct {
	File   string `short:"f" required:"" help:"File of pools (YAML); - is the standard input." placeholder:"FILE"`
	DryRun bool   `help:"Only check the file, and say what would follow."`
}

func (c *poolApplyCmd) Run(a *app) error {
	file, err := c.read(a)
	if err != nil {
		return exitCode{2, err.Error()}
	}
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	reply := &poolv1.ApplyReply{}
	if err := op.Call(a.ctx, "pool", "apply", &poolv1.ApplyRequest{File: file, DryRun: c.DryRun}, reply); err != nil {
		return c.refused(err)
	}
	out := poolsOutOf(reply.GetPools())
	return a.print(out, func() { a.renderApplied(out, c.DryRun) })
}

func (c *poolApplyCmd) read(a *app) ([]byte, error) {
	var in io.Reader = a.stdin
	if c.File != "-" {
		f, err := os.Open(c.File)
		if err != nil {
			return nil, fmt.Errorf("read the pools: %w", err)
		}
		defer f.Close()
		in = f
	}
	raw, err := io.ReadAll(io.LimitReader(in, maxPoolFile+1))
	if err != nil {
		return nil, fmt.Errorf("read the pools: %w", err)
	}
	if len(raw) > maxPoolFile {
		return nil, fmt.Errorf("%s is larger than 64 KiB", c.File)
	}
	return raw, nil
}

// refused is one sentence: the file, and the line that the platform names.
func (c *poolApplyCmd) refused(err error) error {
	var e *sdk.Error
	if !errors.Is(err, sdk.ErrInvalid) || !errors.As(err, &e) || e.Reason == "" {
		return err
	}
	return exitCode{2, c.File + ": " + e.Reason}
}

type poolShowCmd struct {
	Template string `arg:"" optional:"" help:"Template of the pool; default: all." placeholder:"TEMPLATE"`
}

func (c *poolShowCmd) Run(a *app) error {
	if c.Template != "" {
		if _, err := ids.ParseTemplate(c.Template); err != nil {
			return exitCode{2, err.Error()}
		}
	}
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	reply := &poolv1.ShowReply{}
	if err := op.Call(a.ctx, "pool", "show", &poolv1.ShowRequest{Template: c.Template}, reply); err != nil {
		return noPool(err, c.Template)
	}
	out := poolsOutOf(reply.GetPools())
	return a.print(out, func() {
		if c.Template != "" && len(out.Pools) == 1 {
			a.renderPool(out.Pools[0])
			return
		}
		a.renderPools(out)
	})
}

// noPool says which pool is not there.
func noPool(err error, template string) error {
	if errors.Is(err, sdk.ErrNotFound) {
		return fmt.Errorf("no pool is declared for template %s", template)
	}
	return err
}

type poolRemoveCmd struct {
	Template string `arg:"" help:"Template of the pool." placeholder:"TEMPLATE"`
}

func (c *poolRemoveCmd) Run(a *app) error {
	if _, err := ids.ParseTemplate(c.Template); err != nil {
		return exitCode{2, err.Error()}
	}
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	if err := op.Call(a.ctx, "pool", "remove", &poolv1.RemoveRequest{Template: c.Template}, &poolv1.RemoveReply{}); err != nil {
		return noPool(err, c.Template)
	}
	out := poolRemovedOut{Template: c.Template, Removed: true}
	return a.print(out, func() { a.renderPoolRemoved(out) })
}

type poolRemovedOut struct {
	Template string `json:"template"`
	Removed  bool   `json:"removed"`
}

type poolsOut struct {
	Pools []poolOut `json:"pools"`
}

type poolOut struct {
	Template        string        `json:"template"`
	Tier            string        `json:"tier"`
	Minimum         uint32        `json:"minimum"`
	Ratio           float64       `json:"ratio"`
	Ceiling         uint32        `json:"ceiling"`
	InFlight        uint32        `json:"in_flight"`
	MaxAgeMS        float64       `json:"max_age_ms"`
	WaitMS          float64       `json:"wait_ms"`
	Share           float64       `json:"share"`
	Zones           []string      `json:"zones"`
	Schedule        []scheduleOut `json:"schedule"`
	Goal            uint32        `json:"goal"`
	GoalReason      string        `json:"goal_reason"`
	Warm            uint32        `json:"warm"`
	Preparing       uint32        `json:"preparing"`
	Reserved        uint32        `json:"reserved"`
	Stale           uint32        `json:"stale"`
	Active          uint32        `json:"active"`
	ClaimsShort     float64       `json:"claims_per_second_1m"`
	ClaimsLong      float64       `json:"claims_per_second_15m"`
	Hits            uint64        `json:"hits"`
	Wakes           uint64        `json:"wakes"`
	WaitP50MS       float64       `json:"wait_p50_ms"`
	WaitP99MS       float64       `json:"wait_p99_ms"`
	IdleMemoryBytes uint64        `json:"idle_memory_bytes"`
	Unhealthy       string        `json:"unhealthy,omitempty"`
	Hosts           []poolHostOut `json:"hosts"`
	Plan            []string      `json:"plan"`
}

type scheduleOut struct {
	Days     []string `json:"days"`
	From     string   `json:"from"`
	To       string   `json:"to"`
	TimeZone string   `json:"time_zone"`
	Minimum  uint32   `json:"minimum"`
}

type poolHostOut struct {
	Host      string `json:"host"`
	Zone      string `json:"zone"`
	Warm      uint32 `json:"warm"`
	Preparing uint32 `json:"preparing"`
	Stale     uint32 `json:"stale"`
	Cap       uint32 `json:"cap"`
	Reason    string `json:"reason,omitempty"`
}

func poolsOutOf(all []*poolv1.Status) poolsOut {
	out := poolsOut{Pools: []poolOut{}}
	for _, s := range all {
		out.Pools = append(out.Pools, poolOutOf(s))
	}
	return out
}

func poolOutOf(s *poolv1.Status) poolOut {
	spec := s.GetSpec()
	o := poolOut{Template: spec.GetTemplate(), Tier: word(spec.GetTier(), "TIER_"), Minimum: spec.GetMinimum(), Ratio: spec.GetRatio(), Ceiling: spec.GetCeiling(),
		InFlight: spec.GetInFlight(), MaxAgeMS: wireMS(spec.GetMaxAge()), WaitMS: wireMS(spec.GetWait()), Share: spec.GetShare(),
		Zones: append([]string{}, spec.GetZones()...), Schedule: []scheduleOut{}, Goal: s.GetGoal(), GoalReason: s.GetGoalReason(), Warm: s.GetWarm(),
		Preparing: s.GetPreparing(), Reserved: s.GetReserved(), Stale: s.GetStale(), Active: s.GetActive(), ClaimsShort: s.GetClaimsShort(), ClaimsLong: s.GetClaimsLong(),
		Hits: s.GetHits(), Wakes: s.GetWakes(), WaitP50MS: wireMS(s.GetWaitP50()), WaitP99MS: wireMS(s.GetWaitP99()), IdleMemoryBytes: s.GetIdleMemoryBytes(),
		Unhealthy: s.GetUnhealthy(), Hosts: []poolHostOut{}, Plan: append([]string{}, s.GetPlan()...)}
	for _, w := range spec.GetSchedule() {
		o.Schedule = append(o.Schedule, scheduleOutOf(w))
	}
	for _, h := range s.GetHosts() {
		o.Hosts = append(o.Hosts, poolHostOut{Host: h.GetHost(), Zone: h.GetZone(), Warm: h.GetWarm(), Preparing: h.GetPreparing(), Stale: h.GetStale(), Cap: h.GetCap(), Reason: h.GetReason()})
	}
	return o
}

func wireMS(d *durationpb.Duration) float64 { return ms(d.AsDuration()) }

var weekdays = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}

func scheduleOutOf(w *poolv1.Schedule) scheduleOut {
	clock := func(m uint32) string { return fmt.Sprintf("%02d:%02d", m/60, m%60) }
	out := scheduleOut{Days: []string{}, From: clock(w.GetFrom()), To: clock(w.GetTo()), TimeZone: or(w.GetTimeZone(), "UTC"), Minimum: w.GetMinimum()}
	for _, d := range w.GetDays() {
		if int(d) < len(weekdays) {
			out.Days = append(out.Days, weekdays[d])
		}
	}
	return out
}

func (w scheduleOut) String() string {
	days := or(strings.Join(w.Days, ","), "every day")
	return fmt.Sprintf("%d from %s to %s %s, %s", w.Minimum, w.From, w.To, w.TimeZone, days)
}
