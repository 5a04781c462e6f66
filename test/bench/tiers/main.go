// Command tiers measures every isolation tier that this machine offers side by side: start, exec,
// files, what an idle sandbox costs, twenty at once, and what a greedy neighbour takes away; each
// figure beside a floor of the same run: `make bench-tiers`. A tier that is not offered is printed as
// not run.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/test/bench/peer"
	"github.com/berth-dev/berth/tools/berth/upproc"
)

func main() {
	out := flag.String("out", "bench/tiers.json", "file for the results")
	bin := flag.String("bin", "bin/berth", "the berth program")
	parts := flag.String("parts", "start,exec,files,idle,many,greed,call", "what to measure")
	only := flag.String("tiers", "container,gvisor,microvm,wasm", "tiers to measure")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{set: &figures.Set{}, parts: *parts, bin: *bin}
	err := b.run(ctx, strings.Split(*only, ","))
	b.set.End("tiers", *out, err)
}

// tier is one isolation tier and the template that has it.
type tier struct{ name, template string }

var all = []tier{{"container", "container"}, {"gvisor", "default"}, {"microvm", "microvm"}, {"wasm", "wasm"}}

// native tells that programs of the machine's own kind run in it.
func (t tier) native() bool { return t.name != "wasm" }

type bench struct {
	set    *figures.Set
	parts  string
	up     *upproc.Process
	client *sdk.Client
	plain  *peer.Peer
	dir    string
	bin    string
	opened int
}

func (b *bench) run(ctx context.Context, only []string) (err error) {
	if b.plain, err = peer.Start(ctx); err != nil {
		return err
	}
	defer b.plain.Stop()
	if b.dir, err = os.MkdirTemp("", "berth-bench-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	if b.up, err = upproc.Start(ctx, upproc.Options{Bin: b.bin, Dir: b.dir, Args: []string{"--idle", "1h"}}); err != nil {
		return err
	}
	defer func() {
		if err := b.up.Stop(); err != nil {
			note("stop berth up: %v", err)
		}
	}()
	if b.client, err = b.up.Connect(ctx, "acme", "bench"); err != nil {
		return err
	}
	defer b.client.Close()
	for _, t := range all {
		if !strings.Contains(strings.Join(only, ","), t.name) {
			continue
		}
		why, err := b.up.AwaitTier(ctx, t.name)
		if err != nil {
			return err
		}
		if why != "" {
			note("tier %s did not run: %s", t.name, why)
			continue
		}
		if err := b.measure(ctx, t); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
	}
	return nil
}

// measure runs every part in one tier.
func (b *bench) measure(ctx context.Context, t tier) error {
	for _, part := range []struct {
		name string
		run  func(context.Context, tier) error
		need bool
	}{
		{"start", b.start, true}, {"exec", b.execs, t.native()}, {"files", b.files, t.native()},
		{"idle", b.idle, true}, {"many", b.many, true}, {"greed", b.greed, t.native()}, {"call", b.call, true},
	} {
		if !part.need || !strings.Contains(b.parts, part.name) {
			continue
		}
		note("%s: %s", t.name, part.name)
		if err := part.run(ctx, t); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

// ask is an open in a tier. What is told of the risk lets the template's own tier be chosen.
func (b *bench) ask(t tier, name string) sdk.OpenOptions {
	o := sdk.OpenOptions{Name: name, Template: t.template, Risk: sdk.OwnCode()}
	if !t.native() {
		o.Risk = sdk.Risk{CodeAuthor: sdk.OperatorCode, Tools: sdk.BoundedTools, Network: sdk.NoNetwork, DataClass: "public"}
	}
	return o
}

// open opens a session under a name that was not used before.
func (b *bench) open(ctx context.Context, t tier) (*sdk.Session, error) {
	b.opened++
	return b.client.Open(ctx, b.ask(t, fmt.Sprintf("s%d", b.opened)))
}

// hello is a first output: a program of the image, or a module.
func (t tier) hello() []string {
	if t.native() {
		return []string{"echo", "x"}
	}
	return []string{"js", "-e", "console.log('x')"}
}

func note(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }
