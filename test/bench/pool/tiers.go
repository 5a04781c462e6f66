package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/test/bench/first"
	"github.com/berth-dev/berth/test/bench/peer"
)

// tier is what is measured in one isolation tier.
type tier struct {
	name, template string
	rounds, atOnce int
	aim            figures.Aim
}

// Machines are emulated where this was written, and each holds its own memory: fewer at once.
var known = []tier{
	{"container", "container", 15, 20, figures.AtMost(95, "ms")},
	{"gvisor", "default", 15, 20, figures.AtMost(200, "ms")},
	{"microvm", "microvm", 8, 8, figures.AtMost(1000, "ms")},
	{"wasm", "wasm", 10, 20, figures.None},
}

const resumeMost = 1.3

// terms let twenty of each template wait on a machine of 16 GiB.
const terms = `host: {capacity: {cpu_millis: 16000}}
lifecycle:
  policy:
    templates:
      default: {image: default, tier: gvisor, limits: {cpu_millis: 1000, memory_bytes: 536870912, pids: 512, disk_bytes: 1073741824}}
      container: {image: default, tier: container, limits: {cpu_millis: 1000, memory_bytes: 536870912, pids: 512, disk_bytes: 1073741824}}
      microvm: {image: default, tier: microvm, limits: {cpu_millis: 1000, memory_bytes: 536870912, pids: 512, disk_bytes: 1073741824}}
      wasm: {image: default, tier: wasm, limits: {cpu_millis: 1000, memory_bytes: 536870912, pids: 64, disk_bytes: 268435456}}
`

func (b *bench) tiers(ctx context.Context, names []string) error {
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	config := filepath.Join(dir, "berth.yaml")
	if err := os.WriteFile(config, []byte(terms), 0o600); err != nil {
		return err
	}
	up, err := b.up(ctx, "--config", config)
	if err != nil {
		return err
	}
	defer up.stop()
	plain, err := peer.Start(ctx)
	if err != nil {
		return err
	}
	defer plain.Stop()
	for _, t := range known {
		if !slices.Contains(names, t.name) {
			continue
		}
		why, err := up.AwaitTier(ctx, t.name)
		if err != nil {
			return err
		}
		if why != "" {
			note("tier %s did not run: %s", t.name, why)
			continue
		}
		if err := b.tier(ctx, up, plain, t); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
	}
	return nil
}

func (b *bench) tier(ctx context.Context, up *installation, plain *peer.Peer, t tier) error {
	note("%s: one at a time", t.name)
	pool := fmt.Sprintf("pools:\n  - {template: %s, minimum: %d, ceiling: %d, in_flight: 4, share: 1}\n", t.template, t.atOnce, t.atOnce)
	cold, err := b.coldOpens(ctx, up, t, 3) // images and caches are warm then
	if err != nil {
		return err
	}
	if err := up.ApplyPools(ctx, pool); err != nil {
		return err
	}
	var warm, floor, resume []time.Duration
	for range t.rounds {
		took, s, err := b.warmOpen(ctx, up, t)
		if err != nil {
			return err
		}
		again, err := b.resume(ctx, up, t, s)
		if err != nil {
			return err
		}
		warm, resume = append(warm, took), append(resume, again)
		if t.name == "container" || t.name == "gvisor" {
			one, err := plain.FirstOutput(ctx, t.name)
			if err != nil {
				return err
			}
			floor = append(floor, one)
		}
	}
	burst, err := b.atOnce(ctx, up, t)
	if err != nil {
		return err
	}
	note("%s: with an empty pool", t.name)
	if err := up.RemovePool(ctx, t.template); err != nil {
		return err
	}
	again, err := b.coldOpens(ctx, up, t, t.rounds)
	if err != nil {
		return err
	}
	cold = append(cold[1:], again...)
	b.tierFigures(t, cold, warm, floor, resume, burst)
	return nil
}

// tierFigures puts every warm figure beside the cold open of the same run.
func (b *bench) tierFigures(t tier, cold, warm, floor, resume, burst []time.Duration) {
	const coldIs = "a cold open of the same run, p50"
	c, w := figures.Quantile(cold, 0.5), figures.Quantile(warm, 0.5)
	for _, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p95", 0.95}, {"p99", 0.99}} {
		aim := figures.None
		if q.q == 0.5 {
			aim = t.aim
		}
		b.set.Add(figures.Result{Name: t.name + ", warm claim to first output, " + q.name, Value: figures.Quantile(warm, q.q), Unit: "ms", Floor: c, FloorOf: coldIs}, aim)
	}
	for _, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p95", 0.95}, {"p99", 0.99}} {
		b.set.Add(figures.Result{Name: fmt.Sprintf("%s, %d warm claims at once, %s", t.name, t.atOnce, q.name), Value: figures.Quantile(burst, q.q), Unit: "ms",
			Floor: w, FloorOf: "one at a time, p50"}, figures.None)
	}
	f := figures.Quantile(floor, 0.5)
	b.set.Add(figures.Result{Name: t.name + ", cold open to first output, pool drained, p50", Value: c, Unit: "ms", Floor: f,
		FloorOf: map[bool]string{true: "ctr run of the same image and runtime", false: ""}[f > 0]}, figures.None)
	b.set.Add(figures.Result{Name: t.name + ", resume to first output, p50", Value: figures.Quantile(resume, 0.5), Unit: "ms", Floor: w,
		FloorOf: "a warm claim, p50"}, figures.RatioAtMost(resumeMost))
}

// ask is an open that gets the template's own tier.
func (b *bench) ask(t tier) sdk.OpenOptions {
	o := sdk.OpenOptions{Name: b.name(), Template: t.template, Risk: sdk.OwnCode()}
	if t.name == "wasm" {
		o.Risk = sdk.Risk{CodeAuthor: sdk.OperatorCode, Tools: sdk.BoundedTools, Network: sdk.NoNetwork, DataClass: "public"}
	}
	return o
}

func (t tier) hello() []string {
	if t.name == "wasm" {
		return []string{"js", "-e", "console.log('x')"}
	}
	return []string{"echo", "x"}
}

func (b *bench) coldOpens(ctx context.Context, up *installation, t tier, n int) (took []time.Duration, err error) {
	for range n {
		one, s, err := first.Output(ctx, up.client, b.ask(t), t.hello()...)
		if err != nil {
			return nil, err
		}
		if first.Claimed(s) {
			return nil, fmt.Errorf("a session that was to start cold got a warm sandbox")
		}
		took = append(took, one)
		if err := s.Delete(ctx); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// warmOpen waits until one is there, so that filling is not measured.
func (b *bench) warmOpen(ctx context.Context, up *installation, t tier) (time.Duration, *sdk.Session, error) {
	if err := up.AwaitWarm(ctx, t.template, uint32(t.atOnce)); err != nil {
		return 0, nil, err
	}
	took, s, err := first.Output(ctx, up.client, b.ask(t), t.hello()...)
	if err == nil && !first.Claimed(s) {
		err = fmt.Errorf("a session started cold though %d were warm", t.atOnce)
	}
	return took, s, err
}

// resume puts a session to sleep and measures its way back, then deletes it.
func (b *bench) resume(ctx context.Context, up *installation, t tier, s *sdk.Session) (time.Duration, error) {
	name := s.Name()
	if err := s.Close(ctx); err != nil {
		return 0, err
	}
	if err := up.AwaitWarm(ctx, t.template, uint32(t.atOnce)); err != nil {
		return 0, err
	}
	o := b.ask(t)
	o.Name = name
	took, s, err := first.Output(ctx, up.client, o, t.hello()...)
	if err != nil {
		return 0, err
	}
	if !first.Claimed(s) {
		note("%s: a resume started cold", t.name)
	}
	return took, s.Delete(ctx)
}

// atOnce claims the whole pool in one moment.
func (b *bench) atOnce(ctx context.Context, up *installation, t tier) ([]time.Duration, error) {
	note("%s: %d at once", t.name, t.atOnce)
	if err := up.AwaitWarm(ctx, t.template, uint32(t.atOnce)); err != nil {
		return nil, err
	}
	asks, took, sessions := make([]sdk.OpenOptions, t.atOnce), make([]time.Duration, t.atOnce), make([]*sdk.Session, t.atOnce)
	for i := range asks {
		asks[i] = b.ask(t)
	}
	err := first.Together(t.atOnce, func(i int) (err error) {
		took[i], sessions[i], err = first.Output(ctx, up.client, asks[i], t.hello()...)
		return err
	})
	cold := 0
	for _, s := range sessions {
		if s == nil {
			continue
		}
		if !first.Claimed(s) {
			cold++
		}
		if derr := s.Delete(ctx); derr != nil && err == nil {
			err = derr
		}
	}
	if cold > 0 {
		note("%s: %d of %d at once started cold", t.name, cold, t.atOnce)
	}
	return took, err
}
