//go:build linux

package microvm

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// List implements driver.Driver: it looks in every place where a part of a sandbox can be. The record
// is the first thing made and the last that goes, and the cgroups' parent is shared with other drivers:
// a cgroup alone is none of this driver's.
func (d *Driver) List(ctx context.Context) ([]driver.Found, error) {
	const op = "list sandboxes"
	names := map[ids.SandboxID]bool{}
	for _, dir := range []string{d.sandboxes(), d.cfg.Run} {
		entries, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) && dir == d.cfg.Run {
			continue // it goes with the last driver that has no sandbox
		}
		if err != nil {
			return nil, errs.E(op, errkind.Internal, "", err)
		}
		for _, e := range entries {
			if id, err := ids.ParseSandboxID(e.Name()); err == nil {
				names[id] = true
			}
		}
	}
	out := make([]driver.Found, 0, len(names))
	for id := range names {
		parts := d.parts(id)
		if len(parts) == 0 {
			continue // it went meanwhile
		}
		f := driver.Found{Sandbox: driver.Sandbox{ID: id}, State: driver.Partial, Parts: parts}
		if r, err := readRecord(d.folder(id)); err == nil {
			f.Sandbox, f.State = d.sandbox(id, r), d.state(ctx, id, r)
		}
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b driver.Found) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return out, nil
}

// parts names what exists of one sandbox.
func (d *Driver) parts(id ids.SandboxID) []string {
	var out []string
	if exists(d.folder(id)) {
		out = append(out, "folder")
	}
	if exists(d.room(id)) {
		out = append(out, "sockets")
	}
	if len(out) == 0 {
		return nil
	}
	if d.cgroup.Exists(d.cgroupOf(id)) {
		out = append(out, "cgroup")
	}
	if d.cgroup.Populated(d.cgroupOf(id)) {
		out = append(out, "process")
	}
	return out
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

// firstLook is how long the state of an adopted machine is waited for.
const firstLook = time.Second

// state of a sandbox whose record is r.
func (d *Driver) state(ctx context.Context, id ids.SandboxID, r record) driver.State {
	nobodys := r.Session == ""
	if !r.Ready || nobodys && r.Maker != d.maker {
		return driver.Partial
	}
	v := d.vmOf(id)
	if exists(filepath.Join(d.folder(id), endFile)) || !r.QEMU.Lives() {
		return driver.Exited
	}
	if nobodys {
		return driver.Waiting
	}
	if v == nil || d.cgroup.Frozen(d.cgroupOf(id)) {
		return driver.Running // one that is frozen answers nobody
	}
	ctx, cancel := context.WithTimeout(ctx, firstLook)
	defer cancel()
	_ = v.await(ctx, func() bool { return v.seen }) // a frozen one does not answer, and runs
	if v.ended() != nil {
		return driver.Exited
	}
	return driver.Running
}

// adopt takes over a machine that an earlier process started.
func (d *Driver) adopt(id ids.SandboxID, r record) {
	if !r.Ready || !r.QEMU.Lives() || r.Session == "" {
		return // half-made, or nobody's: who prepared it is gone
	}
	d.hold(id, newVM(string(id), d.room(id), r.QEMU, d.news(id)))
	d.files.follow(id, r.RunDir, nil)
}
