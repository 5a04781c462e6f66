package wire

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const (
	// MTU is large so that a user-space switch carries hundreds of megabytes a second.
	MTU      = 65000
	queueLen = 1000
)

// openTUN makes a device in the namespace of the calling thread.
func openTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err == nil {
		err = unix.SetNonblock(fd, true) // so that reads wait in the runtime's poller
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "/dev/net/tun"), nil
}
