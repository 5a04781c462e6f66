package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	pairs   = 10
	window  = "1.5" // seconds of one half of a pair
	mostBad = 0.15
	probeAt = "/usr/local/bin/probe"
)

// greedy is what a bad neighbour does; fair is what an equal one does that is not greedy, and work is
// what the measured session does beside each.
var greedy = []struct {
	name            string
	bad, fair, work []string
}{
	{"all processors", []string{"burn", window, "16"}, []string{"burn", window}, []string{"burn", "1"}},
	{"a fork bomb", []string{"fork-bomb", window}, []string{"burn", window}, []string{"burn", "1"}},
	{"a memory hog", []string{"memory-hog", window}, []string{"burn", window}, []string{"burn", "1"}},
	{"a disk filler", []string{"disk-fill", window}, []string{"write-some", window}, []string{"write-some", "1"}},
	{"a flood of dirty pages", []string{"dirty-flood", window}, []string{"write-some", window}, []string{"write-some", "1"}},
}

// greed measures what a session gets done beside a greedy neighbour and beside a fair one, in turns:
// the median of the pairs' losses.
func (b *bench) greed(ctx context.Context, t tier) error {
	program, err := buildProbe(ctx, b.dir)
	if err != nil {
		return err
	}
	good, err := b.withProbe(ctx, t, program)
	if err != nil {
		return err
	}
	bad, err := b.withProbe(ctx, t, program)
	if err != nil {
		return err
	}
	for _, g := range greedy {
		var losses []float64
		for i := range pairs {
			order := [][]string{g.fair, g.bad}
			got := map[bool]float64{}
			for k := range order {
				isBad := (k + i%2) % 2 // who is first changes from pair to pair
				n, err := b.beside(ctx, good, bad, g.work, order[isBad])
				if err != nil {
					return fmt.Errorf("%s: %w", g.name, err)
				}
				got[isBad == 1] = n
			}
			losses = append(losses, 1-got[true]/max(got[false], 1))
		}
		b.set.Add(figures.Result{Name: fmt.Sprintf("%s, lost to a neighbour with %s, median of %d pairs", t.name, g.name, pairs), Value: 100 * median(losses), Unit: "%",
			FloorOf: "the same work beside an equal neighbour that is not greedy"}, figures.AtMost(100*mostBad, "%"))
	}
	return errors.Join(good.Delete(ctx), bad.Delete(ctx))
}

// beside returns how much work the good session does while the neighbour does what it is told.
func (b *bench) beside(ctx context.Context, good, neighbour *sdk.Session, work, other []string) (float64, error) {
	done := make(chan error, 1)
	go func() {
		_, err := runProbe(ctx, neighbour, other)
		done <- err
	}()
	time.Sleep(200 * time.Millisecond) // the neighbour has begun
	said, err := runProbe(ctx, good, work)
	<-done // how a greedy program ends is its own affair
	if err != nil {
		return 0, err
	}
	if err := awake(ctx, neighbour); err != nil {
		return 0, err
	}
	return strconv.ParseFloat(said, 64)
}

// awake wakes a session again that ran out of memory as a whole.
func awake(ctx context.Context, s *sdk.Session) error {
	for end := time.Now().Add(time.Minute); ; {
		err := s.Run(ctx, sdk.Command("true"))
		if err == nil || time.Now().After(end) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
		_ = s.Reopen(ctx)
	}
}

func runProbe(ctx context.Context, s *sdk.Session, args []string) (string, error) {
	var out bytes.Buffer
	if err := s.Run(ctx, sdk.Cmd{Args: append([]string{probeAt}, args...), Stdout: &out}); err != nil {
		return "", err
	}
	var o struct{ Detail string }
	if err := json.Unmarshal(out.Bytes(), &o); err != nil {
		return "", fmt.Errorf("the probe says %q: %w", out.String(), err)
	}
	return o.Detail, nil
}

func (b *bench) withProbe(ctx context.Context, t tier, program []byte) (*sdk.Session, error) {
	s, err := b.open(ctx, t)
	if err != nil {
		return nil, err
	}
	_, err = s.Files().Write(ctx, probeAt, bytes.NewReader(program), sdk.WriteOptions{Mode: 0o755})
	return s, err
}

// buildProbe builds the program of the hostile suite.
func buildProbe(ctx context.Context, dir string) ([]byte, error) {
	path := filepath.Join(dir, "probe")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", path, "github.com/berth-dev/berth/test/hostile/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the probe: %w: %s", err, out)
	}
	return os.ReadFile(path)
}
