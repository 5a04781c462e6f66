package null

import (
	"context"
	"slices"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// warm is what makes a sandbox nobody's: how it was prepared, and by which driver.
type warm struct {
	spec driver.WarmSpec
	by   *Driver
}

// Prepare implements driver.Preparer: the guest starts with the claim.
func (d *Driver) Prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	const op = "prepare sandbox"
	if err := w.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	if b := d.world.boxes[w.ID]; b != nil {
		if b.state(d) != driver.Waiting {
			return driver.Sandbox{}, errs.E(op, errkind.Conflict, string(w.ID), "the name was used before")
		}
		return b.sb, nil
	}
	b := newBox(driver.Sandbox{ID: w.ID, Tier: w.Tier}, w.Limits)
	b.warm = &warm{w, d}
	if err := d.make(ctx, op, b); err != nil {
		return driver.Sandbox{}, err
	}
	return b.sb, nil
}

// Fits implements driver.Preparer.
func (d *Driver) Fits(w driver.WarmSpec, spec driver.Spec) string {
	switch {
	case w.Tier != spec.Tier:
		return "it is of another tier"
	case !slices.Equal(w.Init, spec.Init):
		return "its first process is another one"
	}
	return ""
}

// Claim implements driver.Preparer.
func (d *Driver) Claim(ctx context.Context, id ids.SandboxID, spec driver.Spec) (driver.Sandbox, error) {
	const op = "claim sandbox"
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	b := d.world.boxes[id]
	switch {
	case b == nil, b.warm != nil && b.state(d) != driver.Waiting:
		return driver.Sandbox{}, errs.E(op, errkind.NotFound, string(id), "there is no such warm sandbox here")
	case b.warm == nil:
		return driver.Sandbox{}, errs.E(op, errkind.Conflict, string(id), "it was claimed before")
	}
	if why := d.Fits(b.warm.spec, spec); why != "" {
		return driver.Sandbox{}, errs.E(op, errkind.Unimplemented, string(id), why)
	}
	if have := d.world.of(spec.Session); have != nil {
		return driver.Sandbox{}, d.world.busy(op, have)
	}
	if err := ctx.Err(); err != nil {
		return driver.Sandbox{}, errs.E(op, errs.Kind(err), string(id), err)
	}
	times, err := d.run.Run(ctx, d.claim(b, spec))
	if err != nil {
		return driver.Sandbox{}, errs.E(op, errs.Kind(err), string(id), err)
	}
	b.sb.Steps = times
	return b.sb, nil
}

// claim lists the steps of a Claim; the World is locked. What fails after the first is never warm again.
func (d *Driver) claim(b *box, spec driver.Spec) steps.Table {
	own := func(context.Context) error {
		b.warm, b.half, b.limits = nil, true, spec.Limits
		b.sb.Session, b.sb.Generation, b.sb.Epoch = spec.Session, spec.Generation, spec.Epoch
		d.world.sessions[spec.Session] = b.sb.ID
		return nil
	}
	return steps.Table{
		{{Name: "sandbox.claim", Do: own, Undo: func(context.Context) error { d.world.remove(b.sb.ID); return nil }}},
		{{Name: "sandbox.guest", Do: func(context.Context) error { return d.begin(b) }}},
	}
}

// begin starts the guest of a claimed sandbox.
func (d *Driver) begin(b *box) error {
	if b.half = false; !d.bare {
		go d.live(b)
	}
	return nil
}
