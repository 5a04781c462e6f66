// Package beneath opens what lies below a directory, and nothing else, whatever a session put there. It
// is the only way into a session's files.
package beneath

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Open opens path below the directory root: it never leaves root and never follows a symbolic link or a
// mount magic link.
func Open(root *os.File, path string, flags int, mode uint32) (*os.File, error) {
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
