package disk

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/beneath"
)

// Beneath opens path below the directory root, and nothing else; see package beneath. It is the only way
// into a disk.
func Beneath(root *os.File, path string, flags int, mode uint32) (*os.File, error) {
	return beneath.Open(root, path, flags, mode)
}

// openDir opens a directory that is ours (not the session's) as a starting point for Beneath.
func openDir(path string) (*os.File, error) {
	return os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
}
