//go:build linux

package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Parts are the mounts that a sandbox's root is made of; each is attached nowhere yet.
type Parts struct {
	Image, Disk, Run, Null, Binary *os.File
	// Memory that files in /tmp may take.
	TmpBytes uint64
}

// Enter makes the root of the sandbox out of its parts and moves the process into it; what was there
// before is out of reach for good. It needs new mount and user namespaces.
//
// The root is the image with the session's disk on top, and no program starts from it. Beside it
// there are /dev with nothing but null and this program, /run/berth, and /tmp in memory. Links that a
// session left in place of those folders lead to places inside the sandbox: the old root is gone by
// then.
func Enter(p Parts) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := overlay(p); err != nil {
		return err
	}
	if err := leave(); err != nil {
		return err
	}
	return furnish(p)
}

// Shed leaves the process with an empty folder and nothing of the host's files. The copies of the host's
// mounts that it was born with would keep every disk busy that was there then, for as long as it waits.
// Enter works from there as from the host's root. It needs new mount and user namespaces.
func Shed() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", "/tmp", "tmpfs", 0, "size=64k,mode=700"); err != nil {
		return fmt.Errorf("mount a file system of its own: %w", err)
	}
	if err := unix.Mkdir("/tmp/tmp", 0o700); err != nil {
		return fmt.Errorf("make a place for the root: %w", err)
	}
	if err := os.Chdir("/tmp"); err != nil {
		return err
	}
	return leave()
}

// leave makes the current folder, a mount, the root, and drops what was there before.
func leave() error {
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("leave the host's files: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("drop the host's files: %w", err)
	}
	return os.Chdir("/")
}

// Keep makes a folder, a mount that is attached nowhere, all that the process has of any file system.
// The copies of the host's mounts that it was born with are dropped: each of them would keep a disk
// busy as long as the process lives. It needs new mount and user namespaces.
func Keep(folder int) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.MoveMount(folder, "", unix.AT_FDCWD, "/tmp", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the folder: %w", err)
	}
	if err := os.Chdir("/tmp"); err != nil {
		return err
	}
	return leave()
}

// overlay mounts image and disk as one, in the place of the host's /tmp, and goes there.
func overlay(p Parts) error {
	if err := unix.Mount("tmpfs", "/tmp", "tmpfs", 0, "size=64k,mode=700"); err != nil {
		return fmt.Errorf("mount a file system of its own: %w", err)
	}
	for _, d := range []string{"/tmp/l", "/tmp/u", "/tmp/root"} {
		if err := unix.Mkdir(d, 0o700); err != nil {
			return fmt.Errorf("make %s: %w", d, err)
		}
	}
	for dir, f := range map[string]*os.File{"/tmp/l": p.Image, "/tmp/u": p.Disk} {
		if err := attach(f, dir); err != nil {
			return err
		}
	}
	ctx, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open overlay: %w", err)
	}
	defer func() { _ = unix.Close(ctx) }()
	if err := unix.FsconfigSetFlag(ctx, "userxattr"); err != nil {
		return fmt.Errorf("overlay option userxattr: %w", err)
	}
	for _, o := range [][2]string{
		{"source", "berth"}, {"lowerdir", "/tmp/l"}, {"upperdir", "/tmp/u/upper"}, {"workdir", "/tmp/u/work"},
		{"index", "off"}, {"metacopy", "off"}, {"redirect_dir", "nofollow"},
	} {
		if err := unix.FsconfigSetString(ctx, o[0], o[1]); err != nil {
			return fmt.Errorf("overlay option %s: %w", o[0], err)
		}
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return fmt.Errorf("create overlay: %w", err)
	}
	mnt, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	if err := attach(os.NewFile(uintptr(mnt), "overlay"), "/tmp/root"); err != nil {
		return err
	}
	return os.Chdir("/tmp/root")
}

// attach puts a mount that is attached nowhere at dir.
func attach(f *os.File, dir string) error {
	defer func() { _ = f.Close() }()
	if err := unix.MoveMount(int(f.Fd()), "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach %s: %w", dir, err)
	}
	return nil
}

// furnish adds what is not on the disk. /tmp and /run may be anything by the session's own doing;
// then they stay as they are.
func furnish(p Parts) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := tmpfs("/dev", flags, "size=64k,mode=755"); err != nil {
		return err
	}
	for path, f := range map[string]*os.File{"/dev/null": p.Null, "/dev/berth-wasm": p.Binary} {
		if err := os.WriteFile(path, nil, 0o444); err != nil {
			return fmt.Errorf("prepare %s: %w", path, err)
		}
		if err := attach(f, path); err != nil {
			return err
		}
	}
	if err := unix.Mount("", "/dev", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|flags, ""); err != nil {
		return fmt.Errorf("close /dev: %w", err)
	}
	if tmpfs("/run", flags, "size=1m,mode=755") == nil {
		if err := os.Mkdir("/run/berth", 0o755); err != nil {
			return fmt.Errorf("make /run/berth: %w", err)
		}
		if err := attach(p.Run, "/run/berth"); err != nil {
			return err
		}
	} else {
		_ = p.Run.Close()
	}
	_ = tmpfs("/tmp", flags, fmt.Sprintf("size=%d,mode=1777", p.TmpBytes))
	return nil
}

func tmpfs(dir string, flags uintptr, options string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", flags, options); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	return nil
}
