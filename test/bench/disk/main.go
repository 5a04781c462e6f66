// Command disk measures what it costs to save disks and to bring them back, each figure beside a floor
// or peer of the same run: `make bench-disk`. It drives a real `berth up` through the sdk, in private
// folders below the temporary folder, and removes them, their mounts and their processes at the end.
//
// All data compresses to about half: phrases, hexadecimal numbers and noise.
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
	if len(os.Args) > 1 && os.Args[1] == "inside" {
		if err := inside(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	out := flag.String("out", "bench/disk.json", "file for the results")
	bin := flag.String("bin", "bin/berth", "the berth program")
	only := flag.String("only", "freeze,save,restore,sleep,little,nats", "parts to run; restore and sleep need save")
	spans := flag.String("spans", "", "append the spans of berth up to this file")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{set: &figures.Set{}, bin: *bin, only: *only, spans: *spans}
	err := b.run(ctx)
	note("done")
	b.set.End("disk", *out, err)
}

type bench struct {
	set              *figures.Set
	bin, only, spans string
}

func (b *bench) wants(part string) bool { return strings.Contains(b.only, part) }

func (b *bench) add(r figures.Result, aim figures.Aim) { b.set.Add(r, aim) }

func (b *bench) run(ctx context.Context) error {
	if err := b.folderStore(ctx); err != nil {
		return fmt.Errorf("with the store in a folder: %w", err)
	}
	if !b.wants("nats") {
		return nil
	}
	if err := b.busStore(ctx); err != nil {
		return fmt.Errorf("with the store on the bus: %w", err)
	}
	return nil
}

// folderStore runs everything that needs file://.
func (b *bench) folderStore(ctx context.Context) error {
	in, err := b.install(ctx, "file")
	if err != nil {
		return err
	}
	defer in.remove()
	if err := in.starts(ctx); err != nil {
		return err
	}
	if b.wants("freeze") {
		if err := in.freezes(ctx); err != nil {
			return fmt.Errorf("freeze: %w", err)
		}
	}
	if b.wants("little") {
		if err := in.little(ctx); err != nil {
			return fmt.Errorf("ten snapshots: %w", err)
		}
	}
	if !b.wants("save") {
		return nil
	}
	w, err := in.work(ctx)
	if err != nil {
		return fmt.Errorf("first snapshot: %w", err)
	}
	for _, part := range []struct {
		name string
		run  func(context.Context) error
	}{{"save", w.changes}, {"sleep", w.sleeps}, {"restore", w.restores}} {
		if !b.wants(part.name) {
			continue
		}
		if err := part.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

// busStore measures the sleep once more with the default store.
func (b *bench) busStore(ctx context.Context) error {
	in, err := b.install(ctx, "nats")
	if err != nil {
		return err
	}
	defer in.remove()
	if err := in.start(ctx); err != nil {
		return err
	}
	w, err := in.work(ctx)
	if err != nil {
		return fmt.Errorf("first snapshot: %w", err)
	}
	return w.sleeps(ctx)
}

var began = time.Now()

func note(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench: %4.0f s: "+format+"\n", append([]any{time.Since(began).Seconds()}, args...)...)
}
