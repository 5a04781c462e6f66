package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/berth-dev/berth/test/bench/figures"
)

const sleepRounds = 4

// sleeps measures the time from the request to sleep until its answer, of 1 GiB with 50 MiB that was
// just written, and the resume from the image that stayed.
func (w *work) sleeps(ctx context.Context) error {
	note("sleep of 1 GiB with 50 MiB dirty, %d rounds, store %s", sleepRounds, w.kind)
	if err := w.s.Close(ctx); err != nil { // what came before is not measured
		return err
	}
	var dirty, clean, copied, attached, resumed []time.Duration
	for i := range sleepRounds {
		for _, writes := range []bool{false, true} {
			began := time.Now()
			s, err := w.open(ctx, "work", "default")
			if err != nil {
				return err
			}
			w.s = s
			resumed, attached = append(resumed, time.Since(began)), append(attached, attach(s))
			if writes {
				c := change{changed / mib, mib, uint64(5+i) << 40}
				if err := inSession(ctx, s, "apply", w.files, c); err != nil {
					return err
				}
			}
			began = time.Now()
			if err := s.Close(ctx); err != nil {
				return err
			}
			if writes {
				dirty = append(dirty, time.Since(began))
			} else {
				clean = append(clean, time.Since(began))
			}
		}
		d, err := dd(ctx, w.dir, changed/mib)
		if err != nil {
			return err
		}
		copied = append(copied, d)
	}
	return w.sleepFigures(ctx, dirty, clean, copied, attached, resumed)
}

func (w *work) sleepFigures(ctx context.Context, dirty, clean, copied, attached, resumed []time.Duration) error {
	store := map[string]string{"file": "file://", "nats": "nats://"}[w.kind]
	floor := figures.Quantile(clean, 0.5) + figures.Quantile(copied, 0.5)
	floorOf := fmt.Sprintf("a sleep with nothing written (%.0f ms), and dd of 50 MiB with fsync (%.0f ms)",
		figures.Quantile(clean, 0.5), figures.Quantile(copied, 0.5))
	aim := figures.AtMost(1500, "ms")
	w.b.add(figures.Result{Name: "sleep acknowledged, 1 GiB with 50 MiB dirty, " + store + ", p50", Value: figures.Quantile(dirty, 0.5), Unit: "ms",
		Floor: floor, FloorOf: floorOf}, aim)
	w.b.add(figures.Result{Name: "sleep acknowledged, 1 GiB with 50 MiB dirty, " + store + ", worst", Value: ms(slices.Max(dirty)), Unit: "ms",
		Floor: floor, FloorOf: floorOf}, aim)
	if w.kind != "file" {
		return nil
	}
	p, mounted, err := mountPlain(ctx, w.pool(), w.dir, 4*gib)
	if err != nil {
		return err
	}
	p.remove()
	w.b.add(figures.Result{Name: "resume from the local image, disk attached, p50", Value: figures.Quantile(attached, 0.5), Unit: "ms",
		Floor: ms(mounted), FloorOf: "mount -o loop of an equal empty image"}, figures.None)
	w.b.add(figures.Result{Name: "resume from the local image, request to ready, p50", Value: figures.Quantile(resumed, 0.5), Unit: "ms",
		Floor: figures.Quantile(attached, 0.5), FloorOf: "of that, disk attached"}, figures.None)
	return nil
}
