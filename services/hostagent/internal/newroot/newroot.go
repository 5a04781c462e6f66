// Package newroot gives a sandbox that runs on an empty root the root of a session, from the host.
//
// It guarantees that afterwards nothing of the empty root is in the sandbox's table of mounts; that the
// file systems which the sandbox had at its folders are at the same folders of the new root, whatever the
// session left there: a folder that is none, a symbolic link for example, is refused before the sandbox
// is touched; that a folder which is missing is made as a runtime makes it; and that no thread of this
// process stays in the sandbox.
package newroot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// Slot is the folder of the empty root that the new root is put on first.
const Slot = "slot"

// folderMode is that of a folder which is made to mount something on, as runc has it.
const folderMode = 0o755

// ErrFolder says that the session's files have something else where a folder must be.
var ErrFolder = errors.New("the session's disk has no plain folder there")

// Swap is one change of a sandbox's root.
type Swap struct {
	// Process is a pidfd of a process of the sandbox, whose tables of mounts and names are meant.
	Process int
	// Root is the new root, mounted nowhere yet.
	Root *os.File
	// Folders are the names in the root at which the sandbox has file systems that it keeps.
	Folders []string
	// Owner is the user and group on the host whose folders those are that have to be made.
	Owner int
	// Hostname, unless it is empty, becomes the sandbox's name.
	Hostname string
}

// Do changes the root. Every process of the sandbox that has the old root as its root or current folder
// has the new one then. ErrFolder changed nothing in the sandbox; after any other error it is of no use.
func (s Swap) Do() (err error) {
	mounts.Elsewhere(func() { err = s.do() })
	return err
}

func (s Swap) do() error {
	// A thread that shares its current folder with others may not change its table of mounts.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("leave the host's folders: %w", err)
	}
	unix.Umask(0)
	points, err := s.points()
	defer func() {
		for _, fd := range points {
			_ = unix.Close(fd)
		}
	}()
	if err != nil {
		return err
	}
	// All at once, or the sandbox is left alone.
	if err := unix.Setns(s.Process, unix.CLONE_NEWNS|unix.CLONE_NEWUTS); err != nil {
		return fmt.Errorf("enter the sandbox: %w", err)
	}
	if err := unix.MoveMount(int(s.Root.Fd()), "", unix.AT_FDCWD, "/"+Slot, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the root: %w", err)
	}
	for i, name := range s.Folders {
		if err := unix.MoveMount(unix.AT_FDCWD, "/"+name, points[i], "", unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
			return fmt.Errorf("move /%s: %w", name, err)
		}
	}
	if err := s.pivot(); err != nil {
		return err
	}
	if s.Hostname == "" {
		return nil
	}
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return fmt.Errorf("name the sandbox: %w", err)
	}
	return nil
}

// pivot makes the attached root that of the sandbox, and drops the old one.
func (s Swap) pivot() error {
	if err := unix.Fchdir(int(s.Root.Fd())); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	// The old root now lies upon the new one.
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("drop the old root: %w", err)
	}
	return nil
}

// points opens the folders in the new root, and makes those that are missing.
func (s Swap) points() ([]int, error) {
	var out []int
	for _, name := range s.Folders {
		fd, err := open(int(s.Root.Fd()), name)
		if errors.Is(err, unix.ENOENT) {
			if err = s.make(name); err == nil {
				fd, err = open(int(s.Root.Fd()), name)
			}
		}
		if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EEXIST) {
			return out, fmt.Errorf("/%s: %w", name, ErrFolder)
		}
		if err != nil {
			return out, fmt.Errorf("open /%s: %w", name, err)
		}
		out = append(out, fd)
	}
	return out, nil
}

// make makes a folder as the sandbox's own root user, whom the new root knows; the host's it does not.
func (s Swap) make(name string) error {
	defer func() {
		_, _ = unix.SetfsuidRetUid(0)
		_, _ = unix.SetfsgidRetGid(0)
	}()
	if _, err := unix.SetfsgidRetGid(s.Owner); err != nil {
		return err
	}
	if _, err := unix.SetfsuidRetUid(s.Owner); err != nil {
		return err
	}
	return unix.Mkdirat(int(s.Root.Fd()), name, folderMode)
}

func open(root int, name string) (int, error) {
	for {
		fd, err := unix.Openat2(root, name, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
		})
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) { // the kernel asks to try again
			return fd, err
		}
	}
}

// Check looks, before there is a root, whether the folders of one that is made of an image and a
// session's files on top of it can be had. It is quick, and no more than that: Do decides.
func Check(lower, upper string, folders []string) error {
	for _, name := range folders {
		kind, err := look(upper, name)
		if err == nil && kind == 0 {
			kind, err = look(lower, name)
		}
		if err != nil {
			return fmt.Errorf("look at /%s: %w", name, err)
		}
		if kind != 0 && kind != unix.S_IFDIR {
			return fmt.Errorf("/%s: %w", name, ErrFolder)
		}
	}
	return nil
}

// look returns the kind of a file; 0 if there is none. What overlayfs notes as deleted, a device of its own,
// counts as a folder: one can be made there.
func look(dir, name string) (uint32, error) {
	var st unix.Stat_t
	err := unix.Lstat(filepath.Join(dir, name), &st)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
		return unix.S_IFDIR, nil
	}
	return st.Mode & unix.S_IFMT, err
}
