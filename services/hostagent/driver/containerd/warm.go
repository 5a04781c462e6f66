package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/idroot"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// warmTier is what a tier does in its own way for a sandbox that is nobody's yet. The sandbox is made by
// the steps of a Create, but with an empty root: neither image nor disk. Implementations have no state.
type warmTier interface {
	// fits says why a warm sandbox cannot become the one of spec, beyond what holds for all tiers.
	fits(w driver.WarmSpec, spec driver.Spec) string
	// root mounts the empty root at m.d.root(m.id), and what else the claim will need. Idempotent; what
	// it mounts anywhere in the sandbox's room is taken away with the sandbox.
	root(m *making) error
	// shape makes the specification of a cold sandbox that of a warm one.
	shape(m *making, s *specs.Spec)
	// ready looks at what is to be bound, before anything is noted; it changes nothing. What it cannot
	// honour is Unimplemented.
	ready(c *claiming) error
	// bind lists the steps that give the sandbox its root, after its limits and before it counts as
	// claimed. Idempotent; the undo of each is the removal of the sandbox.
	bind(c *claiming) []steps.Step
	// enter is the Enter of a claimed Sandbox.
	enter() string
}

// warmTiers are the tiers that can prepare.
var warmTiers = map[driver.Tier]warmTier{
	driver.Container: warmContainer{},
	driver.GVisor:    warmGVisor{},
}

// warmed is a sandbox that this driver prepared and nobody has claimed.
type warmed struct {
	spec  driver.WarmSpec
	space *idroot.Space // tier container: its helper waits to make the root
	pid   int
	proc  int // a pidfd of the first process
}

// close lets go of what was kept for the claim. Idempotent.
func (w *warmed) close() {
	if w.space != nil {
		w.space.Close()
	}
	if w.proc >= 0 {
		_ = unix.Close(w.proc)
		w.proc = -1
	}
}

// ended reports whether the first process has ended.
func (w *warmed) ended() bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(w.proc), Events: unix.POLLIN}}, 0)
	return err != nil && !errors.Is(err, unix.EINTR) || n > 0
}

// claiming is one Claim.
type claiming struct {
	d    *Driver
	spec driver.Spec
	id   ids.SandboxID
	rec  record
	tier warmTier
	*warmed
	// tier container: the new root, and whether it is in its place.
	mnt     *os.File
	entered bool
}

// close lets go of what only a claim needs. Idempotent.
func (c *claiming) close() {
	if c.mnt != nil {
		_ = c.mnt.Close()
	}
	c.warmed.close()
}

// Prepare implements driver.Preparer.
func (d *Driver) Prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	const op = "prepare sandbox"
	tier, err := d.checkWarm(op, w)
	if err != nil {
		return driver.Sandbox{}, err
	}
	defer d.lock(w.ID)()
	if sb, err := d.prepared(ctx, op, w.ID); err != nil || sb.ID != "" {
		return sb, fail(op, w.ID, err)
	}
	rec, err := d.noteWarm(op, w)
	if err != nil {
		return driver.Sandbox{}, err
	}
	m := &making{d: d, spec: w.Spec("", ids.Generation{}, ids.Epoch{}), id: w.ID, rec: rec, warm: tier}
	kept := &warmed{spec: w, proc: -1}
	times, err := d.run.Run(ctx, append(m.table(), []steps.Step{{Name: "sandbox.hold", Do: func(ctx context.Context) error { return m.hold(ctx, kept) }}}))
	kept.space = m.space
	if err != nil {
		kept.close()
		if left := d.parts(w.ID); len(left) == 0 {
			d.forget(w.ID)
		}
		return driver.Sandbox{}, fail(op, w.ID, err)
	}
	d.sawRunning(w.ID, kept.pid)
	d.mu.Lock()
	d.warm[w.ID] = kept
	d.mu.Unlock()
	sb := d.sandbox(w.ID, rec)
	sb.PID, sb.Steps = kept.pid, times
	return sb, nil
}

// hold takes a handle of the first process, so that its claim needs no question to the runtime and
// cannot meet another process of the same number.
func (m *making) hold(ctx context.Context, w *warmed) error {
	if w.proc >= 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(int(m.pid), 0)
	if err != nil {
		return fmt.Errorf("hold the first process: %w", err)
	}
	w.pid, w.proc = int(m.pid), fd
	pid, state, err := m.d.task(ctx, m.id)
	if err == nil && (state != driver.Running || pid != w.pid) {
		err = errs.E("prepare sandbox", errkind.Unavailable, string(m.id), "its first process has ended at once")
	}
	return err
}

// checkWarm refuses what no sandbox could be prepared for.
func (d *Driver) checkWarm(op string, w driver.WarmSpec) (warmTier, error) {
	if err := w.Check(d.Capabilities()); err != nil {
		return nil, err
	}
	if most := mostFiles(); w.Limits.OpenFiles > most {
		return nil, errs.Errorf(op, errkind.Unimplemented, "a process may have %d files open on this host, not %d", most, w.Limits.OpenFiles)
	}
	return warmTiers[w.Tier], nil
}

// prepared returns the warm sandbox if this driver prepared it and it runs; what else there is under the
// name, but for a session's, is removed first.
func (d *Driver) prepared(ctx context.Context, op string, id ids.SandboxID) (driver.Sandbox, error) {
	d.mu.Lock()
	rec, known := d.known[id]
	w := d.warm[id]
	d.mu.Unlock()
	switch {
	case rec.Session != "":
		return driver.Sandbox{}, errs.E(op, errkind.Conflict, string(id), "it has been claimed")
	case w != nil && !w.ended():
		sb := d.sandbox(id, rec)
		sb.PID = w.pid
		return sb, nil
	case known || exists(d.folder(id)):
		return driver.Sandbox{}, d.remove(ctx, id)
	}
	return driver.Sandbox{}, nil
}

// noteWarm notes a warm sandbox that is about to be made, with ids of its own.
func (d *Driver) noteWarm(op string, w driver.WarmSpec) (record, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	slot, err := d.slots.Take()
	if err != nil {
		return record{}, errs.E(op, errkind.NoCapacity, string(w.ID), err)
	}
	r := record{Tier: w.Tier, Slot: slot, OpenFiles: w.Limits.OpenFiles}
	if w.Tier == driver.GVisor {
		r.PIDs = w.Limits.PIDs
	}
	d.known[w.ID] = r
	return r, nil
}

// Fits implements driver.Preparer. The image need not be the same one: it is bound by the claim. What its
// configuration says of the environment is the first process's from its start.
func (d *Driver) Fits(w driver.WarmSpec, spec driver.Spec) string {
	tier, ok := warmTiers[w.Tier]
	was := w.Spec(spec.Session, spec.Generation, spec.Epoch)
	switch {
	case !ok:
		return fmt.Sprintf("tier %s prepares no sandboxes", w.Tier)
	case spec.Tier != w.Tier:
		return fmt.Sprintf("it is of tier %s, not %s", w.Tier, spec.Tier)
	case spec.RunDir != w.RunDir:
		return "another run folder is mounted in it"
	case spec.Guest != w.Guest || !slices.Equal(spec.Init, w.Init):
		return "its first process is another program"
	case !slices.Equal(environment(spec), environment(was)):
		return "its environment is another one"
	case files(spec.Limits) != files(w.Limits):
		return "how many files a process may open is set when the sandbox starts"
	case tmpSize(spec.Limits) != tmpSize(w.Limits):
		return "the size of its /tmp, which follows from its memory, is set when the sandbox starts"
	}
	if why := w.SameNetwork(spec); why != "" {
		return why
	}
	return tier.fits(w, spec)
}

// Claim implements driver.Preparer.
func (d *Driver) Claim(ctx context.Context, warm ids.SandboxID, spec driver.Spec) (driver.Sandbox, error) {
	const op = "claim sandbox"
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	defer d.lock(warm)()
	c, err := d.claimable(op, warm, spec)
	if err != nil {
		return driver.Sandbox{}, err
	}
	if err := c.tier.ready(c); err != nil {
		return driver.Sandbox{}, fail(op, warm, err)
	}
	if err := d.take(op, c); err != nil {
		return driver.Sandbox{}, err
	}
	defer c.close()
	times, err := d.run.Run(ctx, c.table())
	if err != nil {
		return driver.Sandbox{}, fail(op, warm, err)
	}
	sb := d.sandbox(warm, c.rec)
	sb.PID, sb.Steps = c.pid, times
	return sb, nil
}

// claimable finds the warm sandbox; nothing is changed.
func (d *Driver) claimable(op string, id ids.SandboxID, spec driver.Spec) (*claiming, error) {
	d.mu.Lock()
	rec, w := d.known[id], d.warm[id]
	d.mu.Unlock()
	switch {
	case rec.Session != "":
		return nil, errs.E(op, errkind.Conflict, string(id), "it has been claimed before")
	case w == nil:
		return nil, errs.E(op, errkind.NotFound, string(id), "this driver has prepared no such sandbox")
	case w.ended():
		return nil, errs.E(op, errkind.NotFound, string(id), "its first process has ended")
	}
	if why := d.Fits(w.spec, spec); why != "" {
		return nil, errs.E(op, errkind.Unimplemented, string(id), why)
	}
	rec.Session, rec.Generation, rec.Epoch = spec.Session, spec.Generation, spec.Epoch
	return &claiming{d: d, spec: spec, id: id, rec: rec, tier: warmTiers[w.spec.Tier], warmed: w}, nil
}

// take makes the sandbox the session's, for this process. Busy if the session has another one.
func (d *Driver) take(op string, c *claiming) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.warm[c.id] != c.warmed {
		return errs.E(op, errkind.NotFound, string(c.id), "it has been removed")
	}
	for other, r := range d.known {
		if r.Session == c.spec.Session {
			return errs.Errorf(op, errkind.Busy, "the session has compute of epoch %s here (%s)", r.Epoch, other)
		}
	}
	d.known[c.id] = c.rec
	delete(d.warm, c.id)
	return nil
}

// table lists the steps of a Claim. That it is the session's is written down before all else, and that
// it is whole after all else: what lies between is half-made for whoever finds it.
func (c *claiming) table() steps.Table {
	out := steps.Table{
		{{Name: "claim.record", Do: c.note, Undo: func(ctx context.Context) error { c.close(); return c.d.remove(ctx, c.id) }}},
		{{Name: "claim.limits", Do: c.limit}},
	}
	for _, s := range c.tier.bind(c) {
		out = append(out, []steps.Step{s})
	}
	return append(out, []steps.Step{{Name: "claim.bound", Do: c.bound}})
}

// note writes down whose the sandbox is, with the device of its disk.
func (c *claiming) note(context.Context) (err error) {
	if c.rec.Device, err = c.d.deviceOf(c.spec); err != nil {
		return err
	}
	c.d.remember(c.id, c.rec)
	return c.rec.write(c.d.folder(c.id), c.d.channel(c.id))
}

func (c *claiming) limit(ctx context.Context) error {
	return c.d.cgroup.Update(ctx, c.d.cgroupOf(c.id), c.d.limits(c.rec, c.spec.Limits))
}

// bound notes that the claim is complete.
func (c *claiming) bound(context.Context) error {
	c.rec.Bound = true
	if err := c.rec.write(c.d.folder(c.id), c.d.channel(c.id)); err != nil {
		return err
	}
	c.d.remember(c.id, c.rec)
	return nil
}

// claimed returns the sandbox that was claimed for the same epoch as spec, if there is one; what is
// half-claimed or has exited is removed first.
func (d *Driver) claimed(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	id := d.claimedID(spec)
	if id == "" {
		return driver.Sandbox{}, nil
	}
	defer d.lock(id)()
	sb, err := d.running(ctx, id)
	return sb, fail("create sandbox", id, err)
}

func (d *Driver) claimedID(spec driver.Spec) ids.SandboxID {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, r := range d.known {
		if id.IsWarm() && r.Session == spec.Session && r.Generation == spec.Generation && r.Epoch == spec.Epoch {
			return id
		}
	}
	return ""
}

// shown is the state of a sandbox as List tells it, from that of its first process.
func (d *Driver) shown(id ids.SandboxID, r record, s driver.State) driver.State {
	if !id.IsWarm() || r.Bound {
		return s
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case r.Session != "" || d.warm[id] == nil: // half-claimed, half-made, or of an earlier process
		return driver.Partial
	case s == driver.Running:
		return driver.Waiting
	}
	return s
}

// letGo closes what is kept of a warm sandbox for its claim.
func (d *Driver) letGo(id ids.SandboxID) {
	d.mu.Lock()
	w := d.warm[id]
	delete(d.warm, id)
	d.mu.Unlock()
	if w != nil {
		w.close()
	}
}
