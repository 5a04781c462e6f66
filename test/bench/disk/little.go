package main

import (
	"context"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
)

// little measures what ten snapshots of a disk take to which a few KiB are appended before each, beside
// one: of a small disk, where metadata weighs most, and of one with 1 GiB.
func (in *installation) little(ctx context.Context) error {
	for _, files := range []int{64, workFiles} {
		note("ten snapshots of %d MiB with 8 KiB appended before each", files)
		if err := in.littleOf(ctx, files); err != nil {
			return err
		}
	}
	return nil
}

func (in *installation) littleOf(ctx context.Context, files int) error {
	s, err := in.open(ctx, "little", "default")
	if err != nil {
		return err
	}
	defer func() { _ = s.Delete(context.WithoutCancel(ctx)) }()
	empty, err := holds(in.store)
	if err != nil {
		return err
	}
	if err := inSession(ctx, s, "make", tree{"/root/work", files, mib}, uint64(6)<<40); err != nil {
		return err
	}
	var one holding
	var sum meters
	for i := range 10 {
		if err := inSession(ctx, s, "append", "/root/log", "8192", uint64(7)<<40+uint64(i)); err != nil {
			return err
		}
		c, err := in.checkpoint(ctx, s)
		if err != nil {
			return err
		}
		if i > 0 {
			sum.read, sum.uploaded, sum.object, sum.cpu = sum.read+c.read, sum.uploaded+c.uploaded, sum.object+c.object, sum.cpu+c.cpu
			sum.saveSeconds += c.took.Seconds()
			continue
		}
		if one, err = holds(in.store); err != nil {
			return err
		}
	}
	ten, err := holds(in.store)
	if err != nil {
		return err
	}
	in.littleFigures(s, files, float64(one.bytes-empty.bytes), float64(ten.bytes-empty.bytes), sum)
	return ctx.Err()
}

func (in *installation) littleFigures(_ *sdk.Session, files int, one, ten float64, sum meters) {
	name := map[bool]string{true: "64 MiB", false: "1 GiB"}[files == 64]
	in.b.add(figures.Result{Name: "store after ten snapshots of " + name + ", 8 KiB appended before each", Value: ten / 1e6, Unit: "MB",
		Floor: one / 1e6, FloorOf: "after one"}, figures.RatioAtMost(1.2))
	in.b.add(figures.Result{Name: "of one of them, bytes uploaded", Value: sum.uploaded / 9 / 1e3, Unit: "kB", Floor: 8.192, FloorOf: "bytes that were appended"}, figures.None)
	in.b.add(figures.Result{Name: "of one of them, objects", Value: sum.object / 9, FloorOf: "nothing"}, figures.None)
	in.b.add(figures.Result{Name: "of one of them, time to the answer", Value: sum.saveSeconds / 9 * 1e3, Unit: "ms"}, figures.None)
	in.b.add(figures.Result{Name: "of one of them, processor time of berth up", Value: ms(sum.cpu) / 9, Unit: "ms"}, figures.None)
}
