// Command flake runs the tests of packages again and again and prints each failure with its log:
//
//	flake -n 20 -exec bin/testns -timeout 40m ./services/pool ./test/chaos
//
// Every second run is under load: two processes that only count, and one that writes a file and syncs it
// without end. It guarantees that each run starts the tests anew (nothing is cached), that the load ends with
// the run, and that the exit status is 0 only if every run of every package passed.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

type options struct {
	n       int
	race    bool
	run     string
	exec    string
	timeout time.Duration
	logs    string
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == loadArg {
		burn()
	}
	runtime.LockOSThread() // the load ends with the thread that started it
	var o options
	flag.IntVar(&o.n, "n", 20, "runs of each package")
	flag.BoolVar(&o.race, "race", false, "with the race detector")
	flag.StringVar(&o.run, "run", "", "only the tests that match this `pattern`")
	flag.StringVar(&o.exec, "exec", "", "`program` that runs the test binary, as for go test -exec")
	flag.DurationVar(&o.timeout, "timeout", 40*time.Minute, "of one run")
	flag.StringVar(&o.logs, "logs", "", "`directory` for the whole log of each failure")
	flag.Parse()
	if flag.NArg() == 0 || o.n < 1 {
		fmt.Fprintln(os.Stderr, "usage: flake [-n 20] [-race] [-run PATTERN] [-exec PROGRAM] PACKAGE...")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	failed, err := o.all(ctx, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "flake:", err)
		os.Exit(2)
	}
	if failed > 0 {
		os.Exit(1)
	}
}

// all runs every package of the patterns o.n times and prints one line for each.
func (o options) all(ctx context.Context, patterns []string) (failed int, err error) {
	out, err := exec.CommandContext(ctx, "go", append([]string{"list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}} {{.ImportPath}}{{end}}"}, patterns...)...).Output()
	if err != nil {
		return 0, fmt.Errorf("list the packages: %w", err)
	}
	tmp, err := os.MkdirTemp("", "flake-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(tmp)
	for line := range strings.Lines(string(out)) {
		dir, pkg, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			continue
		}
		n, err := o.one(ctx, tmp, dir, pkg)
		failed += n
		if err != nil {
			return failed, err
		}
	}
	return failed, nil
}

func (o options) one(ctx context.Context, tmp, dir, pkg string) (failed int, err error) {
	bin := filepath.Join(tmp, filepath.Base(pkg)+".test")
	build := []string{"test", "-c", "-o", bin}
	if o.race {
		build = append(build, "-race")
	}
	if out, err := exec.CommandContext(ctx, "go", append(build, pkg)...).CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	defer os.Remove(bin)
	began := time.Now()
	for i := range o.n {
		took, log, err := o.once(ctx, bin, dir, i%2 == 1)
		if ctx.Err() != nil {
			return failed, ctx.Err()
		}
		if err == nil {
			continue
		}
		failed++
		fmt.Printf("--- FAILED %s, run %d of %d, %s, after %s: %v\n%s\n", pkg, i+1, o.n, under(i%2 == 1), took.Round(time.Millisecond), err, failures(log))
		if o.logs != "" {
			name := filepath.Join(o.logs, fmt.Sprintf("%s-%d.log", strings.ReplaceAll(pkg, "/", "_"), i+1))
			if err := errors.Join(os.MkdirAll(o.logs, 0o755), os.WriteFile(name, log, 0o644)); err != nil {
				return failed, err
			}
			fmt.Printf("the whole log is in %s\n", name)
		}
	}
	fmt.Printf("%-4s %s: %d of %d runs failed, %s a run\n", map[bool]string{true: "ok", false: "FAIL"}[failed == 0], pkg, failed, o.n,
		(time.Since(began) / time.Duration(o.n)).Round(time.Millisecond))
	return failed, nil
}

func under(load bool) string {
	if load {
		return "under load"
	}
	return "without load"
}

// once runs the test binary in its package's directory, as go test does.
func (o options) once(ctx context.Context, bin, dir string, load bool) (took time.Duration, log []byte, err error) {
	if load {
		end, err := startLoad()
		if err != nil {
			return 0, nil, err
		}
		defer end()
	}
	args := []string{bin, "-test.v", "-test.paniconexit0", "-test.timeout=" + o.timeout.String()}
	if o.run != "" {
		args = append(args, "-test.run="+o.run)
	}
	if o.exec != "" {
		args = append([]string{o.exec}, args...)
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	var buf bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &buf, &buf
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	began := time.Now()
	err = cmd.Run()
	if err == nil && bytes.Contains(buf.Bytes(), []byte("testing: warning: no tests to run")) {
		err = errors.New("no test ran")
	}
	return time.Since(began), buf.Bytes(), err
}

// most is how many lines of a failure are printed.
const most = 80

// failures keeps the logs of the tests that failed, or the end of the whole log when no test is named.
func failures(log []byte) string {
	var out, block []string
	for line := range strings.Lines(string(log)) {
		trimmed := strings.TrimLeft(line, " ")
		if strings.HasPrefix(line, "=== RUN") {
			block = nil
		}
		block = append(block, strings.TrimRight(line, "\n"))
		if strings.HasPrefix(trimmed, "--- FAIL") || strings.HasPrefix(line, "left behind by the tests") || strings.HasPrefix(line, "panic:") {
			out, block = append(out, block...), nil
		}
	}
	if len(out) == 0 {
		out = strings.Split(strings.TrimRight(string(log), "\n"), "\n")
	} else {
		out = append(out, block...)
	}
	if cut := len(out) - most; cut > 0 {
		out = append([]string{fmt.Sprintf("(%d lines before these)", cut)}, out[cut:]...)
	}
	return strings.Join(out, "\n")
}
