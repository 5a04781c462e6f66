package upproc

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/sdk"
)

// operator logs in as an operator.
func (p *Process) operator(ctx context.Context) (*sdk.Client, error) {
	return sdk.Connect(ctx, sdk.Config{ClientFile: p.ClientFile("operator")})
}

// ApplyPools declares pools, as `berth pool apply` does.
func (p *Process) ApplyPools(ctx context.Context, file string) error {
	op, err := p.operator(ctx)
	if err != nil {
		return err
	}
	defer op.Close()
	return op.Call(ctx, "pool", "apply", &poolv1.ApplyRequest{File: []byte(file)}, &poolv1.ApplyReply{})
}

// RemovePool ends a pool and waits until nothing of it is left.
func (p *Process) RemovePool(ctx context.Context, template string) error {
	op, err := p.operator(ctx)
	if err != nil {
		return err
	}
	defer op.Close()
	if err := op.Call(ctx, "pool", "remove", &poolv1.RemoveRequest{Template: template}, &poolv1.RemoveReply{}); err != nil {
		return err
	}
	for {
		reply := &poolv1.ShowReply{}
		if err := op.Call(ctx, "pool", "show", &poolv1.ShowRequest{}, reply); err != nil {
			return err
		}
		if !slices.ContainsFunc(reply.GetPools(), func(s *poolv1.Status) bool { return s.GetSpec().GetTemplate() == template }) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// AwaitWarm waits until n sandboxes of a template wait that nobody has claimed or reserved.
func (p *Process) AwaitWarm(ctx context.Context, template string, n uint32) error {
	op, err := p.operator(ctx)
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
