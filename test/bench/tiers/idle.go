package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/test/bench/first"
	"github.com/berth-dev/berth/tools/residue"
)

const (
	idlers   = 4
	idleTime = 10 * time.Second
)

// idle opens sessions, runs one program in each, lets them be, and counts what their processes hold
// and use: proportional set size (PSS: what is shared counts in parts), and processor time.
func (b *bench) idle(ctx context.Context, t tier) error {
	before := residue.Take()
	var sessions []*sdk.Session
	for i := range idlers {
		_, s, err := first.Output(ctx, b.client, b.ask(t, fmt.Sprintf("idle-%s-%d", t.name, i)), t.hello()...)
		if err != nil {
			return err
		}
		sessions = append(sessions, s)
	}
	time.Sleep(time.Second) // what the first program left behind is reaped
	pids := processesOf(residue.Take().Since(before).About(b.up.Marks...))
	memory := 0
	for _, pid := range pids {
		memory += pssKiB(pid)
	}
	used := cpuTicks(pids)
	time.Sleep(idleTime)
	used = cpuTicks(pids) - used
	b.set.Add(figures.Result{Name: t.name + ", memory of an idle sandbox (PSS of all its processes)", Value: float64(memory) / 1024 / idlers, Unit: "MiB",
		Floor: float64(pssKiB(os.Getpid())) / 1024, FloorOf: "this benchmark's own process"}, figures.None)
	const hertz = 100
	b.set.Add(figures.Result{Name: t.name + ", processor time of an idle sandbox", Value: float64(used) / hertz / idleTime.Seconds() / idlers * 1000, Unit: "thousandths of a core",
		Floor: 1000, FloorOf: "one core"}, figures.None)
	for _, s := range sessions {
		if err := s.Delete(ctx); err != nil {
			return err
		}
	}
	return nil
}

func processesOf(r residue.Residue) (pids []int) {
	for _, p := range r.Processes {
		if words := strings.Fields(p); len(words) > 1 {
			if pid, err := strconv.Atoi(words[1]); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func pssKiB(pid int) int {
	b, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "smaps_rollup"))
	for line := range strings.Lines(string(b)) {
		var kib int
		if _, err := fmt.Sscanf(line, "Pss: %d kB", &kib); err == nil {
			return kib
		}
	}
	return 0
}

// cpuTicks adds up user and system time, in hundredths of a second.
func cpuTicks(pids []int) (ticks int) {
	for _, pid := range pids {
		b, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
		_, rest, _ := strings.Cut(string(b), ") ")
		words := strings.Fields(rest)
		if len(words) > 13 {
			user, _ := strconv.Atoi(words[11])
			system, _ := strconv.Atoi(words[12])
			ticks += user + system
		}
	}
	return ticks
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Clone(v)
	slices.Sort(s)
	return s[len(s)/2]
}
