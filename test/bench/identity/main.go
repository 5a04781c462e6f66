// Command identity measures what it costs to know who asks: verifications of tokens beside go-jose's bare
// verify, logins through the callout beside those that the bus knows itself, what a token adds to an open,
// and how soon whoever is suspended is gone: `make bench-identity`.
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
	out := flag.String("out", "bench/identity.json", "file for the results")
	bin := flag.String("bin", "bin/berth", "the berth program")
	parts := flag.String("parts", "verify,open,logins,revoke", "parts to run")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{set: &figures.Set{}, bin: *bin}
	b.set.End("identity", *out, b.run(ctx, strings.Split(*parts, ",")))
}

type bench struct {
	set *figures.Set
	bin string
}

func (b *bench) run(ctx context.Context, parts []string) error {
	all := map[string]func(context.Context, *installation) error{
		"verify": func(ctx context.Context, _ *installation) error { return b.verify(ctx) },
		"open":   b.open, "logins": b.logins, "revoke": b.revoke,
	}
	var up *installation
	for _, name := range parts {
		part := all[name]
		if part == nil {
			return fmt.Errorf("there is no part %q", name)
		}
		if up == nil && name != "verify" {
			var err error
			if up, err = b.start(ctx); err != nil {
				return err
			}
			defer up.stop()
		}
		note("%s", name)
		if err := part(ctx, up); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// atLeast is met when the value is at least x times that of its peer.
func atLeast(x float64) figures.Aim {
	return figures.Aim{Text: fmt.Sprintf("at least %g x its peer", x), Met: func(r figures.Result) bool { return r.Floor > 0 && r.Ratio >= x }}
}

func note(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }
