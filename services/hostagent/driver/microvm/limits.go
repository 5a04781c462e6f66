//go:build linux

package microvm

import (
	"context"
	"errors"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

const (
	// monitorTime is what QEMU gets to obey.
	monitorTime = 5 * time.Second
	// growTime is what a guest gets to grow its file system.
	growTime = 60 * time.Second
)

// Stats implements driver.Meter: what QEMU uses, by the host's own account.
func (d *Driver) Stats(_ context.Context, id ids.SandboxID) (driver.Stats, error) {
	const op = "read usage"
	if _, err := d.mustRun(op, id); err != nil {
		return driver.Stats{}, err
	}
	s, err := d.cgroup.Stats(d.cgroupOf(id))
	if err != nil {
		return driver.Stats{}, errs.E(op, errkind.NotFound, string(id), err)
	}
	out := driver.Stats{CPU: s.CPU, MemoryBytes: s.MemoryBytes, Processes: s.Processes, OOMKills: s.OOMKills}
	if v := d.vmOf(id); v != nil {
		out.OOMKills += v.ooms()
	}
	return out, nil
}

// Freeze implements driver.Freezer: QEMU stands still, from outside, whether it wants to or not. What it
// had told the guest to be on the disk is there. The machine's clock goes on meanwhile, as a frozen
// process's does: a machine that its monitor stops would be late from then on.
func (d *Driver) Freeze(ctx context.Context, id ids.SandboxID) error { return d.freeze(ctx, id, true) }

// Thaw implements driver.Freezer.
func (d *Driver) Thaw(ctx context.Context, id ids.SandboxID) error { return d.freeze(ctx, id, false) }

func (d *Driver) freeze(ctx context.Context, id ids.SandboxID, on bool) error {
	const op = "freeze sandbox"
	defer d.lock(id)()
	if _, err := d.mustRun(op, id); err != nil {
		return err
	}
	return fail(op, id, d.cgroup.Freeze(ctx, d.cgroupOf(id), on))
}

// Resize implements driver.Resizer: processor and disk, while it runs.
func (d *Driver) Resize(ctx context.Context, id ids.SandboxID, l driver.Limits) error {
	const op = "resize sandbox"
	defer d.lock(id)()
	r, err := d.mustRun(op, id)
	if err != nil {
		return err
	}
	was := r.Limits
	switch {
	case l.MemoryBytes != was.MemoryBytes:
		return errs.E(op, errkind.Unimplemented, string(id), "a machine keeps the memory that it began with: give it another at its next wake")
	case l.PIDs != was.PIDs || l.OpenFiles != was.OpenFiles:
		return errs.E(op, errkind.Unimplemented, string(id), "a machine keeps the limits inside that it began with: give it others at its next wake")
	case l.CPUMillis < driver.MinCPU:
		return errs.Errorf(op, errkind.Invalid, "at least %d/1000 of a core are needed", driver.MinCPU)
	case processors(l) > processors(was):
		return errs.Errorf(op, errkind.Unimplemented, "the machine began with %d processors: more are to be had at its next wake", processors(was))
	}
	v := d.vmOf(id)
	if v == nil {
		return fail(op, id, errEnded)
	}
	ctx, cancel := context.WithTimeout(ctx, monitorTime)
	defer cancel()
	if err := v.setIO(ctx, l); err != nil {
		return unavailable(op, id, err)
	}
	// The cgroup is QEMU's: its memory and number of threads stay.
	if err := d.cgroup.Create(d.cgroupOf(id), d.limitsOf(l.MemoryBytes/memoryStep*memoryStep, l.CPUMillis)); err != nil {
		return fail(op, id, errors.Join(err, v.setIO(ctx, was)))
	}
	r.Limits = l
	d.mu.Lock()
	d.known[id] = r
	d.mu.Unlock()
	return fail(op, id, r.write(d.folder(id)))
}

// setIO sets what the disk may do.
func (v *vm) setIO(ctx context.Context, l driver.Limits) error {
	return v.call(ctx, "qom-set", map[string]any{"path": qomThrottle, "property": "limits", "value": ioLimits(l)}, nil)
}

// ResizeDisk implements driver.DiskResizer: the disk, then the file system on it.
func (d *Driver) ResizeDisk(ctx context.Context, id ids.SandboxID, bytes uint64) error {
	const op = "resize disk"
	ctx, cancel := context.WithTimeout(ctx, growTime)
	defer cancel()
	v, err := d.resizeDevice(ctx, id, bytes)
	if err != nil {
		return unavailable(op, id, err)
	}
	// The guest takes as long as it likes, and nobody who freezes or stops it waits for that.
	done, err := v.ask(ctx, vmwire.Call{Op: vmwire.OpGrow, Bytes: bytes})
	if err != nil {
		return unavailable(op, id, err)
	}
	if !done.OK {
		return errs.Errorf(op, kindOf(done.Reason), "the machine says: %s", said(done.Reason, done.Error))
	}
	return nil
}

// resizeDevice makes the disk larger that the machine sees.
func (d *Driver) resizeDevice(ctx context.Context, id ids.SandboxID, bytes uint64) (*vm, error) {
	defer d.lock(id)()
	if _, err := d.mustRun("resize disk", id); err != nil {
		return nil, err
	}
	v := d.vmOf(id)
	if v == nil {
		return nil, errEnded
	}
	ctx, cancel := context.WithTimeout(ctx, monitorTime)
	defer cancel()
	return v, v.resize(ctx, bytes)
}

// unavailable is the error of a QEMU that does not obey.
func unavailable(op string, id ids.SandboxID, err error) error {
	switch {
	case err == nil:
		return nil
	case errs.Is(err, errkind.NotFound):
		return err
	case errors.Is(err, errEnded):
		return errs.E(op, errkind.NotFound, string(id), err)
	case errors.Is(err, context.DeadlineExceeded):
		return errs.E(op, errkind.Deadline, string(id), err)
	}
	return errs.E(op, errkind.Unavailable, string(id), err)
}
