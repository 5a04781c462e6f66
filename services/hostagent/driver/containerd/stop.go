package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/netns"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

const (
	unmountTime = 5 * time.Second
	waitTime    = time.Second
	killTime    = 2 * time.Second
)

// Stop implements driver.Driver.
func (d *Driver) Stop(ctx context.Context, id ids.SandboxID) error {
	const op = "stop sandbox"
	if _, err := ids.ParseSandboxID(string(id)); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	defer d.lock(id)()
	return fail(op, id, d.remove(ctx, id))
}

// remove takes away all that exists of a sandbox, in the order that lets each part go: processes,
// containerd's records, the root, the cgroup, the folder with the record last.
func (d *Driver) remove(ctx context.Context, id ids.SandboxID) error {
	d.letGo(id)
	names := d.names(id)
	for _, name := range names {
		if err := d.removeTask(ctx, id, name); err != nil {
			return fmt.Errorf("remove task: %w", err)
		}
	}
	gone := make(chan error, 1)
	go func() { // a record in a database; the rest does not wait for its sync
		var all error
		for _, name := range names {
			_, err := call(ctx, d.ctrd.containers.Delete, &containersapi.DeleteContainerRequest{ID: name})
			if !isNotFound(err) {
				all = errors.Join(all, err)
			}
		}
		gone <- all
	}()
	err := d.cgroup.Remove(ctx, d.cgroupOf(id))
	if err == nil {
		err = errors.Join(d.removeVolume(id), d.clearRoom(ctx, id))
	}
	if cerr := <-gone; cerr != nil {
		err = errors.Join(err, fmt.Errorf("remove container: %w", cerr))
	}
	if err != nil {
		return err
	}
	if err := removeFolder(d.folder(id)); err != nil {
		return err
	}
	d.forget(id)
	return nil
}

// removeTask kills the sandbox's processes and has containerd forget them. The kill goes through the
// cgroup: it is quicker than the runtime's, reaches what a container's kernel does not answer for,
// and works on a frozen sandbox, whose processes never run again.
func (d *Driver) removeTask(ctx context.Context, id ids.SandboxID, name string) error {
	cg, tasks := d.cgroupOf(id), d.ctrd.tasks
	for {
		if d.cgroup.Exists(cg) {
			if err := d.kill(ctx, cg); err != nil {
				d.log.Debug("processes do not end", "sandbox", id, "err", err)
			}
		}
		_, err := call(ctx, tasks.Delete, &tasksapi.DeleteTaskRequest{ContainerID: name})
		if err == nil {
			return nil
		}
		if isNotFound(err) {
			d.endShims(id, name)
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		d.log.Debug("sandbox still runs", "sandbox", id, "err", err)
		if wait(ctx, d, name) != nil {
			_, _ = call(ctx, tasks.Kill, &tasksapi.KillRequest{ContainerID: name, Signal: uint32(unix.SIGKILL), All: true})
		}
	}
}

// endShims ends shims of a sandbox that containerd does not know: it forgets one that it had started
// for a task when whoever asked for the task, or containerd itself, ended before the task was made.
func (d *Driver) endShims(id ids.SandboxID, name string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended meanwhile
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil && isShim(strings.Split(string(raw), "\x00"), name, d.ctrd.socket) {
			d.log.Warn("ending a shim that containerd has forgotten", "sandbox", id, "pid", pid)
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}

// isShim reports whether a command line is that of a shim of the sandbox, of the containerd with this socket.
func isShim(args []string, name, socket string) bool {
	has := func(flag, value string) bool {
		i := slices.Index(args, flag)
		return i >= 0 && i+1 < len(args) && args[i+1] == value
	}
	return strings.HasPrefix(filepath.Base(args[0]), "containerd-shim-") && has("-id", name) && has("-address", socket)
}

// kill ends all processes of a sandbox, also where the lease keeps all of them frozen.
func (d *Driver) kill(ctx context.Context, cg string) error {
	ctx, cancel := context.WithTimeout(ctx, killTime)
	defer cancel()
	return d.cgroup.Stop(ctx, cg)
}

// wait returns when the sandbox's first process ended, or after a while.
func wait(ctx context.Context, d *Driver, name string) error {
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	_, err := call(ctx, d.ctrd.tasks.Wait, &tasksapi.WaitRequest{ContainerID: name})
	return err
}

// clearRoom unmounts and removes what can be in a sandbox's room, in the order in which it can go.
func (d *Driver) clearRoom(ctx context.Context, id ids.SandboxID) error {
	for _, point := range []string{d.slotRoot(id), d.slot(id), d.root(id)} {
		if err := unmount(ctx, point); err != nil {
			return err
		}
	}
	if err := netns.Remove(d.netns(id)); err != nil {
		return err
	}
	return removeEmpty(d.room(id))
}

func unmount(ctx context.Context, point string) error {
	deadline := time.Now().Add(unmountTime)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := unix.Unmount(point, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err == nil || errors.Is(err, unix.EINVAL) {
			mounts.Reclaim(point)                                       // a copy anywhere would keep the session's disk busy
			if err := removeEmpty(point); !errors.Is(err, unix.EROFS) { // it goes with the mount that it is in
				return err
			}
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("unmount root: %w", err)
		}
		time.Sleep(pause)
	}
}

// removeFolder removes the record last, so that a crash in between is found again. It removes only
// files of this driver: a folder with anything else is not emptied.
func removeFolder(dir string) error {
	for _, name := range []string{"stdin", "stdout", ranFile, recordFile + ".new", recordFile, ""} {
		if err := removeEmpty(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// removeEmpty removes a file or an empty folder. Idempotent.
func removeEmpty(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove sandbox folder: %w", err)
	}
	return nil
}
