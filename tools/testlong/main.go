// Command testlong runs everything at full size and in every tier, which `make test` leaves out for time:
//
//	testlong -bin bin -cache DIR [-only NAME,...] [-list]
//
// It guarantees that a step which passed on this commit is not run again after an interruption, that a step
// counts as passed only if its command ended with status 0, that a working tree with uncommitted changes
// keeps nothing, and that it ends with one table of all steps and exits 1 unless every step passed.
// The log of each step stays beside the kept results, in DIR/test-long/COMMIT.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/internal/testsize"
)

// result of a step, as it is kept.
type result struct {
	Passed  bool
	Last    string // the last line that the step printed
	Seed    uint64 // what SEED was
	Seconds float64
	Began   time.Time
}

type runner struct {
	dir     string // of results and logs of this commit
	keep    bool
	bin     string
	results map[string]result
}

func main() {
	bin := flag.String("bin", "bin", "`directory` of testns, testreport and flake")
	cache := flag.String("cache", "", "`directory` under which results and logs are kept")
	only := flag.String("only", "", "run only the steps with these `names`")
	list := flag.Bool("list", false, "list the steps")
	flag.Parse()
	if *list {
		for _, s := range steps {
			fmt.Printf("%-12s %s\n", s.name, s.what)
		}
		return
	}
	if *cache == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "usage: testlong -bin DIR -cache DIR [-only NAME,...]")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := open(*bin, *cache)
	if err == nil {
		err = r.run(ctx, *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testlong:", err)
		os.Exit(1)
	}
}

// open reads what earlier runs on this commit kept.
func open(bin, cache string) (*runner, error) {
	head, err := exec.Command("git", "rev-parse", "HEAD").Output()
	if err != nil {
		return nil, fmt.Errorf("find the commit: %w", err)
	}
	changes, err := exec.Command("git", "status", "--porcelain").Output()
	if err != nil {
		return nil, fmt.Errorf("look for uncommitted changes: %w", err)
	}
	if bin, err = filepath.Abs(bin); err != nil {
		return nil, err
	}
	r := &runner{bin: bin, keep: len(changes) == 0, results: map[string]result{}}
	name := strings.TrimSpace(string(head))
	if !r.keep {
		name += "-changed"
		fmt.Println("There are uncommitted changes: nothing that earlier runs passed counts, and nothing is kept for later ones.")
	}
	r.dir = filepath.Join(cache, "test-long", name)
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(r.file())
	if !r.keep || errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(raw, &r.results)
	}
	if err != nil {
		return nil, fmt.Errorf("read what earlier runs passed: %w", err)
	}
	return r, nil
}

func (r *runner) file() string { return filepath.Join(r.dir, "results.json") }

func (r *runner) run(ctx context.Context, only string) error {
	names := strings.FieldsFunc(only, func(c rune) bool { return c == ',' })
	for _, n := range names {
		if !slices.ContainsFunc(steps, func(s step) bool { return s.name == n }) {
			return fmt.Errorf("there is no step %q; -list lists them", n)
		}
	}
	for _, s := range steps {
		if len(names) > 0 && !slices.Contains(names, s.name) {
			continue
		}
		if r.results[s.name].Passed {
			fmt.Printf("%s: passed on this commit before\n", s.name)
			continue
		}
		if err := r.step(ctx, s); err != nil {
			return err
		}
	}
	return r.table()
}

// step runs one step and keeps its result. An interrupted step keeps nothing.
func (r *runner) step(ctx context.Context, s step) error {
	seed := rand.Uint64N(1 << 40)
	fmt.Printf("%s: %s\n", s.name, s.what)
	log, err := os.Create(filepath.Join(r.dir, s.name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	last := &lastLine{}
	cmd := exec.CommandContext(ctx, "bash", "-c", "set -o pipefail; "+s.script)
	cmd.Stdout, cmd.Stderr = io.MultiWriter(log, last, os.Stdout), io.MultiWriter(log, os.Stderr)
	cmd.Env = append(os.Environ(), "BIN="+r.bin, fmt.Sprintf("SEED=%d", seed), testsize.Env+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt ends the step's whole process group
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	began := time.Now()
	err = cmd.Run()
	if ctx.Err() != nil {
		return fmt.Errorf("%s was interrupted; the next run begins with it", s.name)
	}
	r.results[s.name] = result{err == nil, last.text(), seed, time.Since(began).Seconds(), began.UTC()}
	if !r.keep {
		return nil
	}
	raw, err := json.MarshalIndent(r.results, "", "  ")
	if err != nil {
		return err
	}
	tmp := r.file() + ".tmp"
	if err := os.WriteFile(tmp, raw, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, r.file())
}

// table prints every step; one that did not run or failed is an error.
func (r *runner) table() error {
	var bad []string
	fmt.Printf("\n| step | result | minutes | seed | what it printed last |\n|---|---|---|---|---|\n")
	for _, s := range steps {
		x, ran := r.results[s.name]
		word := map[bool]string{true: "passed", false: "FAILED"}[x.Passed]
		if !ran {
			word = "not run"
		}
		if !x.Passed {
			bad = append(bad, s.name)
		}
		fmt.Printf("| %s | %s | %.1f | %d | %s |\n", s.name, word, x.Seconds/60, x.Seed, x.Last)
	}
	fmt.Printf("\nLogs: %s\n", r.dir)
	if len(bad) > 0 {
		return fmt.Errorf("not passed: %s", strings.Join(bad, ", "))
	}
	return nil
}

// lastLine keeps the last line of what is written.
type lastLine struct{ done, now string }

func (l *lastLine) Write(p []byte) (int, error) {
	lines := strings.Split(l.now+string(p), "\n")
	for _, line := range lines[:len(lines)-1] {
		if strings.TrimSpace(line) != "" {
			l.done = line
		}
	}
	l.now = lines[len(lines)-1]
	return len(p), nil
}

func (l *lastLine) text() string {
	if s := strings.TrimSpace(l.now); s != "" {
		return s
	}
	return strings.TrimSpace(l.done)
}
