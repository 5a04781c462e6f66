//go:build linux

package child

import (
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TapName is the host's end of a sandbox's network, inside the namespace of its QEMU.
const TapName = "tap0"

// network brings up lo, and the tap if one is wanted. Nothing else is in this namespace and nothing
// is forwarded: what the machine sends reaches a listener in here or nobody.
func network(o Order) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }()
	if err := up(s, "lo"); err != nil {
		return err
	}
	if o.Tap == "" {
		return nil
	}
	prefix, err := netip.ParsePrefix(o.Tap)
	if err != nil || !prefix.Addr().Is4() {
		return fmt.Errorf("address %q: %w", o.Tap, err)
	}
	if err := tap(o.TapFD); err != nil {
		return err
	}
	mask := [4]byte{}
	for i := range prefix.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	if err := address(s, unix.SIOCSIFADDR, prefix.Addr().As4()); err != nil {
		return err
	}
	if err := address(s, unix.SIOCSIFNETMASK, mask); err != nil {
		return err
	}
	return up(s, TapName)
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

// address sets one of the addresses of the tap.
func address(s int, what uint, a [4]byte) error {
	r := struct {
		name [unix.IFNAMSIZ]byte
		addr unix.RawSockaddrInet4
		_    [8]byte
	}{addr: unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: a}}
	copy(r.name[:], TapName)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), uintptr(what), uintptr(unsafe.Pointer(&r))); errno != 0 {
		return fmt.Errorf("address of %s: %w", TapName, errno)
	}
	return nil
}
