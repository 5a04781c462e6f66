// Command egress measures what leaves a sandbox: bytes and requests a second, and latency, of TLS that goes
// straight to a host, is passed through the gate, and is opened there with a secret put in; how soon a changed
// policy is enforced; what a session takes in memory; and how long a large policy thinks: `make bench-egress`.
// Client, gate, bus and host share one process and one machine's cores, so that what the gate takes the others
// lack: on machines of their own each ratio is higher.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/test/bench/figures"
)

func main() {
	out := flag.String("out", "bench/egress.json", "file for the results")
	parts := flag.String("parts", "memory,throughput,requests,latency,policy,rules", "parts to run")
	window := flag.Duration("window", 2*time.Second, "how long a rate is measured each time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{set: &figures.Set{}, window: *window}
	b.set.End("egress", *out, b.run(ctx, strings.Split(*parts, ",")))
}

type bench struct {
	set    *figures.Set
	window time.Duration
}

func (b *bench) run(ctx context.Context, parts []string) error {
	all := map[string]func(context.Context, *world) error{"throughput": b.throughput, "requests": b.requests, "latency": b.latency,
		"policy": b.policy, "memory": b.memory, "rules": b.rules}
	w, err := start(ctx)
	if err != nil {
		return err
	}
	defer w.close()
	fmt.Fprintf(os.Stderr, "bench: %d cores, shared by client, gate, bus and host\n", runtime.GOMAXPROCS(0))
	for _, name := range parts {
		part := all[name]
		if part == nil {
			return fmt.Errorf("there is no part %q", name)
		}
		fmt.Fprintln(os.Stderr, "bench:", name)
		if err := part(ctx, w); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// atLeast is met when the value is at least x times that of the same without the gate.
func atLeast(x float64) figures.Aim {
	return figures.Aim{Text: fmt.Sprintf("at least %g of direct", x), Met: func(r figures.Result) bool { return r.Floor > 0 && r.Ratio >= x }}
}
