package router

import (
	"context"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// Prepare implements driver.Preparer: who prepares it is noted before anything of it exists.
func (r *Driver) Prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	const op = "prepare sandbox"
	p, ok := r.of(w.Tier).(driver.Preparer)
	if !ok {
		return driver.Sandbox{}, errs.Errorf(op, errkind.Unimplemented, "this host has no warm sandboxes of tier %.32q", w.Tier)
	}
	r.mu.Lock()
	if have := r.madeBy.all[w.ID]; have.by != nil && (have.session != "" || have.by != r.of(w.Tier)) {
		r.mu.Unlock()
		return driver.Sandbox{}, errs.E(op, errkind.Conflict, string(w.ID), "the name was used before")
	}
	r.notes++
	r.madeBy.set(w.ID, made{by: r.of(w.Tier), making: r.madeBy.all[w.ID].making + 1, at: r.notes})
	r.mu.Unlock()
	defer r.made(w.ID)
	return p.Prepare(ctx, w)
}

// Fits implements driver.Preparer.
func (r *Driver) Fits(w driver.WarmSpec, spec driver.Spec) string {
	p, ok := r.of(w.Tier).(driver.Preparer)
	if !ok {
		return "its tier has no warm sandboxes here"
	}
	return p.Fits(w, spec)
}

// Claim implements driver.Preparer. A session that has compute in another tier is busy. What the claim
// makes is noted under the name that a Create would use, so that neither overtakes the other; the note
// of the warm one changes hands when the claim has succeeded.
func (r *Driver) Claim(ctx context.Context, warm ids.SandboxID, spec driver.Spec) (driver.Sandbox, error) {
	const op = "claim sandbox"
	d := r.maker(warm)
	p, ok := d.(driver.Preparer)
	if !ok {
		return driver.Sandbox{}, errs.E(op, errkind.NotFound, string(warm), "there is no such warm sandbox here")
	}
	if err := r.claim(ctx, d, spec); err != nil {
		return driver.Sandbox{}, err
	}
	defer r.made(spec.ID())
	sb, err := p.Claim(ctx, warm, spec)
	if err != nil {
		return sb, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes++
	r.madeBy.set(warm, made{by: d, session: spec.Session, at: r.notes})
	return sb, nil
}
