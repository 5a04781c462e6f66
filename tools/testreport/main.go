// Command testreport reads `go test -json` on its standard input and prints
// every skip with its reason, where the time went (see times.go), every
// failure with the end of its output, the names of the failed tests in one
// line, and one closing line of counts. What matters most comes last, because
// that is what is left of a log that is cut. It exits 1 if anything failed or
// if no test ran, so that a broken pipe is never a success.
//
//	go test -json -debug-actiongraph=$dir/graph-1.json ./... | testreport -dir $dir -budget 15m
//
// A test declares a wait with t.Attr("wait", "3.2s: the lease expires"); the
// report adds declared waits up by package.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// event is one line of `go test -json`; see `go doc test2json`.
type event struct {
	Action, Package, Test, Output, ImportPath string
	Key, Value                                string // of an attribute
	Elapsed                                   float64
}

type report struct {
	passed, failed, skipped int
	output                  map[string][]string
	failures, skips         []string
	noise                   []string
	times                   times
}

func newReport() *report {
	return &report{output: map[string][]string{}, times: times{packages: map[string]*cost{}, tests: map[string]float64{}}}
}

func main() {
	budget := flag.Duration("budget", 0, "print the wall time of the run beside this `duration`")
	began := flag.Int64("began", 0, "count the wall time from this second since 1970")
	dir := flag.String("dir", "", "`directory` with the graph-*.json files of -debug-actiongraph and the usage.json of testns")
	flag.Parse()
	r := newReport()
	load := startLoad()
	r.read(os.Stdin, os.Stdout)
	r.times.wall = time.Since(load.began)
	if *began > 0 {
		r.times.wall = time.Since(time.Unix(*began, 0))
	}
	if *dir != "" {
		if err := r.times.readDir(*dir); err != nil {
			fmt.Fprintln(os.Stderr, "testreport:", err)
		}
	}
	r.print(os.Stdout, func(w io.Writer) { r.times.printTotal(w, *budget, load.end()) })
	if r.failed > 0 || r.passed == 0 {
		os.Exit(1)
	}
}

func (r *report) read(in io.Reader, progress io.Writer) {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 1<<20), 16<<20)
	for lines.Scan() {
		var ev event
		if json.Unmarshal(lines.Bytes(), &ev) != nil {
			r.noise = append(r.noise, lines.Text())
			continue
		}
		r.take(ev, progress)
	}
}

func (r *report) take(ev event, progress io.Writer) {
	key := ev.Package + " " + ev.Test
	switch ev.Action {
	case "output":
		r.output[key] = append(r.output[key], ev.Output)
	case "build-output":
		r.output[ev.ImportPath+" "] = append(r.output[ev.ImportPath+" "], ev.Output)
		r.noise = append(r.noise, strings.TrimRight(ev.Output, "\n"))
	case "attr":
		r.times.attr(ev)
	case "pass", "fail", "skip":
		r.finish(ev, key, progress)
	}
}

func (r *report) finish(ev event, key string, progress io.Writer) {
	if ev.Test == "" {
		r.finishPackage(ev, key, progress)
		return
	}
	if !strings.Contains(ev.Test, "/") {
		r.times.tests[key] += ev.Elapsed
	}
	switch ev.Action {
	case "pass":
		r.passed++
	case "skip":
		r.skipped++
		r.skips = append(r.skips, fmt.Sprintf("%s: %s", key, reason(r.output[key])))
	case "fail":
		r.failed++
		r.failures = append(r.failures, key)
	}
	if ev.Action != "fail" {
		delete(r.output, key)
	}
}

func (r *report) finishPackage(ev event, key string, progress io.Writer) {
	r.times.of(ev.Package).wall += ev.Elapsed
	if ev.Action == "fail" {
		fmt.Fprintf(progress, "FAIL %s (%.1f s)\n", ev.Package, ev.Elapsed)
		if !slices.ContainsFunc(r.failures, func(f string) bool { return strings.HasPrefix(f, ev.Package+" ") }) {
			r.failed++
			r.failures = append(r.failures, key)
		}
		return
	}
	if ev.Action == "pass" {
		fmt.Fprintf(progress, "ok   %s (%.1f s)\n", ev.Package, ev.Elapsed)
	}
}

// reason is the last line that says something of a skipped test's output.
func reason(out []string) string {
	for _, line := range slices.Backward(out) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "---") && !strings.HasPrefix(line, "===") {
			return line
		}
	}
	return "no reason was given"
}

// print writes the report; total writes its line about the whole run.
func (r *report) print(w io.Writer, total func(io.Writer)) {
	for _, line := range r.noise {
		fmt.Fprintln(w, line)
	}
	if len(r.skips) > 0 {
		fmt.Fprintf(w, "\nSkipped, and why:\n  %s\n", strings.Join(r.skips, "\n  "))
	}
	r.times.print(w)
	total(w)
	var names []string
	for _, key := range r.failures {
		fmt.Fprintf(w, "\n--- FAILED %s\n%s", key, tail(r.output[key]))
		names = append(names, strings.TrimSpace(key))
	}
	if len(names) > 0 {
		fmt.Fprintf(w, "\nFailed: %s", strings.Join(names, ", "))
	}
	fmt.Fprintf(w, "\n%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
}

// mostLines is how many lines of a failure's output are printed.
const mostLines = 30

// tail is the end of a failure's output.
func tail(out []string) string {
	text := strings.TrimRight(strings.Join(out, ""), "\n")
	if text == "" {
		return ""
	}
	lines := strings.Split(text, "\n")
	if cut := len(lines) - mostLines; cut > 0 {
		return fmt.Sprintf("(%d lines before these)\n%s\n", cut, strings.Join(lines[cut:], "\n"))
	}
	return text + "\n"
}
