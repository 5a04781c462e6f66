// Command handoff measures what a failure costs: of a scheduler's leader, of a
// NATS server, of a host with awake sessions; and what ownership costs in a
// large cell. Each figure stands beside a floor of the same run:
// `make bench-handoff`.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/test/bench/figures"
)

func main() {
	out := flag.String("out", "bench/handoff.json", "file for the results")
	bin := flag.String("bin", "bin/berth", "the berth program")
	only := flag.String("only", "placement,failover,host", "parts to run")
	sessions := flag.Int("sessions", 50, "awake sessions on the host that is killed")
	rounds := flag.Int("rounds", 5, "how often a leader and a NATS server are killed")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{set: &figures.Set{}, bin: *bin, sessions: *sessions, rounds: *rounds}
	err := b.run(ctx, *only)
	b.set.End("handoff", *out, err)
}

type bench struct {
	set      *figures.Set
	bin      string
	sessions int
	rounds   int
}

func (b *bench) run(ctx context.Context, only string) error {
	for _, part := range []struct {
		name string
		run  func(context.Context) error
	}{{"placement", b.placement}, {"failover", b.failover}, {"host", b.host}} {
		if !strings.Contains(only, part.name) {
			continue
		}
		if err := part.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

func note(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...)
}
