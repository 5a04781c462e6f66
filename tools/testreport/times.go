package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// cost is what the tests of one package took, in seconds. cpu is 0 where testns did not run them.
type cost struct {
	wall, cpu, waited float64
}

// times is where the time of a run went.
type times struct {
	packages map[string]*cost
	tests    map[string]float64 // seconds of a top-level test, by "package name"
	waits    []string
	wall     time.Duration
	// Seconds of work that `go test` did side by side, by the mode of its action.
	build, link, vet float64
	// cpu is the processor time of builds and of tests under testns, in seconds.
	cpu float64
}

func (t *times) of(pkg string) *cost {
	c := t.packages[pkg]
	if c == nil {
		c = &cost{}
		t.packages[pkg] = c
	}
	return c
}

// attr notes a wait that a test declared: its value is a duration, a colon, and what the test waited for.
func (t *times) attr(ev event) {
	text, what, ok := strings.Cut(ev.Value, ":")
	d, err := time.ParseDuration(text)
	if ev.Key != "wait" || !ok || err != nil {
		return
	}
	t.of(ev.Package).waited += d.Seconds()
	t.waits = append(t.waits, fmt.Sprintf("%8.1f s  %s %s:%s", d.Seconds(), ev.Package, ev.Test, what))
}

// action is an entry of the file that -debug-actiongraph writes; see cmd/go/internal/work.
type action struct {
	Mode                string
	TimeStart, TimeDone time.Time
	CmdUser, CmdSys     time.Duration
}

// readDir reads what `go test` and testns wrote about this run.
func (t *times) readDir(dir string) error {
	graphs, err := filepath.Glob(filepath.Join(dir, "graph-*.json"))
	for _, file := range graphs {
		err = errors.Join(err, t.readGraph(file))
	}
	return errors.Join(err, t.readUsage(filepath.Join(dir, "usage.json")))
}

func (t *times) readGraph(file string) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var all []action
	if err := json.Unmarshal(raw, &all); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for _, a := range all {
		took := a.TimeDone.Sub(a.TimeStart).Seconds()
		switch a.Mode {
		case "build":
			t.build += took
		case "link":
			t.link += took
		case "vet":
			t.vet += took
		default:
			continue // a test's own processor time comes from testns
		}
		t.cpu += (a.CmdUser + a.CmdSys).Seconds()
	}
	return nil
}

// readUsage adds the processor time of each test binary to its package: the binary of a/b/c is c.test, and
// testns also notes the directory in which the binary ran.
func (t *times) readUsage(file string) error {
	f, err := os.Open(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for d := json.NewDecoder(f); ; {
		var u struct {
			Dir string
			CPU float64
		}
		if err := d.Decode(&u); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		t.cpu += u.CPU
		best := ""
		for pkg := range t.packages {
			// the module path ends before the directory begins: the longest common end of path wins
			if common(pkg, u.Dir) > common(best, u.Dir) {
				best = pkg
			}
		}
		if best != "" {
			t.packages[best].cpu += u.CPU
		}
	}
}

// common counts the path elements that a and b have in common at their ends.
func common(a, b string) int {
	x, y := strings.Split(a, "/"), strings.Split(b, "/")
	n := 0
	for n < len(x) && n < len(y) && x[len(x)-1-n] == y[len(y)-1-n] {
		n++
	}
	return n
}

// slowest is how many tests the report names.
const slowest = 20

func (t *times) print(w io.Writer) {
	byWall := func(a, b string) int { return cmp.Compare(t.packages[b].wall, t.packages[a].wall) }
	fmt.Fprintf(w, "\nPackages (seconds):\n      wall       cpu    waited\n")
	quick := 0
	for _, p := range slices.SortedStableFunc(slices.Values(slices.Sorted(maps.Keys(t.packages))), byWall) {
		c := t.packages[p]
		if c.wall < 0.05 {
			quick++
			continue
		}
		fmt.Fprintf(w, "  %8.1f  %8.1f  %8.1f  %s\n", c.wall, c.cpu, c.waited, p)
	}
	fmt.Fprintf(w, "  and %d packages of less than 0.05 s each\n", quick)
	byTime := func(a, b string) int { return cmp.Compare(t.tests[b], t.tests[a]) }
	names := slices.SortedStableFunc(slices.Values(slices.Sorted(maps.Keys(t.tests))), byTime)
	fmt.Fprintf(w, "\nThe %d slowest tests:\n", min(slowest, len(names)))
	for _, name := range names[:min(slowest, len(names))] {
		fmt.Fprintf(w, "  %8.1f s  %s\n", t.tests[name], name)
	}
	if len(t.waits) > 0 {
		slices.SortFunc(t.waits, func(a, b string) int { return cmp.Compare(b, a) })
		fmt.Fprintf(w, "\nDeclared waits, the longest %d of %d:\n%s\n", min(slowest, len(t.waits)), len(t.waits), strings.Join(t.waits[:min(slowest, len(t.waits))], "\n"))
	}
}

// printTotal prints the sums beside the budget and beside the load of other programs.
func (t *times) printTotal(w io.Writer, budget time.Duration, busy loadAt) {
	var sum cost
	for _, c := range t.packages {
		sum.wall, sum.cpu, sum.waited = sum.wall+c.wall, sum.cpu+c.cpu, sum.waited+c.waited
	}
	fmt.Fprintf(w, "\nBuilding %.0f s, linking %.0f s, vetting %.0f s; tests %.0f s, of which declared waits %.0f s; sums over what ran side by side.\n",
		t.build, t.link, t.vet, sum.wall, sum.waited)
	if busy.ok {
		other := max(0, busy.seconds-t.cpu)
		fmt.Fprintf(w, "Processor time: %.0f s of builds and tests, %.0f s of everything else on this machine (%.2f of %d cores); load average %s.\n",
			t.cpu, other, other/max(1, t.wall.Seconds()), busy.cores, busy.average)
	}
	fmt.Fprintf(w, "Wall time: %s", t.wall.Round(time.Second))
	if budget > 0 {
		fmt.Fprintf(w, ", the budget is %s (%.0f %%)", budget, 100*t.wall.Seconds()/budget.Seconds())
	}
	fmt.Fprintln(w, ".")
}

// load remembers how busy the machine had been when the run began.
type load struct {
	began time.Time
	busy  float64
	ok    bool
}

// loadAt is what the machine did since.
type loadAt struct {
	seconds float64
	cores   int
	average string
	ok      bool
}

func startLoad() load {
	busy, _, ok := readStat()
	return load{time.Now(), busy, ok}
}

func (l load) end() loadAt {
	busy, cores, ok := readStat()
	average, _ := os.ReadFile("/proc/loadavg")
	fields := strings.Fields(string(average))
	return loadAt{busy - l.busy, cores, strings.Join(fields[:min(3, len(fields))], " "), ok && l.ok}
}

// readStat reads the busy seconds of all processors and their number from /proc/stat, see proc_stat(5):
// user, nice, system, idle, iowait, irq, softirq, in hundredths of a second.
func readStat() (busy float64, cores int, ok bool) {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return 0, 0, false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 8 || !strings.HasPrefix(fields[0], "cpu") {
			continue
		}
		if fields[0] != "cpu" {
			cores++
			continue
		}
		for i, text := range fields[1:8] {
			n, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return 0, 0, false
			}
			if i != 3 && i != 4 {
				busy += n / 100
			}
		}
		ok = true
	}
	return busy, cores, ok
}
