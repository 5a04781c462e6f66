package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/upproc"
)

// cell is a cluster of three of everything on this machine.
type cell struct {
	*upproc.Process
	dir      string
	bin      string
	members  *control.Client
	client   *sdk.Client
	operator *sdk.Client
}

func (b *bench) start(ctx context.Context, args ...string) (c *cell, err error) {
	c = &cell{bin: b.bin}
	if c.dir, err = os.MkdirTemp("", "berth-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.stop()
		}
	}()
	args = append([]string{"--hosts", "3", "--schedulers", "3", "--nats", "3", "--idle", "1h"}, args...)
	if c.Process, err = upproc.Start(ctx, upproc.Options{Bin: b.bin, Dir: c.dir, Args: args}); err != nil {
		return c, err
	}
	c.members = control.Dial(c.dir)
	if c.client, err = c.Connect(ctx, "acme", "bench"); err != nil {
		return c, err
	}
	c.operator, err = sdk.Connect(ctx, sdk.Config{ClientFile: c.ClientFile("operator")})
	return c, err
}

func (c *cell) stop() {
	for _, k := range []*sdk.Client{c.client, c.operator} {
		if k != nil {
			k.Close()
		}
	}
	if c.Process != nil {
		if err := c.Stop(); err != nil {
			note("the cluster did not stop in order: %v", err)
		}
	}
	if err := os.RemoveAll(c.dir); err != nil {
		note("%v", err)
	}
}

func (c *cell) act(ctx context.Context, verb, name string) error {
	_, err := c.members.Act(ctx, control.Act{Name: name, Verb: verb})
	return err
}

// leader is the member that leads the schedulers.
func (c *cell) leader(ctx context.Context) (string, error) {
	var out schedulerv1.PeersReply
	if err := c.operator.Call(ctx, "scheduler", "peers", &schedulerv1.PeersRequest{}, &out); err != nil {
		return "", err
	}
	for _, p := range out.GetPeers() {
		if p.GetLeader() {
			return p.GetId(), nil
		}
	}
	return "", errors.New("no replica leads")
}

func (c *cell) host(ctx context.Context, name string) (*schedulerv1.HostRecord, error) {
	var out schedulerv1.HostsReply
	if err := c.operator.Call(ctx, "scheduler", "hosts", &schedulerv1.HostsRequest{}, &out); err != nil {
		return nil, err
	}
	for _, h := range out.GetHosts() {
		if h.GetHost() == name {
			return h, nil
		}
	}
	return nil, fmt.Errorf("there is no host %s", name)
}

// whole waits until every member is ready and the three NATS servers have what the others have.
func (c *cell) whole(ctx context.Context) error {
	return until(ctx, "every member is ready", func() (bool, error) {
		all, err := c.members.Members(ctx)
		for _, m := range all {
			if m.State != control.Ready && m.Service != "scheduler" || m.PID == 0 {
				return false, err
			}
		}
		return err == nil && c.current(ctx), err
	})
}

// current asks the bus whether every replica of every stream has caught up.
func (c *cell) current(ctx context.Context) bool {
	for _, stream := range []string{"BERTH_REQUESTS", "BERTH_SESSIONS", "BERTH_AUDIT", "BERTH_TIMERS"} {
		msg, err := c.operator.NATS().RequestWithContext(ctx, "$JS.API.STREAM.INFO."+stream, nil)
		if err != nil || strings.Contains(string(msg.Data), `"current":false`) || strings.Contains(string(msg.Data), `"offline":true`) ||
			!strings.Contains(string(msg.Data), `"leader":"`) {
			return false
		}
	}
	return true
}

func until(ctx context.Context, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var last error
	for {
		ok, err := done()
		if ok {
			return nil
		}
		if err != nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, errors.Join(ctx.Err(), last))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// berth runs the command line as an operator of the cell.
func (c *cell) berth(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, c.bin, args...)
	cmd.Env = append(os.Environ(), "BERTH_DIR="+c.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("berth %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (c *cell) file(name, text string) (string, error) {
	path := filepath.Join(c.dir, name)
	return path, os.WriteFile(path, []byte(text), 0o600)
}
