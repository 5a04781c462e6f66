package disk

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Beneath opens path below the directory root: it never leaves root and never follows a symbolic
// link or a mount magic link, whatever the session put there. It is the only way into a disk.
func Beneath(root *os.File, path string, flags int, mode uint32) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_CLOEXEC | unix.O_NOFOLLOW),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	if flags&unix.O_CREAT != 0 {
		how.Mode = uint64(mode)
	}
	for {
		fd, err := unix.Openat2(int(root.Fd()), path, &how)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue // a rename ran beside us; the kernel asks to try again
		}
		if err != nil {
			return nil, fmt.Errorf("open %q beneath the disk: %w", path, err)
		}
		return os.NewFile(uintptr(fd), path), nil
	}
}

// openDir opens a directory that is ours (not the session's) as a starting point for Beneath.
func openDir(path string) (*os.File, error) {
	return os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
}
