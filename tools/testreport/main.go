// Command testreport reads `go test -json` on its standard input and prints
// what a person needs: every skip with its reason, the slowest packages, every
// failure with the end of its output, the names of the failed tests in one
// line, and one closing line of counts. What matters most comes last, because
// that is what is left of a log that is cut. It exits 1 if anything failed or
// if no test ran, so that a broken pipe is never a success.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// event is one line of `go test -json`; see `go doc test2json`.
type event struct {
	Action, Package, Test, Output, ImportPath string
	Elapsed                                   float64
}

type report struct {
	passed, failed, skipped int
	output                  map[string][]string
	failures, skips         []string
	packages                []string
	seconds                 map[string]float64
	noise                   []string
}

func main() {
	r := &report{output: map[string][]string{}, seconds: map[string]float64{}}
	r.read(os.Stdin, os.Stdout)
	r.print(os.Stdout)
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
	case "pass", "fail", "skip":
		r.finish(ev, key, progress)
	}
}

func (r *report) finish(ev event, key string, progress io.Writer) {
	if ev.Test == "" {
		r.finishPackage(ev, key, progress)
		return
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
	r.seconds[ev.Package] += ev.Elapsed
	r.packages = append(r.packages, ev.Package)
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

func (r *report) print(w io.Writer) {
	for _, line := range r.noise {
		fmt.Fprintln(w, line)
	}
	if len(r.skips) > 0 {
		fmt.Fprintf(w, "\nSkipped, and why:\n  %s\n", strings.Join(r.skips, "\n  "))
	}
	slices.SortFunc(r.packages, func(a, b string) int { return int(1000 * (r.seconds[b] - r.seconds[a])) })
	r.packages = slices.Compact(r.packages)
	fmt.Fprintln(w, "\nSlowest packages:")
	for _, p := range r.packages[:min(8, len(r.packages))] {
		fmt.Fprintf(w, "  %6.1f s  %s\n", r.seconds[p], p)
	}
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
