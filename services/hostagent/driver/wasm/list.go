package wasm

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// List implements driver.Driver. A sandbox's folder is the first thing made of it and the last that
// goes; a cgroup without one is another driver's below the same parent.
func (d *Driver) List(context.Context) ([]driver.Found, error) {
	const op = "list sandboxes"
	entries, err := os.ReadDir(d.sandboxes())
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	out := make([]driver.Found, 0, len(entries))
	for _, e := range entries {
		id, err := ids.ParseSandboxID(e.Name())
		if err != nil {
			continue
		}
		f := driver.Found{Sandbox: driver.Sandbox{ID: id, Tier: driver.WASM}, State: driver.Partial, Parts: d.parts(id)}
		if r, err := readRecord(d.folder(id)); err == nil {
			f.Sandbox = d.sandbox(id, r)
			switch {
			case d.isWarm(id) && r.alive():
				f.State = driver.Waiting
			case d.isWarm(id):
				f.State = driver.Exited
			case r.Whole && r.alive():
				f.State = driver.Running
			case r.Whole:
				f.State = driver.Exited
			}
		}
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b driver.Found) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return out, nil
}

// parts names what exists of one sandbox.
func (d *Driver) parts(id ids.SandboxID) []string {
	var out []string
	if _, err := os.Lstat(d.folder(id)); err == nil {
		out = append(out, "folder")
	}
	if d.cgroup.Exists(d.cgroupOf(id)) {
		out = append(out, "cgroup")
	}
	return out
}

// Stats implements driver.Meter.
func (d *Driver) Stats(_ context.Context, id ids.SandboxID) (driver.Stats, error) {
	if err := d.mustExist("read usage", id); err != nil {
		return driver.Stats{}, err
	}
	s, err := d.cgroup.Stats(d.cgroupOf(id))
	if err != nil {
		return driver.Stats{}, errs.E("read usage", errkind.NotFound, string(id), err)
	}
	return driver.Stats{CPU: s.CPU, MemoryBytes: s.MemoryBytes, Processes: s.Processes, OOMKills: s.OOMKills, PIDsHits: s.PIDsHits}, nil
}

// Freeze implements driver.Freezer.
func (d *Driver) Freeze(ctx context.Context, id ids.SandboxID) error { return d.freeze(ctx, id, true) }

// Thaw implements driver.Freezer.
func (d *Driver) Thaw(ctx context.Context, id ids.SandboxID) error { return d.freeze(ctx, id, false) }

func (d *Driver) freeze(ctx context.Context, id ids.SandboxID, on bool) error {
	if err := d.mustExist("freeze sandbox", id); err != nil {
		return err
	}
	return fail("freeze sandbox", id, d.cgroup.Freeze(ctx, d.cgroupOf(id), on))
}

// mustExist is NotFound unless the sandbox runs here.
func (d *Driver) mustExist(op string, id ids.SandboxID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.known[id]; !ok || !r.alive() {
		return errs.E(op, errkind.NotFound, string(id), "no such sandbox runs here")
	}
	return nil
}

// Stop implements driver.Driver.
func (d *Driver) Stop(ctx context.Context, id ids.SandboxID) error {
	const op = "stop sandbox"
	if _, err := ids.ParseSandboxID(string(id)); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	defer d.lock(id)()
	return fail(op, id, d.remove(ctx, id))
}

// remove takes away all that exists of a sandbox: processes with their mounts, the cgroup, the folder
// with the record last. A sandbox that this driver has no folder of is not its to remove.
func (d *Driver) remove(ctx context.Context, id ids.SandboxID) error {
	if _, err := os.Lstat(d.folder(id)); errors.Is(err, fs.ErrNotExist) {
		d.forget(id)
		return nil
	}
	if d.cgroup.Exists(d.cgroupOf(id)) {
		if err := d.cgroup.Stop(ctx, d.cgroupOf(id)); err != nil {
			return err
		}
		if err := d.cgroup.Remove(ctx, d.cgroupOf(id)); err != nil {
			return err
		}
	}
	for _, name := range []string{stdinFile, stdoutFile, statusFile, recordFile + ".new", recordFile, ""} {
		if err := os.Remove(filepath.Join(d.folder(id), name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	d.forget(id)
	return nil
}
