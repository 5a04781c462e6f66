package wasm

import (
	"context"
	"os"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// making is one Create, Prepare or Claim.
type making struct {
	d     *Driver
	spec  driver.Spec
	id    ids.SandboxID
	rec   record
	first *first // the first process, from its start on
	warm  bool   // it is for nobody yet
}

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	for {
		if sb, again, err := d.create(ctx, spec); !again {
			return sb, err
		}
	}
}

// create is one try, at the name that the spec's sandbox has now: again, if that has changed.
func (d *Driver) create(ctx context.Context, spec driver.Spec) (sb driver.Sandbox, again bool, err error) {
	const op = "create sandbox"
	id, unlock := d.lockOf(spec)
	defer unlock()
	if sb, err = d.running(ctx, id); err != nil || sb.ID != "" {
		return sb, false, fail(op, id, err)
	}
	if id != spec.ID() {
		return sb, true, nil // it was claimed, and is gone: what is made now has the session's own name
	}
	rec, err := d.claim(spec)
	if err != nil {
		return sb, d.nameOf(spec) != id, err // a warm one was claimed meanwhile
	}
	sb, err = d.make(ctx, op, &making{d: d, spec: spec, id: id, rec: rec}, (*making).table)
	return sb, false, err
}

// make runs the steps of a table for one sandbox, whose lock is held.
func (d *Driver) make(ctx context.Context, op string, m *making, table func(*making) steps.Table) (driver.Sandbox, error) {
	defer m.letGo()
	id := m.id
	times, err := d.run.Run(ctx, table(m))
	if err != nil {
		if len(d.parts(id)) == 0 {
			d.forget(id)
		}
		return driver.Sandbox{}, fail(op, id, err)
	}
	if m.warm {
		m.keep()
	}
	sb := d.sandbox(id, m.rec)
	sb.Steps = times
	return sb, nil
}

// running returns the sandbox if it runs, the zero one if nothing of it exists; what is half-made
// or has ended is removed first.
func (d *Driver) running(ctx context.Context, id ids.SandboxID) (driver.Sandbox, error) {
	d.mu.Lock()
	rec, known := d.known[id]
	d.mu.Unlock()
	switch {
	case !known && len(d.parts(id)) == 0:
		return driver.Sandbox{}, nil
	case known && rec.Whole && rec.alive():
		return d.sandbox(id, rec), nil
	}
	return driver.Sandbox{}, d.remove(ctx, id)
}

func (d *Driver) sandbox(id ids.SandboxID, r record) driver.Sandbox {
	return driver.Sandbox{
		ID: id, Session: r.Session, Generation: r.Generation, Epoch: r.Epoch, Tier: driver.WASM,
		Channel: d.channel(id), Cgroup: d.cgroupOf(id), PID: r.PID,
	}
}

// table lists the steps of a Create. The undo of all of them is that of the first: what removes a
// sandbox removes a part of one.
func (m *making) table() steps.Table {
	return steps.Table{
		{{Name: "sandbox.record", Do: m.begin, Undo: func(ctx context.Context) error { return m.d.remove(ctx, m.id) }}},
		{{Name: "sandbox.cgroup", Do: m.makeCgroup}},
		{{Name: "sandbox.start", Do: m.start}},
		{{Name: "sandbox.enter", Do: m.enter}},
		{{Name: "sandbox.whole", Do: m.whole}},
	}
}

// points are the steps after which a Create can be made to fail, for tests.
var points = []string{"sandbox.record", "sandbox.cgroup", "sandbox.start", "sandbox.enter", "sandbox.whole"}

func (m *making) begin(context.Context) error {
	dir := m.d.folder(m.id)
	if err := m.rec.write(dir); err != nil {
		return err
	}
	return makePipes(dir)
}

func limitsOf(l driver.Limits) cgroup.Limits {
	return cgroup.Limits{CPUMillis: l.CPUMillis, MemoryBytes: l.MemoryBytes, PIDs: l.PIDs}
}

func (m *making) makeCgroup(context.Context) error {
	path := m.d.cgroupOf(m.id)
	if err := m.d.cgroup.Create(path, limitsOf(m.spec.Limits)); err != nil {
		return err
	}
	for _, dir := range m.d.cgroupFolders(path) {
		if err := os.MkdirAll(dir+"/box", 0o755); err != nil {
			return err
		}
	}
	return nil
}

// whole notes that the sandbox is handed out.
func (m *making) whole(context.Context) error {
	m.rec.Whole = true
	return m.save()
}

func (m *making) save() error {
	if err := m.rec.write(m.d.folder(m.id)); err != nil {
		return err
	}
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	m.d.known[m.id] = m.rec
	return nil
}
