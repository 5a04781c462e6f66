// Package podroot makes the root of a session whose container is in a machine that somebody else's
// agent runs: a Kata Containers machine. That agent gives the container its image, read-only, as root,
// and the session's disk mounted at a folder; what every other tier gets from the host, an overlay of
// the two, must be made in there.
//
// Enter guarantees that what it executes has that overlay as its root, the file systems of the
// container (/proc, /dev, /sys, /tmp, the run folder) in their places, no way back to image or disk
// beneath, the capabilities of the container tier and no way to more; after an error nothing of the
// user has run. Links that a session left where these are mounted lead nowhere but into its own root. The
// files of over lie over those of the root (package cover).
package podroot

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/cover"
)

const (
	newRoot = "/run/berth-root"
	runDir  = "/run/berth"
	runSize = "size=16m,mode=755"
	options = ",userxattr,index=off,metacopy=off,redirect_dir=nofollow"
)

// kept are the capabilities of root in the other tiers.
var kept = []uintptr{
	unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_KILL, unix.CAP_SETGID, unix.CAP_SETUID,
	unix.CAP_SETPCAP, unix.CAP_SETFCAP, unix.CAP_NET_BIND_SERVICE, unix.CAP_SYS_CHROOT,
}

// Wait is the first process of the container that is the machine: it ends when it is told to, and reaps.
func Wait() int {
	end := make(chan os.Signal, 1)
	signal.Notify(end, unix.SIGTERM, unix.SIGINT)
	child := make(chan os.Signal, 1)
	signal.Notify(child, unix.SIGCHLD)
	for {
		select {
		case <-end:
			return 0
		case <-child:
			for {
				if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
					break
				}
			}
		}
	}
}

// Enter makes the root from the disk at folder disk, which holds upper and work, and executes argv there
// in place of this process. It returns only an error.
func Enter(disk string, over []cover.File, argv []string) error {
	runtime.LockOSThread() // of this thread are the privileges that the new program has
	if len(argv) == 0 {
		return errors.New("there is nothing to execute")
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := os.MkdirAll(newRoot, 0o755); err != nil {
		return err
	}
	layers := "lowerdir=/,upperdir=" + disk + "/upper,workdir=" + disk + "/work" + options
	if err := unix.Mount("berth", newRoot, "overlay", unix.MS_NOSUID|unix.MS_NODEV, layers); err != nil {
		return fmt.Errorf("lay the disk over the image: %w", err)
	}
	trees, err := detach("/proc", "/dev", "/sys", "/tmp", runDir)
	if err != nil {
		return err
	}
	if err := unix.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := errors.Join(unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/")); err != nil {
		return fmt.Errorf("let go of the image: %w", err)
	}
	if err := fill(trees); err != nil {
		return err
	}
	if err := lay(over); err != nil {
		return err
	}
	if err := drop(); err != nil {
		return err
	}
	return fmt.Errorf("execute %s: %w", argv[0], unix.Exec(argv[0], argv, os.Environ()))
}

// tree is a detached mount and where it goes.
type tree struct {
	path string
	fd   int
}

func detach(paths ...string) (out []tree, err error) {
	for _, p := range paths {
		fd, err := unix.OpenTree(unix.AT_FDCWD, p, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return nil, fmt.Errorf("take %s along: %w", p, err)
		}
		out = append(out, tree{p, fd})
	}
	return out, nil
}

// fill puts what was taken along into its places. The process is in the new root already.
func fill(trees []tree) error {
	if err := place("/run"); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, runSize); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	for _, t := range trees {
		if err := place(t.path); err != nil {
			return err
		}
		flags := unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_SYMLINKS
		if err := unix.MoveMount(t.fd, "", unix.AT_FDCWD, t.path, flags); err != nil {
			return fmt.Errorf("put %s into its place: %w", t.path, err)
		}
		_ = unix.Close(t.fd)
	}
	return nil
}

// lay lays files of the run folder over those of the root, which this process is in.
func lay(over []cover.File) error {
	if len(over) == 0 {
		return nil
	}
	run, err := cover.Folder(runDir)
	if err != nil {
		return err
	}
	defer func() { _ = run.Close() }()
	top, err := cover.Folder("/")
	if err != nil {
		return err
	}
	defer func() { _ = top.Close() }()
	all, err := cover.Open(int(run.Fd()), over)
	if err != nil {
		return err
	}
	defer all.Close()
	return cover.Root{FD: int(top.Fd())}.Put(all)
}

// place makes a folder to mount on, unless the session has one, or a link to one.
func place(path string) error {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return nil
	}
	return os.Mkdir(path, 0o755)
}

// drop takes from this thread, and so from what it executes, all that is not kept.
func drop() error {
	for c := uintptr(0); ; c++ {
		keep := false
		for _, k := range kept {
			keep = keep || k == c
		}
		if keep {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) && c > unix.CAP_AUDIT_READ { // beyond the last that the kernel knows
			break
		}
		if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	return nil
}
