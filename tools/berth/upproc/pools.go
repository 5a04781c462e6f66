package upproc

import (
	"context"
	"fmt"
	"strings"
	"time"

	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/sdk"
)

// ApplyPools declares pools, as `berth pool apply` does.
func (p *Process) ApplyPools(ctx context.Context, file string) error {
	op, err := sdk.Connect(ctx, sdk.Config{ClientFile: p.ClientFile("operator")})
	if err != nil {
		return err
	}
	defer op.Close()
	return op.Call(ctx, "pool", "apply", &poolv1.ApplyRequest{File: []byte(file)}, &poolv1.ApplyReply{})
}

// Pools says how the pools stand.
func (p *Process) Pools(ctx context.Context) ([]*poolv1.Status, error) {
	op, err := sdk.Connect(ctx, sdk.Config{ClientFile: p.ClientFile("operator")})
	if err != nil {
		return nil, err
	}
	defer op.Close()
	reply := &poolv1.ShowReply{}
	err = op.Call(ctx, "pool", "show", &poolv1.ShowRequest{}, reply)
	return reply.GetPools(), err
}

// AwaitWarm waits until n sandboxes of a template wait that nobody has claimed or reserved.
func (p *Process) AwaitWarm(ctx context.Context, template string, n uint32) error {
	op, err := sdk.Connect(ctx, sdk.Config{ClientFile: p.ClientFile("operator")})
	if err != nil {
		return err
	}
	defer op.Close()
	for {
		reply := &poolv1.ShowReply{}
		if err := op.Call(ctx, "pool", "show", &poolv1.ShowRequest{Template: template}, reply); err != nil {
			return err
		}
		var why []string
		for _, s := range reply.GetPools() {
			if s.GetWarm() >= n+s.GetReserved() {
				return nil
			}
			why = append(why, fmt.Sprintf("%d wait, %d are reserved, %d are being prepared %s", s.GetWarm(), s.GetReserved(), s.GetPreparing(), s.GetUnhealthy()))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %d warm sandboxes of %s: %w: %s", n, template, ctx.Err(), strings.Join(why, "; "))
		case <-time.After(50 * time.Millisecond):
		}
	}
}
