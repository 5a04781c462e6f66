// Command demo shows Berth to a person, and to a machine with --json: it starts
// `berth up` on a private folder, gives two users of two tenants a sandbox
// each, has both work, shows that neither sees the other, lets both fall
// asleep, proves that nothing of theirs is left running, wakes them, compares
// their files by hash, deletes one, and removes everything. It exits 1 if any
// of that was not so.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

func main() {
	asJSON := flag.Bool("json", false, "print one JSON object as the last line")
	idle := flag.Duration("idle", 5*time.Second, "idle time after which a session falls asleep")
	template := flag.String("template", "", "template of the sessions (default: the plan's, gVisor)")
	keep := flag.Bool("keep", false, "leave the state folder for inspection")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()

	r := &report{out: os.Stdout, times: map[string]float64{}, start: time.Now()}
	d := &demo{report: r, idle: *idle, template: *template, keep: *keep}
	if err := d.run(ctx); err != nil {
		r.check("the demonstration ran to its end", false, err.Error())
	}
	ok := r.summary(d.timeline)
	if *asJSON {
		r.json(os.Stdout, ok)
	}
	if !ok {
		os.Exit(1)
	}
}

// report collects what was shown. It is safe for concurrent use.
type report struct {
	mu     sync.Mutex
	out    io.Writer
	start  time.Time
	checks []check
	times  map[string]float64
	order  []string
}

type check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

func (r *report) say(format string, args ...any) {
	fmt.Fprintf(r.out, "%6.1f s  %s\n", time.Since(r.start).Seconds(), fmt.Sprintf(format, args...))
}

func (r *report) check(name string, ok bool, detail string) bool {
	r.mu.Lock()
	r.checks = append(r.checks, check{name, ok, detail})
	r.mu.Unlock()
	mark := "ok  "
	if !ok {
		mark = "FAIL"
	}
	r.say("%s %s: %s", mark, name, detail)
	return ok
}

// took records a time once; a name that repeats keeps its first place.
func (r *report) took(name string, d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, seen := r.times[name]; !seen {
		r.order = append(r.order, name)
	}
	r.times[name] = float64(d.Microseconds()) / 1000
}

func (r *report) summary(timeline []string) bool {
	fmt.Fprintln(r.out, "\nWhat happened, as the bus tells it:")
	for _, line := range timeline {
		fmt.Fprintln(r.out, "  "+line)
	}
	fmt.Fprintln(r.out, "\nTimes:")
	for _, name := range r.order {
		fmt.Fprintf(r.out, "  %-42s %10.1f ms\n", name, r.times[name])
	}
	bad := 0
	for _, c := range r.checks {
		if !c.OK {
			bad++
		}
	}
	fmt.Fprintf(r.out, "\n%d checks, %d failed\n", len(r.checks), bad)
	return bad == 0
}

func (r *report) json(w io.Writer, ok bool) {
	line, err := json.Marshal(map[string]any{"ok": ok, "checks": r.checks, "times_ms": r.times})
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo: encode the report:", err)
		return
	}
	fmt.Fprintln(w, string(line))
}
