package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/test/bench/first"
)

const (
	execRounds = 100
	execWarm   = 10
	fileMiB    = 256
	fileRounds = 3
)

// execs alternates an exec of true in a session with fork, exec and wait of true on the host.
func (b *bench) execs(ctx context.Context, t tier) error {
	s, err := b.open(ctx, t)
	if err != nil {
		return err
	}
	var took, floor []time.Duration
	for i := range execWarm + execRounds {
		began := time.Now()
		if err := s.Run(ctx, sdk.Command("true")); err != nil {
			return err
		}
		one := time.Since(began)
		began = time.Now()
		if err := exec.CommandContext(ctx, "true").Run(); err != nil {
			return err
		}
		if i >= execWarm {
			took, floor = append(took, one), append(floor, time.Since(began))
		}
	}
	for _, q := range []float64{0.5, 0.99} {
		b.set.Add(figures.Result{Name: fmt.Sprintf("%s, exec of true, p%d", t.name, int(q*100)), Value: figures.Quantile(took, q), Unit: "ms",
			Floor: figures.Quantile(floor, q), FloorOf: "fork, exec and wait of true on the host"}, figures.None)
	}
	return s.Delete(ctx)
}

// files writes and reads a file with dd inside, and the same on the file system that holds the disks.
func (b *bench) files(ctx context.Context, t tier) error {
	s, err := b.open(ctx, t)
	if err != nil {
		return err
	}
	var write, read, hostWrite, hostRead []float64
	for range fileRounds {
		w, r, err := dd("/root/bench", func(args ...string) ([]byte, error) {
			var errOut bytes.Buffer
			err := s.Run(ctx, sdk.Cmd{Args: append([]string{"dd"}, args...), Env: map[string]string{"LC_ALL": "C"}, Stderr: &errOut})
			return errOut.Bytes(), err
		})
		if err != nil {
			return err
		}
		write, read = append(write, w), append(read, r)
		w, r, err = dd(filepath.Join(b.dir, "bench"), func(args ...string) ([]byte, error) {
			cmd := exec.CommandContext(ctx, "dd", args...)
			cmd.Env = append(os.Environ(), "LC_ALL=C")
			return cmd.CombinedOutput()
		})
		if err != nil {
			return err
		}
		hostWrite, hostRead = append(hostWrite, w), append(hostRead, r)
	}
	b.set.Add(figures.Result{Name: t.name + ", sequential write and fsync, median", Value: median(write), Unit: "MiB/s", Floor: median(hostWrite),
		FloorOf: "dd on the host's own file system"}, figures.None)
	b.set.Add(figures.Result{Name: t.name + ", sequential read of what was just written, median", Value: median(read), Unit: "MiB/s", Floor: median(hostRead),
		FloorOf: "dd on the host's own file system"}, figures.None)
	return s.Delete(ctx)
}

var ddSpeed = regexp.MustCompile(`(\d+) bytes .* copied, ([0-9.e+-]+) s`)

// dd writes a file with a final fsync, and reads it again; both in MiB a second.
func dd(path string, run func(...string) ([]byte, error)) (write, read float64, err error) {
	speed := func(args ...string) (float64, error) {
		out, err := run(args...)
		m := ddSpeed.FindSubmatch(out)
		if err != nil || m == nil {
			return 0, fmt.Errorf("dd: %w: %s", err, out)
		}
		n, _ := strconv.ParseFloat(string(m[1]), 64)
		secs, _ := strconv.ParseFloat(string(m[2]), 64)
		return n / (1 << 20) / secs, nil
	}
	if write, err = speed("if=/dev/zero", "of="+path, "bs=1M", fmt.Sprintf("count=%d", fileMiB), "conv=fsync"); err != nil {
		return 0, 0, err
	}
	read, err = speed("if="+path, "of=/dev/null", "bs=1M")
	return write, read, err
}

// call is one bounded call from nothing: open, one short program, its output, delete.
func (b *bench) call(ctx context.Context, t tier) error {
	argv := []string{"python3", "-c", "import json; print(json.dumps({'sum': sum(range(1000))}))"}
	if !t.native() {
		argv = []string{"js", "-e", "console.log(JSON.stringify({sum: [...Array(1000).keys()].reduce((a, b) => a + b, 0)}))"}
	}
	var whole, again []time.Duration
	for range 5 {
		b.opened++
		began := time.Now()
		_, s, err := first.Output(ctx, b.client, b.ask(t, fmt.Sprintf("call%d", b.opened)), argv...)
		if err != nil {
			return err
		}
		whole = append(whole, time.Since(began))
		for range 3 {
			began := time.Now()
			if out, err := s.Output(ctx, argv[0], argv[1:]...); err != nil || len(out) == 0 {
				return fmt.Errorf("%q: %w", out, err)
			}
			again = append(again, time.Since(began))
		}
		if err := s.Delete(ctx); err != nil {
			return err
		}
	}
	var floor []time.Duration
	for range 5 {
		began := time.Now()
		if err := exec.CommandContext(ctx, "python3", "-c", "import json; print(json.dumps({'sum': sum(range(1000))}))").Run(); err != nil {
			return err
		}
		floor = append(floor, time.Since(began))
	}
	f := figures.Quantile(floor, 0.5)
	const of = "python3 on the host doing the same"
	b.set.Add(figures.Result{Name: t.name + ", one bounded call from nothing, p50", Value: figures.Quantile(whole, 0.5), Unit: "ms", Floor: f, FloorOf: of}, figures.None)
	b.set.Add(figures.Result{Name: t.name + ", a further bounded call, p50", Value: figures.Quantile(again, 0.5), Unit: "ms", Floor: f, FloorOf: of}, figures.None)
	return nil
}
