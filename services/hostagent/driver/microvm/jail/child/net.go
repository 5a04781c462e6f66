//go:build linux

package child

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// TapName is the other end of the network card of a machine without a link, inside the namespace of its QEMU.
const TapName = "tap0"

// network brings up lo, and makes the tap if one is wanted. It is down and without an address: what the
// machine sends reaches nobody. Nothing else is in this namespace; a machine that has a link was given the
// open descriptor of a tap that is elsewhere.
func network(o Order) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }()
	if err := up(s, "lo"); err != nil || !o.Tap {
		return err
	}
	return tap(o.TapFD)
}

// tap makes the interface with this descriptor.
func tap(fd int) error {
	f, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/net/tun: %w", err)
	}
	r, err := unix.NewIfreq(TapName)
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(f, unix.TUNSETIFF, r); err != nil {
		return fmt.Errorf("make %s: %w", TapName, err)
	}
	if err := unix.Dup3(f, fd, 0); err != nil { // QEMU inherits it
		return err
	}
	return unix.Close(f)
}

func up(s int, name string) error {
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r); err != nil {
		return fmt.Errorf("bring up %s: %w", name, err)
	}
	return nil
}
