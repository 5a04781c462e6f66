package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/test/bench/first"
	"github.com/berth-dev/berth/test/bench/peer"
	"github.com/berth-dev/berth/tools/berth/upproc"
	"github.com/berth-dev/berth/tools/residue"
)

const (
	coldRounds = 9
	execRounds = 200
	execWarm   = 20
	execBlocks = 10 // in which our rounds and the peer's take turns
	peerRounds = 50
)

// tier is one isolation tier, the template that has it and its aims.
type tier struct {
	name, template string
	execFaster     float64
}

var tiers = []tier{{"container", "container", 15}, {"gvisor", "default", 4}}

// sandboxes measures real ones beside a plain containerd with the same parts.
func (b *bench) sandboxes(ctx context.Context, execOnly bool) error {
	plain, err := peer.Start(ctx)
	if err != nil {
		return err
	}
	defer plain.Stop()
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	up, err := upproc.Start(ctx, upproc.Options{Bin: b.bin, Dir: dir, Args: []string{"--idle", "1h", "--tiers", "container,gvisor"}})
	if err != nil {
		return err
	}
	defer func() {
		if err := up.Stop(); err != nil {
			note("stop berth up: %v", err)
		}
	}()
	client, err := up.Connect(ctx, "acme", "bench")
	if err != nil {
		return err
	}
	defer client.Close()
	for _, t := range tiers {
		if !execOnly {
			if err := b.coldAndResume(ctx, client, plain, t); err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
		}
		if err := b.execs(ctx, client, plain, t); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
	}
	if execOnly {
		return nil
	}
	return b.asleep(ctx, up, client)
}

// coldAndResume alternates a cold open, a plain ctr run and a resume, so that
// all three see the same machine.
func (b *bench) coldAndResume(ctx context.Context, client *sdk.Client, plain *peer.Peer, t tier) error {
	note("cold open to first output and resume, %s, %d rounds", t.name, coldRounds)
	var cold, bare, resume []time.Duration
	for i := range coldRounds + 1 {
		o := sdk.OpenOptions{Name: fmt.Sprintf("cold%d", i), Template: t.template, Risk: sdk.OwnCode()}
		took, s, err := first.Output(ctx, client, o, "echo", "x")
		if err != nil {
			return err
		}
		floor, err := plain.FirstOutput(ctx, t.name)
		if err != nil {
			return err
		}
		if err := s.Close(ctx); err != nil {
			return err
		}
		again, s, err := first.Output(ctx, client, o, "echo", "x")
		if err != nil {
			return err
		}
		if s.Origin() != sdk.Resumed {
			return fmt.Errorf("the wake says %s", s.Origin())
		}
		if err := s.Delete(ctx); err != nil {
			return err
		}
		if i > 0 { // the first round warms images and caches of both sides
			cold, bare, resume = append(cold, took), append(bare, floor), append(resume, again)
		}
	}
	c, p, r := figures.Quantile(cold, 0.5), figures.Quantile(bare, 0.5), figures.Quantile(resume, 0.5)
	b.set.Add(figures.Result{Name: "cold open to first output, " + t.name + ", p50", Value: c, Unit: "ms", Floor: p,
		FloorOf: "ctr run of the same image and runtime, process start to first byte"}, figures.RatioAtMost(1.15))
	b.set.Add(figures.Result{Name: "resume to first output, " + t.name + ", p50", Value: r, Unit: "ms", Floor: c,
		FloorOf: "the cold open of this run"}, figures.None)
	return nil
}

// execs alternates blocks of our execs and of the peer's, so that both see the
// same machine.
func (b *bench) execs(ctx context.Context, client *sdk.Client, plain *peer.Peer, t tier) error {
	note("exec of true in a live session, %s, %d rounds", t.name, execRounds)
	s, err := client.Open(ctx, sdk.OpenOptions{Name: "exec", Template: t.template, Risk: sdk.OwnCode()})
	if err != nil {
		return err
	}
	if _, err := runTrue(ctx, s, execWarm); err != nil {
		return err
	}
	var took, bare []time.Duration
	err = plain.Execs(ctx, t.name, func(one func() (time.Duration, error)) error {
		for range execBlocks {
			ours, err := runTrue(ctx, s, execRounds/execBlocks)
			if err != nil {
				return err
			}
			took = append(took, ours...)
			for range peerRounds / execBlocks {
				d, err := one()
				if err != nil {
					return err
				}
				bare = append(bare, d)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	b.set.Add(figures.Result{Name: "exec of true, " + t.name + ", p50", Value: figures.Quantile(took, 0.5), Unit: "ms",
		Floor: figures.Quantile(bare, 0.5), FloorOf: "task exec through containerd's client (a peer)"}, figures.TimesFaster(t.execFaster))
	b.set.Add(figures.Result{Name: "exec of true, " + t.name + ", p99", Value: figures.Quantile(took, 0.99), Unit: "ms",
		Floor: figures.Quantile(bare, 0.99), FloorOf: "task exec through containerd's client (a peer)"}, figures.None)
	return s.Delete(ctx)
}

// runTrue times n execs of true in a session, one after the other.
func runTrue(ctx context.Context, s *sdk.Session, n int) (took []time.Duration, err error) {
	for range n {
		began := time.Now()
		if err := s.Run(ctx, sdk.Command("true")); err != nil {
			return nil, err
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}

// asleep counts what six sleeping sessions cost beside what berth up has when
// all sessions before them were deleted.
func (b *bench) asleep(ctx context.Context, up *upproc.Process, client *sdk.Client) error {
	before := residue.Take()
	for _, t := range tiers {
		for i := range 3 {
			s, err := client.Open(ctx, sdk.OpenOptions{Name: fmt.Sprintf("sleeper-%s-%d", t.name, i), Template: t.template, Risk: sdk.OwnCode()})
			if err != nil {
				return err
			}
			if err := s.Close(ctx); err != nil {
				return err
			}
		}
	}
	left := residue.Take().Since(before).About(up.Marks...)
	const floorOf = "six sessions while asleep"
	zero := figures.AtMost(0, "")
	b.set.Add(figures.Result{Name: "asleep, processes", Value: float64(len(left.Processes)), FloorOf: floorOf}, zero)
	b.set.Add(figures.Result{Name: "asleep, resident memory", Value: float64(residentKiB(left)), Unit: "KiB", FloorOf: floorOf}, zero)
	b.set.Add(figures.Result{Name: "asleep, mounts and loop devices", Value: float64(len(left.Mounts) + len(left.Loops)), FloorOf: floorOf}, zero)
	b.set.Add(figures.Result{Name: "asleep, cgroups", Value: float64(len(left.Cgroups)), FloorOf: floorOf}, zero)
	if !left.Empty() {
		note("left while asleep: %s", left)
	}
	return nil
}

// residentKiB adds up the resident memory of processes that are left.
func residentKiB(r residue.Residue) (kib int) {
	for _, p := range r.Processes {
		var word string
		var pid, size, resident int
		if _, err := fmt.Sscanf(p, "%s %d", &word, &pid); err != nil {
			continue
		}
		raw, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "statm"))
		if err != nil {
			continue
		}
		if _, err := fmt.Sscanf(string(raw), "%d %d", &size, &resident); err == nil {
			kib += resident * os.Getpagesize() / 1024
		}
	}
	return kib
}
