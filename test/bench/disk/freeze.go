package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	frozenRounds  = 10
	scatterRounds = 4 // each saves 256 MiB
	redirtied     = 64 * mib
	aimFrozen     = 100 // ms
)

// freezes measures how long writers wait for a checkpoint of a disk of 10 GiB that holds 2 GiB.
func (in *installation) freezes(ctx context.Context) error {
	note("freeze: 10 GiB disk with 2 GiB of files, %d checkpoints in each way", frozenRounds)
	s, err := in.open(ctx, "freeze", "ten")
	if err != nil {
		return err
	}
	defer func() { _ = s.Delete(context.WithoutCancel(ctx)) }()
	for i, t := range []tree{{"/root/work", 448, 4 * mib}, {"/root/scattered", 1, 4 * redirtied}} {
		if err := inSession(ctx, s, "make", t, uint64(1+i)<<50); err != nil {
			return err
		}
	}
	first, err := in.checkpoint(ctx, s)
	if err != nil {
		return err
	}
	note("freeze: the first checkpoint took %s", first.took.Round(time.Millisecond))
	r, err := startRedirtier(ctx, s, "/root/redirty", redirtied, "/root/probe", tree{Dir: "/root/scattered"}.file(0))
	if err != nil {
		return err
	}
	defer r.end()
	idle, dirty, err := in.freezeFloors(ctx)
	if err != nil {
		return err
	}
	for _, way := range []struct {
		name, word string
		rounds     int
		floor      []time.Duration
		floorOf    string
	}{
		{"no other writer", "calm", frozenRounds, idle, "FIFREEZE and FITHAW of an equal idle file system"},
		{"64 MiB redirtied while each is taken", "once", frozenRounds, dirty, "FIFREEZE and FITHAW of an equal file system with 64 MiB not synced"},
		{"64 MiB redirtied without end", "always", frozenRounds, dirty, "FIFREEZE and FITHAW of an equal file system with 64 MiB not synced"},
		{"64 MiB redirtied in pieces of 4 KiB while each is taken", "scatter", scatterRounds, dirty, "FIFREEZE and FITHAW of an equal file system with 64 MiB not synced"},
	} {
		if err := in.freezeWay(ctx, s, r, way.name, way.word, way.rounds, way.floor, way.floorOf); err != nil {
			return err
		}
	}
	return nil
}

func (in *installation) freezeFloors(ctx context.Context) (idle, dirty []time.Duration, err error) {
	p, _, err := mountPlain(ctx, in.pool(), in.dir, 10*gib)
	if err != nil {
		return nil, nil, err
	}
	defer p.remove()
	if idle, err = p.freezes(frozenRounds, func() error { return nil }); err != nil {
		return nil, nil, err
	}
	seed := uint64(0)
	dirty, err = p.freezes(frozenRounds, func() error {
		seed++
		return overwrite(filepath.Join(p.at, "file"), redirtied, seed)
	})
	return idle, dirty, err
}

// freezeWay takes checkpoints while the program in the session does what word says.
func (in *installation) freezeWay(ctx context.Context, s *sdk.Session, r *redirtier, name, word string, rounds int, floor []time.Duration, floorOf string) error {
	note("freeze, %s", name)
	var frozen, stalls []time.Duration
	for range rounds {
		if _, err := r.stall(); err != nil {
			return err
		}
		if _, err := r.say(word); err != nil {
			return err
		}
		c, err := in.checkpoint(ctx, s)
		if err != nil {
			return err
		}
		stall, err := r.stall()
		if err != nil {
			return err
		}
		if c.saves > 0 {
			frozen = append(frozen, time.Duration(c.frozen*float64(time.Second)))
		}
		stalls = append(stalls, stall)
	}
	if _, err := r.say("calm"); err != nil {
		return err
	}
	if len(frozen) < rounds {
		note("freeze, %s: only %d of %d checkpoints had anything to save", name, len(frozen), rounds)
	}
	if len(frozen) == 0 {
		return fmt.Errorf("no checkpoint was taken")
	}
	aim := figures.AtMost(aimFrozen, "ms")
	mid := figures.Quantile(floor, 0.5)
	in.b.add(figures.Result{Name: "frozen, " + name + ", p50", Value: figures.Quantile(frozen, 0.5), Unit: "ms", Floor: mid, FloorOf: floorOf + ", p50"}, aim)
	in.b.add(figures.Result{Name: "frozen, " + name + ", worst", Value: ms(slices.Max(frozen)), Unit: "ms", Floor: ms(slices.Max(floor)), FloorOf: floorOf + ", worst"}, aim)
	in.b.add(figures.Result{Name: "longest write of another program in the sandbox, " + name + ", p50 of checkpoints", Value: figures.Quantile(stalls, 0.5), Unit: "ms",
		Floor: figures.Quantile(frozen, 0.5), FloorOf: "the frozen time, p50"}, figures.None)
	return nil
}
