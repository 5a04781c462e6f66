package wasm

import (
	"context"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// A warm sandbox is a first process in its namespaces and its cgroup, which holds nothing of the host's
// files and waits for its order. All else comes with the order, as for one that is started cold: the
// root, the names, the environment, the program. So it fits every session of its tier.

// Prepare implements driver.Preparer. The modules are compiled by then, so that a claim finds their code.
func (d *Driver) Prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	const op = "prepare sandbox"
	if err := w.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	defer d.lock(w.ID)()
	d.mu.Lock()
	rec, known := d.known[w.ID]
	waits := d.warm[w.ID] != nil
	if !known {
		var err error
		if rec, err = d.note(op, w.ID, record{}); err != nil {
			d.mu.Unlock()
			return driver.Sandbox{}, err
		}
	}
	d.mu.Unlock()
	switch {
	case known && waits && rec.alive():
		return d.sandbox(w.ID, rec), nil
	case known:
		return driver.Sandbox{}, errs.E(op, errkind.Conflict, string(w.ID), "the name was used before")
	}
	m := &making{d: d, id: w.ID, rec: rec, warm: true}
	m.spec.Limits, m.spec.Image = w.Limits, w.Image
	return d.make(ctx, op, m, (*making).warmTable)
}

// warmTable lists the steps of a Prepare.
func (m *making) warmTable() steps.Table {
	return steps.Table{
		{{Name: "sandbox.record", Do: m.begin, Undo: func(ctx context.Context) error { return m.d.remove(ctx, m.id) }}},
		{{Name: "sandbox.cgroup", Do: m.makeCgroup}},
		{{Name: "sandbox.start", Do: m.start}, {Name: "sandbox.code", Do: m.compile}},
		{{Name: "sandbox.waits", Do: m.waits}},
	}
}

// warmPoints are the steps after which a Prepare or a Claim can be made to fail, for tests.
var warmPoints = []string{
	"sandbox.record", "sandbox.cgroup", "sandbox.start", "sandbox.code", "sandbox.waits",
	"sandbox.claim", "sandbox.limits", "sandbox.enter", "sandbox.whole",
}

// compile waits for the modules' machine code. One that cannot be compiled ahead is compiled by those
// who run it.
func (m *making) compile(ctx context.Context) error {
	for _, p := range m.wanted() {
		_ = m.d.code.wait(ctx, p)
	}
	return ctx.Err()
}

// waits returns once the first process says that it waits.
func (m *making) waits(context.Context) error { return m.first.says(order.Waiting) }

// keep keeps the first process of a sandbox that was prepared for whoever claims it.
func (m *making) keep() {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	m.d.warm[m.id], m.first = m.first, nil
}

func (d *Driver) isWarm(id ids.SandboxID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.warm[id] != nil
}

// Fits implements driver.Preparer.
func (d *Driver) Fits(w driver.WarmSpec, spec driver.Spec) string {
	if w.Tier != spec.Tier {
		return "it is of another tier"
	}
	return ""
}

// Claim implements driver.Preparer.
func (d *Driver) Claim(ctx context.Context, warm ids.SandboxID, spec driver.Spec) (driver.Sandbox, error) {
	const op = "claim sandbox"
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	defer d.lock(warm)()
	if err := ctx.Err(); err != nil {
		return driver.Sandbox{}, fail(op, warm, err)
	}
	m, err := d.take(op, warm, spec)
	if err != nil {
		return driver.Sandbox{}, err
	}
	return d.make(ctx, op, m, (*making).claimTable)
}

// take makes a warm sandbox the session's; from then on it is nobody else's, whatever happens.
func (d *Driver) take(op string, id ids.SandboxID, spec driver.Spec) (*making, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, f := d.known[id], d.warm[id]
	switch {
	case f == nil && rec.Session != "":
		return nil, errs.E(op, errkind.Conflict, string(id), "it was claimed before")
	case f == nil || !rec.alive():
		return nil, errs.E(op, errkind.NotFound, string(id), "there is no such warm sandbox here")
	}
	if err := d.busy(op, spec.Session); err != nil {
		return nil, err
	}
	delete(d.warm, id)
	rec.Session, rec.Generation, rec.Epoch = spec.Session, spec.Generation, spec.Epoch
	d.known[id] = rec
	return &making{d: d, spec: spec, id: id, rec: rec, first: f}, nil
}

// claimTable lists the steps of a Claim.
func (m *making) claimTable() steps.Table {
	limits := func(ctx context.Context) error {
		return m.d.cgroup.Update(ctx, m.d.cgroupOf(m.id), limitsOf(m.spec.Limits))
	}
	return steps.Table{
		{{Name: "sandbox.claim", Do: func(context.Context) error { return m.save() }, Undo: func(ctx context.Context) error { return m.d.remove(ctx, m.id) }}},
		{{Name: "sandbox.limits", Do: limits}},
		{{Name: "sandbox.enter", Do: m.enter}},
		{{Name: "sandbox.whole", Do: m.whole}},
	}
}
