package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/identity/devissuer"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/tools/berth/upproc"
)

const (
	tenant    = "acme"
	openTimes = 300
)

// installation is a running `berth up` without sandboxes: what is seen is the control plane.
type installation struct {
	*upproc.Process
	dir string
	n   atomic.Int64
}

func (b *bench) start(ctx context.Context) (_ *installation, err error) {
	i := &installation{}
	if i.dir, err = os.MkdirTemp("", "berth-bench-"); err != nil {
		return nil, err
	}
	note("berth up with the null driver")
	if i.Process, err = upproc.Start(ctx, upproc.Options{Bin: b.bin, Dir: i.dir, Args: []string{"--idle", "1h", "--driver", "null"}}); err != nil {
		_ = os.RemoveAll(i.dir)
		return nil, err
	}
	return i, nil
}

// stop ends it at once: the null driver leaves nothing.
func (i *installation) stop() {
	i.Kill()
	if err := os.RemoveAll(i.dir); err != nil {
		note("remove %s: %v", i.dir, err)
	}
}

// mint makes a token of a user that no request carried before: it is issued some seconds earlier each time.
func (i *installation) mint(user string) (string, error) {
	u := devissuer.User{Tenant: ids.Tenant(tenant), Subject: user, TTL: time.Hour + time.Duration(i.n.Add(1))*time.Second}
	return devissuer.Mint(filepath.Join(i.dir, "keys"), u, time.Now())
}

// open measures opens with a token that is seen for the first time beside those with one that is known, in turn.
func (b *bench) open(ctx context.Context, up *installation) error {
	known, err := up.mint("bench")
	if err != nil {
		return err
	}
	token := known
	c, err := sdk.Connect(ctx, sdk.Config{ClientFile: up.ClientFile("fe-" + tenant + "-cli"), User: func(context.Context) (string, error) { return token, nil }})
	if err != nil {
		return err
	}
	defer c.Close()
	var first, again, verifyFirst, verifyAgain []time.Duration
	for n := range openTimes {
		for _, k := range []struct {
			new            bool
			took, verifies *[]time.Duration
		}{{true, &first, &verifyFirst}, {false, &again, &verifyAgain}} {
			if token = known; k.new {
				if token, err = up.mint("bench"); err != nil {
					return err
				}
			}
			began := time.Now()
			s, err := c.Open(ctx, sdk.OpenOptions{Name: fmt.Sprintf("o%d-%v", n, k.new)})
			if err != nil {
				return err
			}
			if *k.took = append(*k.took, time.Since(began)); n == 0 {
				*k.took = nil // warms up
			}
			for _, step := range s.Timing().Steps {
				if step.Name == "identity.verify" && n > 0 {
					*k.verifies = append(*k.verifies, step.Took)
				}
			}
			s.Detach()
		}
	}
	for _, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p99", 0.99}} {
		b.set.Add(figures.Result{Name: "open with a token seen first, " + q.name, Value: figures.Quantile(first, q.q), Unit: "ms",
			Floor: figures.Quantile(again, q.q), FloorOf: "an open of the same run with a token that is known"}, figures.None)
		b.set.Add(figures.Result{Name: "verification within the open, token seen first, " + q.name, Value: figures.Quantile(verifyFirst, q.q), Unit: "ms",
			Floor: figures.Quantile(verifyAgain, q.q), FloorOf: "the same step with a token that is known"}, figures.AtMost(2, "ms"))
	}
	return nil
}
