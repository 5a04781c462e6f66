package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/simcore"
	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	cellHosts    = 1000
	cellSessions = 100_000
	deciders     = 64
	decideFor    = 10 * time.Second
)

// placement measures decisions, memory and snapshots of a cell of that size:
// the scheduler's own state machine and log, without a bus.
func (b *bench) placement(ctx context.Context) error {
	note("a cell of %d hosts and %d sleeping sessions", cellHosts, cellSessions)
	state, _ := simcore.Fill(cellHosts, cellSessions)
	var snap bytes.Buffer
	began := time.Now()
	if _, err := state.WriteTo(&snap); err != nil {
		return err
	}
	wrote := time.Since(began)
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := simcore.SeedLog(dir, "r1", state); err != nil {
		return err
	}
	state = nil
	if err := b.memory(snap.Bytes()); err != nil {
		return err
	}
	if err := b.snapshots(dir, snap.Bytes(), wrote); err != nil {
		return err
	}
	return b.decisions(ctx, dir)
}

// memory is what the heap holds for each sleeping session, read back from a snapshot as a replica does.
func (b *bench) memory(snap []byte) error {
	before := heap()
	state, err := simcore.ReadState(bytes.NewReader(snap))
	if err != nil {
		return err
	}
	per := float64(heap()-before) / cellSessions
	runtime.KeepAlive(state)
	b.set.Add(figures.Result{Name: "state machine, memory for a sleeping session", Value: per, Unit: "B",
		Floor: float64(len(snap)) / cellSessions, FloorOf: "its line in a snapshot"}, figures.AtMost(1024, "B"))
	return nil
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func (b *bench) snapshots(dir string, snap []byte, wrote time.Duration) error {
	path := filepath.Join(dir, "floor")
	began := time.Now()
	f, err := os.Create(path)
	if err == nil {
		_, err = f.Write(snap)
	}
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return err
	}
	f.Close()
	write := time.Since(began)
	began = time.Now()
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	lines := bytes.Count(raw, []byte{'\n'})
	read := time.Since(began)
	began = time.Now()
	if _, err := simcore.ReadState(bytes.NewReader(raw)); err != nil {
		return err
	}
	restored := time.Since(began)
	size := fmt.Sprintf("%d lines, %.0f MiB", lines, float64(len(snap))/(1<<20))
	b.set.Add(figures.Result{Name: "snapshot written, 100,000 sessions", Value: ms(wrote), Unit: "ms", Floor: ms(write),
		FloorOf: "the same bytes written and synced (" + size + ")"}, figures.None)
	b.set.Add(figures.Result{Name: "snapshot restored, 100,000 sessions", Value: ms(restored), Unit: "ms", Floor: ms(read),
		FloorOf: "the same bytes read and their lines counted"}, figures.None)
	return os.Remove(path)
}

// decisions ranks all hosts and commits the placement through the log, which
// syncs, for as many callers as wait at once.
func (b *bench) decisions(ctx context.Context, dir string) error {
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	began := time.Now()
	log, err := simcore.OpenLog(simcore.LogConfig{Dir: dir, ID: "r1", Log: quiet})
	if err != nil {
		return err
	}
	defer log.Close()
	<-log.Leadership()
	if err := log.Barrier(time.Minute); err != nil {
		return err
	}
	b.set.Add(figures.Result{Name: "replica started, 100,000 sessions", Value: ms(time.Since(began)), Unit: "ms"}, figures.None)
	note("placement decisions for %s", decideFor)
	floor, err := perSecond(ctx, func(ctx context.Context, n int) error {
		_, err := log.Apply(ctx, simcore.Entry{Now: 1, Trim: &simcore.Trim{}})
		return err
	})
	if err != nil {
		return err
	}
	rate, err := perSecond(ctx, func(ctx context.Context, n int) error { return decide(ctx, log, n) })
	if err != nil {
		return err
	}
	b.set.Add(figures.Result{Name: "placement decisions, 1,000 hosts and 100,000 sessions", Value: rate, Unit: "1/s", Floor: floor,
		FloorOf: "empty entries through the same log, each synced"}, figures.Aim{Text: "at least 1000 1/s",
		Met: func(r figures.Result) bool { return r.Value >= 1000 }})
	return nil
}

// decide places sleeping session n: rank, entry, and the word of the host that it is awake.
func decide(ctx context.Context, log *simcore.Log, n int) error {
	key := simcore.FillKey(n % cellSessions)
	open := simcore.FillOpen(n%cellSessions, string(ids.NewRequestID()), nil)
	log.View(func(s *simcore.State) {
		open.Candidates = s.Rank(s.Session(key), open.Terms, func(ids.Host) simcore.HostFacts { return simcore.HostFacts{Alive: true} })
	})
	out, err := log.Apply(ctx, simcore.Entry{Now: 1, Open: open})
	switch {
	case err != nil:
		return err
	case out.Refused != nil:
		return fmt.Errorf("open %d was refused: %s", n, out.Refused.Reason)
	case out.Session.State != simcore.Waking:
		return fmt.Errorf("open %d was not placed: it is %s", n, out.Session.State)
	}
	ref := simcore.Ref{Session: key, Generation: out.Session.Generation, Epoch: out.Session.Epoch}
	_, err = log.Apply(ctx, simcore.Entry{Now: 1, Woke: &simcore.Woke{Ref: ref, Origin: corev1.Origin_ORIGIN_RESUMED}})
	if n%256 == 0 {
		_, err = log.Apply(ctx, simcore.Entry{Now: 1, Trim: &simcore.Trim{Upto: 1 << 62}}) // as the bus would take them
	}
	return err
}

// perSecond runs f with growing numbers from many callers for a while.
func perSecond(ctx context.Context, f func(context.Context, int) error) (float64, error) {
	run, cancel := context.WithTimeout(ctx, decideFor)
	defer cancel()
	var n, done atomic.Int64
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	began := time.Now()
	for range deciders {
		wg.Go(func() {
			for run.Err() == nil && failed.Load() == nil {
				if err := f(ctx, int(n.Add(1))); err != nil {
					failed.CompareAndSwap(nil, &err)
					return
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return float64(done.Load()) / time.Since(began).Seconds(), nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
