// Command pool measures how soon a session runs its first instruction when a sandbox waits for it, beside
// the cold way of the same run: `make bench-pool`.
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

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/tools/berth/upproc"
)

func main() {
	out := flag.String("out", "bench/pool.json", "file for the results")
	bin := flag.String("bin", "bin/berth", "the berth program")
	tiers := flag.String("tiers", "container,gvisor,microvm,wasm", "tiers to measure")
	parts := flag.String("parts", "tiers,control,nats", "parts to run")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{set: &figures.Set{}, bin: *bin}
	err := b.run(ctx, *parts, strings.Split(*tiers, ","))
	b.set.End("pool", *out, err)
}

type bench struct {
	set *figures.Set
	bin string
	n   int
}

func (b *bench) run(ctx context.Context, parts string, tiers []string) error {
	for _, p := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"control", b.control}, {"nats", b.threeNATS},
		{"tiers", func(ctx context.Context) error { return b.tiers(ctx, tiers) }},
	} {
		if !strings.Contains(parts, p.name) {
			continue
		}
		if err := p.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// installation is a running `berth up` with a client of one user.
type installation struct {
	*upproc.Process
	client *sdk.Client
	dir    string
}

// up starts one; the caller stops it.
func (b *bench) up(ctx context.Context, args ...string) (_ *installation, err error) {
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return nil, err
	}
	i := &installation{dir: dir}
	if i.Process, err = upproc.Start(ctx, upproc.Options{Bin: b.bin, Dir: dir, Args: append([]string{"--idle", "1h"}, args...)}); err != nil {
		return nil, err
	}
	if i.client, err = i.Connect(ctx, "acme", "bench"); err != nil {
		i.stop()
		return nil, err
	}
	return i, nil
}

func (i *installation) stop() {
	if i.client != nil {
		i.client.Close()
	}
	if err := i.Stop(); err != nil {
		note("stop berth up: %v", err)
	}
	if err := os.RemoveAll(i.dir); err != nil {
		note("remove %s: %v", i.dir, err)
	}
}

// name is one that no session had before.
func (b *bench) name() string { b.n++; return fmt.Sprintf("s%d", b.n) }

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func note(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }
