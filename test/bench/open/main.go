// Command open measures the way from a request to output in the user's own
// sandbox, each figure beside a floor of the same run: `make bench-open`.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/test/bench/figures"
)

func main() {
	out := flag.String("out", "bench/open.json", "file for the results")
	bin := flag.String("bin", "bin/berth", "the berth program")
	seconds := flag.Int("seconds", 60, "length of the throughput run")
	only := flag.String("only", "control,sandbox", "parts to run; exec: of sandbox, only the execs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	set := &figures.Set{}
	b := &bench{set: set, bin: *bin, load: time.Duration(*seconds) * time.Second}
	err := b.run(ctx, *only)
	set.End("open", *out, err)
}

type bench struct {
	set  *figures.Set
	bin  string
	load time.Duration
}

func (b *bench) run(ctx context.Context, only string) error {
	if strings.Contains(only, "control") {
		if err := b.control(ctx); err != nil {
			return fmt.Errorf("control plane: %w", err)
		}
	}
	if all := strings.Contains(only, "sandbox"); all || strings.Contains(only, "exec") {
		if err := b.sandboxes(ctx, !all); err != nil {
			return fmt.Errorf("sandboxes: %w", err)
		}
	}
	return nil
}

func note(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...)
}
