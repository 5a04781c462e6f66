package main

import (
	"context"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
)

// little measures ten snapshots of a small disk, where metadata weighs most.
func (in *installation) little(ctx context.Context) error {
	s, err := in.open(ctx, "little", "default")
	if err != nil {
		return err
	}
	defer func() { _ = s.Delete(context.WithoutCancel(ctx)) }()
	if err := inSession(ctx, s, "make", tree{"/root/work", 64, mib}, uint64(6)<<40); err != nil {
		return err
	}
	if _, err := in.checkpoint(ctx, s); err != nil {
		return err
	}
	return in.ten(ctx, s, "64 MiB")
}

// ten measures what nine more snapshots of a disk take to which 8 KiB are appended before each, beside
// the first.
func (in *installation) ten(ctx context.Context, s *sdk.Session, name string) error {
	note("ten snapshots of %s with 8 KiB appended before each", name)
	one, err := holdsOf(in.store, s.Key())
	if err != nil {
		return err
	}
	first, err := in.read()
	if err != nil {
		return err
	}
	var took []time.Duration
	for i := range 9 {
		if err := inSession(ctx, s, "append", "/root/log", "8192", uint64(7)<<40+uint64(i)); err != nil {
			return err
		}
		c, err := in.checkpoint(ctx, s)
		if err != nil {
			return err
		}
		took = append(took, c.took)
	}
	last, err := in.read()
	if err != nil {
		return err
	}
	ten, err := holdsOf(in.store, s.Key())
	if err != nil {
		return err
	}
	in.tenFigures(name, float64(one.bytes), float64(ten.bytes), last.since(first), took)
	return nil
}

func (in *installation) tenFigures(name string, one, ten float64, nine meters, took []time.Duration) {
	each := "a snapshot of " + name + " with 8 KiB appended"
	in.b.add(figures.Result{Name: "store after ten snapshots of " + name + " with 8 KiB appended before each", Value: ten / 1e6, Unit: "MB",
		Floor: one / 1e6, FloorOf: "after one"}, figures.RatioAtMost(1.2))
	in.b.add(figures.Result{Name: each + ", bytes uploaded", Value: nine.uploaded / 9 / 1e3, Unit: "kB", Floor: 8.192, FloorOf: "bytes that were appended"}, figures.None)
	in.b.add(figures.Result{Name: each + ", objects", Value: nine.object / 9, Floor: 2, FloorOf: "one pack and one manifest"}, figures.None)
	in.b.add(figures.Result{Name: each + ", time to the answer, p50", Value: figures.Quantile(took, 0.5), Unit: "ms",
		Floor: nine.frozen / 9 * 1e3, FloorOf: "of that, frozen"}, figures.None)
	in.b.add(figures.Result{Name: each + ", processor time of berth up, with the append", Value: ms(nine.cpu) / 9, Unit: "ms",
		Floor: figures.Quantile(took, 0.5), FloorOf: "time to the answer"}, figures.None)
}
