//go:build linux

package microvm

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// A warm machine is a sandbox's up to where it becomes somebody's: it runs in its jail and its cgroup,
// from the template, with the image as its root, and its guest waits to be personalised. In place of
// the session's disk it has a placeholder, behind the throttle that stays. A claim hands QEMU the disk
// image's open file, puts it where the placeholder was and drops that; from then on QEMU is what it
// would be had the sandbox been made cold.

const (
	nodeSpare = "spare" // the placeholder
	// Sets of files that a warm QEMU gets by these numbers; those of its command line are small.
	setSpare = 1000
	setDisk  = 1001
)

// Prepare implements driver.Preparer. A machine that stands still is given up for another.
func (d *Driver) Prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	const op = "prepare sandbox"
	if err := w.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	defer d.lock(w.ID)()
	if sb, err := d.waiting(ctx, w.ID); err != nil || sb.ID != "" {
		return sb, fail(op, w.ID, err)
	}
	var sb driver.Sandbox
	var err error
	for range bootTries {
		if sb, err = d.prepare(ctx, w); err == nil || ctx.Err() != nil || !silent(err) || len(d.parts(w.ID)) > 0 {
			break
		}
		d.log.Warn("a machine stands still before it is anybody's, and is given up for another", "sandbox", w.ID, "err", err)
	}
	return sb, fail(op, w.ID, err)
}

// waiting returns the warm sandbox if it was prepared already; what is half-made is removed.
func (d *Driver) waiting(ctx context.Context, id ids.SandboxID) (driver.Sandbox, error) {
	d.mu.Lock()
	r, known := d.known[id]
	d.mu.Unlock()
	switch {
	case !known && len(d.parts(id)) == 0:
		return driver.Sandbox{}, nil
	case known && r.Session != "":
		return driver.Sandbox{}, errs.E("prepare sandbox", errkind.Conflict, string(id), "it is somebody's")
	case known && d.state(ctx, id, r) == driver.Waiting:
		return d.sandbox(id, r), nil
	}
	return driver.Sandbox{}, d.remove(ctx, id)
}

func (d *Driver) prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	m := &making{d: d, spec: w.Spec("", ids.Generation{}, ids.Epoch{}), id: w.ID, warm: true}
	var err error
	if m.shape, err = d.shapeOf(w.Image, w.Limits); err != nil {
		return driver.Sandbox{}, errs.E("prepare sandbox", errkind.Invalid, string(w.ID), err)
	}
	m.diskBytes = placeholderBytes
	if m.blank = d.blank.get(ctx, d); m.blank != nil {
		m.diskBytes = blankSize
	}
	r := recordOf(m.spec)
	r.Maker, r.Warm, r.Spare = d.maker, &w, m.blank != nil
	if m.rec, err = d.note("prepare sandbox", w.ID, r); err != nil {
		return driver.Sandbox{}, err
	}
	return m.run(ctx, steps.Table{
		{m.first("warm.record")},
		{{Name: "warm.cgroup", Do: m.makeCgroup}, {Name: "warm.template", Do: m.template}},
		{{Name: "warm.machine", Do: m.start}},
		{{Name: "warm.restore", Do: m.restore}},
		{{Name: "warm.guest", Do: m.meet}},
		{{Name: "warm.rehearsal", Do: m.rehearse}},
		{{Name: "warm.ready", Do: m.wait}},
	})
}

// meet waits until the guest answers; one that has to boot gets the time of a boot.
func (m *making) meet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.d.cfg.BootTime/bootTries)
	defer cancel()
	v := m.d.vmOf(m.id)
	if v == nil {
		return errEnded
	}
	c, err := v.guest(ctx)
	if err != nil {
		return unanswered(ctx, err)
	}
	if _, err = c.meet(ctx); err != nil {
		return unanswered(ctx, err)
	}
	return nil
}

// rehearse has the guest go once through what a claim will ask of it: what was done before is quick.
func (m *making) rehearse(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.d.cfg.BootTime/bootTries)
	defer cancel()
	v := m.d.vmOf(m.id)
	if v == nil {
		return errEnded
	}
	done, err := v.ask(ctx, vmwire.Call{Op: vmwire.OpRehearse})
	if err != nil {
		return unanswered(ctx, err)
	}
	if !done.OK {
		return errs.Errorf("rehearse", errkind.Unavailable, "the machine says: %s", said(done.Reason, done.Error))
	}
	if done.Error != "" {
		m.d.log.Info("a part of a rehearsal did not work: claims take longer", "sandbox", m.id, "image", m.spec.Image.Digest, "why", said(done.Reason, done.Error))
	}
	return nil
}

// wait makes it known as one that can be claimed.
func (m *making) wait(context.Context) error {
	m.rec.Ready = true
	return m.save()
}

// Fits implements driver.Preparer: what a machine has from its first instruction on is its memory, its
// processors and its root; a claim brings all else.
func (d *Driver) Fits(w driver.WarmSpec, spec driver.Spec) string {
	switch {
	case w.Tier != spec.Tier:
		return fmt.Sprintf("it is of tier %s", w.Tier)
	case w.Image.Digest != spec.Image.Digest || w.Image.Block != spec.Image.Block:
		return "it has another image"
	case w.Limits.MemoryBytes/memoryStep != spec.Limits.MemoryBytes/memoryStep:
		return fmt.Sprintf("it has %d MiB of memory", w.Limits.MemoryBytes>>20)
	case processors(w.Limits) != processors(spec.Limits):
		return fmt.Sprintf("it has %d processors", processors(w.Limits))
	}
	return w.SameNetwork(spec)
}

// Claim implements driver.Preparer.
func (d *Driver) Claim(ctx context.Context, warm ids.SandboxID, spec driver.Spec) (driver.Sandbox, error) {
	const op = "claim sandbox"
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	defer d.lock(warm)()
	if _, err := d.mayClaim(op, warm, spec); err != nil {
		return driver.Sandbox{}, err
	}
	m := &making{d: d, spec: spec, id: warm}
	if err := m.look(); err != nil {
		return driver.Sandbox{}, errs.E(op, errkind.Invalid, string(warm), err)
	}
	if m.diskBytes <= blankSize { // the guest would not see that it has another
		return driver.Sandbox{}, errs.Errorf(op, errkind.Unimplemented, "a disk of %d bytes is too small for a machine that was prepared", m.diskBytes)
	}
	var err error
	if m.rec, err = d.take(op, warm, spec); err != nil {
		return driver.Sandbox{}, err
	}
	return m.bind(ctx, op)
}

// bind makes the machine, whose record says so already, the one of the spec.
func (m *making) bind(ctx context.Context, op string) (driver.Sandbox, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sb, err := m.run(ctx, steps.Table{
		{m.first("claim.record")},
		{
			{Name: "claim.disk", Do: func(ctx context.Context) error {
				err := m.giveDisk(ctx)
				if err != nil {
					cancel() // the guest need not wait for it
				}
				return err
			}},
			{Name: "claim.limits", Do: m.setLimits},
			{Name: "claim.personalise", Do: m.personalise},
		},
		{{Name: "claim.ready", Do: m.ready}},
	})
	return sb, fail(op, m.id, err)
}

// mayClaim returns the record of the warm sandbox if it can become that of spec.
func (d *Driver) mayClaim(op string, id ids.SandboxID, spec driver.Spec) (record, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.judge(op, id, spec)
}

// judge is mayClaim for one who holds mu.
func (d *Driver) judge(op string, id ids.SandboxID, spec driver.Spec) (record, error) {
	r, known := d.known[id]
	if known && r.Session != "" {
		return r, errs.E(op, errkind.Conflict, string(id), "it was claimed before")
	}
	v := d.vms[id]
	if !known || !r.Ready || r.Warm == nil || r.Maker != d.maker || v == nil || v.over() || !r.QEMU.Lives() {
		return r, errs.E(op, errkind.NotFound, string(id), "there is no such warm sandbox")
	}
	if why := d.Fits(*r.Warm, spec); why != "" {
		return r, errs.E(op, errkind.Unimplemented, string(id), why)
	}
	return r, d.busy(op, recordOf(spec))
}

// take makes the warm sandbox's record that of spec, or changes nothing.
func (d *Driver) take(op string, id ids.SandboxID, spec driver.Spec) (record, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r, err := d.judge(op, id, spec)
	if err != nil {
		return r, err
	}
	want := recordOf(spec)
	want.User, want.QEMU, want.Spare = r.User, r.QEMU, r.Spare
	d.known[id] = want
	return want, nil
}

// claimed is the name of the spec's sandbox: that of the warm one that became it, or its own.
func (d *Driver) claimed(spec driver.Spec) ids.SandboxID {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, r := range d.known {
		if id.IsWarm() && r.is(spec) {
			return id
		}
	}
	return spec.ID()
}

// setLimits binds the session's limits to QEMU; those inside come with the rest of its personality.
func (m *making) setLimits(ctx context.Context) error {
	if err := m.makeCgroup(ctx); err != nil {
		return err
	}
	v := m.d.vmOf(m.id)
	if v == nil {
		return errEnded
	}
	return v.setIO(ctx, m.spec.Limits)
}

// giveDisk puts the session's disk where the placeholder was. Idempotent.
func (m *making) giveDisk(ctx context.Context) error {
	v := m.d.vmOf(m.id)
	if v == nil {
		return errEnded
	}
	if m.given {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, monitorTime)
	defer cancel()
	f, err := os.OpenFile(m.spec.DiskImage, unix.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("disk image: %w", err)
	}
	defer f.Close()
	c, err := v.monitor(ctx)
	if err != nil {
		return err
	}
	if err := c.Add(ctx, setDisk, f); err != nil {
		return err
	}
	if err := c.Call(ctx, "blockdev-add", diskNode(nodeFile, fmt.Sprintf("/dev/fdset/%d", setDisk)), nil); err != nil {
		return err
	}
	if err := c.Call(ctx, "blockdev-reopen", map[string]any{"options": []any{throttleNode(nodeFile)}}, nil); err != nil {
		return err
	}
	if err := v.resize(ctx, m.diskBytes); err != nil {
		return err
	}
	m.given = true
	if err := c.Call(ctx, "blockdev-del", map[string]any{"node-name": nodeSpare}, nil); err != nil || !m.rec.Spare {
		return err
	}
	return c.Call(ctx, "remove-fd", map[string]any{"fdset-id": setSpare}, nil)
}

// warmDisks are the image and the placeholder of a machine that is nobody's: empty, or a copy of blank.
func (b *build) warmDisks(root, blank *os.File) error {
	b.root(root)
	spare := map[string]any{"driver": "null-co", "node-name": nodeSpare, "size": placeholderBytes, "read-zeroes": true}
	if blank != nil {
		f, err := copyOf(blank)
		if err != nil {
			return err
		}
		b.close = append(b.close, f)
		b.add("-add-fd", fmt.Sprintf("fd=%d,set=%d", b.file(f), setSpare))
		spare = diskNode(nodeSpare, fmt.Sprintf("/dev/fdset/%d", setSpare))
	}
	b.object("-blockdev", spare)
	b.throttled(nodeSpare, driver.Limits{})
	b.drives()
	return nil
}
