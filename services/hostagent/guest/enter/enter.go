// Package enter makes a folder the root of a whole sandbox, from inside, as its first process. It is for
// a sandbox that was started before anybody owned it, on a root with nothing in it: what is mounted at
// the folder later is the owner's.
//
// Root guarantees, when it returns nil: the folder is the root of every thread, and of all that they
// ever start; the file systems that the sandbox was started with (/proc, /dev, /run ...) are in the same
// places of it; nothing of the old root, and no folder that a mount for this lay on, can be reached any
// more; and no thread has a right, or can ever again be given one, that a sandbox does not have that was
// started on this root at once. It looks at each thread to say so.
//
// The files that Over names lie over those of the root (package cover), as far as there are any.
//
// What lies in the folder is the owner's and may be hostile: no link in it is followed, and a root that
// has a link or a file in a place where something must be mounted is refused before anything was
// changed (ErrUnfit). After any other error the sandbox is of no use: whoever asked must end it.
package enter

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/cover"
)

// Flag is the argument by which a first process is told that it may be asked to enter a root.
const Flag = "-enter"

// Anchor is an empty file in the old root, for a kernel that ends the sandbox when the file server of
// its first root goes, as gVisor does. It is mapped, without any right to the mapping, and not kept open:
// from a file that is open a hostile process might look around. Where there is none, nothing is held.
const Anchor = "/anchor"

var (
	// ErrUnfit: the new root cannot take what must be mounted in it. Nothing was changed.
	ErrUnfit = errors.New("the root has no place for what must be mounted in it")
	// ErrEntered: another folder was made the root before, or this one was tried and failed.
	ErrEntered = errors.New("the sandbox has a root already")
)

// RunFolder is where the files are that Over names; it is read-only.
const RunFolder = "/run/berth"

// state of the only process that there is to enter anything.
var state struct {
	sync.Mutex
	over   []cover.File
	folder string // that was tried
	err    error  // what came of it
}

// Over has Root lay the files over those of the root that is entered.
func Over(list []cover.File) {
	state.Lock()
	defer state.Unlock()
	state.over = list
}

// Root makes folder, an absolute path, the root. It works once: the same folder again is fine when it is
// the root already, and gives the same error when it failed.
func Root(folder string) (already bool, err error) {
	state.Lock()
	defer state.Unlock()
	switch {
	case state.folder == "":
	case state.folder != folder:
		return false, fmt.Errorf("%w, which was at %s", ErrEntered, state.folder)
	case state.err != nil:
		return false, fmt.Errorf("%w: it failed: %w", ErrEntered, state.err)
	default:
		return true, nil
	}
	err = root(folder)
	if !errors.Is(err, ErrUnfit) {
		state.folder, state.err = folder, err
	}
	return false, err
}

func root(folder string) error {
	if !path.IsAbs(folder) || path.Clean(folder) != folder || folder == "/" {
		return fmt.Errorf("%w: %q is no folder of the sandbox", ErrUnfit, folder)
	}
	points, err := mounted(folder)
	if err != nil {
		return err
	}
	top, err := unix.OpenTree(unix.AT_FDCWD, folder, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("%w: open it: %w", ErrUnfit, err)
	}
	defer func() { _ = unix.Close(top) }()
	places, err := find(top, points)
	if err != nil {
		return err
	}
	defer closeAll(places)
	if err := hold(); err != nil {
		return err
	}
	if err := unix.MoveMount(top, "", unix.AT_FDCWD, folder, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("make the root a mount of its own: %w", err)
	}
	if err := take(points, places); err != nil {
		return err
	}
	if err := lay(top, folder); err != nil {
		return err
	}
	if err := pivot(folder); err != nil {
		return err
	}
	return errors.Join(giveUp(), verify())
}

// mounted lists where the file systems are that must come along: the topmost ones, those below them come
// with them. The one that the folder is in stays behind.
func mounted(folder string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	return topmost(string(b), folder), nil
}

func topmost(mountinfo, folder string) []string {
	var out []string
	for line := range strings.Lines(mountinfo) {
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[4] == "/" || below(folder, fields[4]) {
			continue
		}
		out = append(out, fields[4])
	}
	var top []string
	for _, p := range out {
		covered := false
		for _, q := range out {
			covered = covered || p != q && below(p, q)
		}
		if !covered {
			top = append(top, p)
		}
	}
	return top
}

// below reports whether p is q or lies in it.
func below(p, q string) bool { return p == q || strings.HasPrefix(p, strings.TrimSuffix(q, "/")+"/") }

// find opens the folders of the new root that the mount points go to, and makes those that are missing.
func find(top int, points []string) (places []int, err error) {
	for _, p := range points {
		fd, err := folderIn(top, strings.Split(strings.Trim(p, "/"), "/"))
		if err != nil {
			closeAll(places)
			return nil, fmt.Errorf("%w: %s: %w", ErrUnfit, p, err)
		}
		places = append(places, fd)
	}
	return places, nil
}

// folderIn opens a folder name by name, so that no kernel's idea of a path matters.
func folderIn(top int, names []string) (int, error) {
	at := top
	for _, name := range names {
		next, err := step(at, name)
		if at != top {
			_ = unix.Close(at)
		}
		if err != nil {
			return -1, err
		}
		at = next
	}
	return at, nil
}

func step(at int, name string) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	if name == "" || name == "." || name == ".." {
		return -1, unix.EINVAL
	}
	fd, err := unix.Openat(at, name, flags, 0)
	if errors.Is(err, unix.ENOENT) {
		if err := unix.Mkdirat(at, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, err
		}
		return unix.Openat(at, name, flags, 0)
	}
	return fd, err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// hold maps the anchor, for as long as the process lives.
func hold() error {
	fd, err := unix.Open(Anchor, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the anchor: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if _, err := unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_NONE, unix.MAP_PRIVATE); err != nil {
		return fmt.Errorf("hold the anchor: %w", err)
	}
	return nil
}

// take puts copies of the file systems into their places, with all that is below them: the originals go
// with the old root. Made after the root, they are listed after it, as they are elsewhere.
func take(points []string, places []int) error {
	for i, p := range points {
		tree, err := unix.OpenTree(unix.AT_FDCWD, p, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return fmt.Errorf("take %s along: %w", p, err)
		}
		err = unix.MoveMount(tree, "", places[i], "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
		_ = unix.Close(tree)
		if err != nil {
			return fmt.Errorf("put %s into its place: %w", p, err)
		}
	}
	return nil
}

// lay lays files over those of the new root, while the old one is there to take them from. gVisor has no
// copies of a file's mount to put in place, but binds one path to another; the copy is as read-only as the
// run folder is. The places have no link in them, and nobody else runs here who could change that.
func lay(top int, folder string) error {
	places, err := cover.Root{FD: top, Follow: true}.Places(state.over)
	if err != nil {
		return err
	}
	for _, f := range places {
		var st unix.Stat_t
		from := path.Join(RunFolder, f.From)
		err := unix.Lstat(from, &st)
		if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
			err = errors.New("it is no regular file")
		}
		if err != nil {
			return fmt.Errorf("file %s of the run folder: %w", f.From, err)
		}
		if err := unix.Mount(from, folder+f.To, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("lay a file over %s: %w", f.To, err)
		}
	}
	return nil
}

// pivot changes the root of all that have the old one, and lets go of it.
func pivot(folder string) error {
	old, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the old root: %w", err)
	}
	defer func() { _ = unix.Close(old) }()
	if err := unix.Chdir(folder); err != nil {
		return fmt.Errorf("go to the root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := unix.Fchdir(old); err != nil {
		return fmt.Errorf("go to the old root: %w", err)
	}
	if err := errors.Join(unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/")); err != nil {
		return fmt.Errorf("let go of the old root: %w", err)
	}
	return nil
}
