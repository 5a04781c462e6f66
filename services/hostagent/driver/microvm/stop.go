//go:build linux

package microvm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// Stop implements driver.Driver. A machine that runs is asked to end first, so that its file system is
// whole; one that is frozen or does not answer is killed, and its journal is replayed the next time.
func (d *Driver) Stop(ctx context.Context, id ids.SandboxID) error {
	const op = "stop sandbox"
	if _, err := ids.ParseSandboxID(string(id)); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	defer d.lock(id)()
	d.off(ctx, id)
	return fail(op, id, d.remove(ctx, id))
}

// off asks a machine to end its processes and unmount, and waits a while.
func (d *Driver) off(ctx context.Context, id ids.SandboxID) {
	d.mu.Lock()
	r, v := d.known[id], d.vms[id]
	d.mu.Unlock()
	if v == nil || !r.Ready || r.Session == "" || v.ended() != nil || v.isFull() || d.cgroup.Frozen(d.cgroupOf(id)) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.OffTime)
	defer cancel()
	_, err := v.ask(ctx, vmwire.Call{Op: vmwire.OpOff})
	if err == nil || errors.Is(err, errNoAnswer) {
		err = v.await(ctx, func() bool { return v.end != nil })
	}
	if err != nil && !errors.Is(err, errEnded) {
		d.log.Warn("the machine does not end by itself and is killed", "sandbox", id, "err", err)
	}
}

// remove takes away all that exists of a sandbox: processes, the cgroup, the sockets, the folder with
// the record last.
func (d *Driver) remove(ctx context.Context, id ids.SandboxID) error {
	d.hold(id, nil)
	d.files.forget(id)
	cg := d.cgroupOf(id)
	if _, err := os.Lstat(d.folder(id)); err != nil && len(d.parts(id)) == 0 {
		d.forget(id)
		return nil // another driver's, or nobody's: its cgroup is not ours to end
	}
	if err := d.cgroup.Stop(ctx, cg); err != nil {
		return err
	}
	if err := d.cgroup.Remove(ctx, cg); err != nil {
		return err
	}
	if err := removeRoom(d.room(id)); err != nil {
		return err
	}
	if err := removeFolder(d.folder(id)); err != nil {
		return err
	}
	d.forget(id)
	return nil
}

// removeFolder removes the record last, so that a crash in between is found again. It removes only
// files of this driver: a folder with anything else is not emptied.
func removeFolder(dir string) error {
	for _, name := range []string{endFile + ".new", endFile, recordFile + ".new", recordFile, ""} {
		if err := removeEmpty(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// removeEmpty removes a file or an empty folder. Idempotent.
func removeEmpty(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove what is left of a sandbox: %w", err)
	}
	return nil
}
