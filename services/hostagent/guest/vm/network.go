package vm

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// loopback brings up the interface that every session has.
func loopback() error {
	return withSocket(func(fd int) error { return setFlags(fd, "lo", unix.IFF_UP|unix.IFF_RUNNING) })
}

// network sets the machine's one address (IPv4) and its way out.
func network(n *vmwire.Network) error {
	device := n.Device
	if device == "" {
		device = "eth0"
	}
	address, err := netip.ParsePrefix(n.Address)
	if err != nil || !address.Addr().Is4() {
		return fmt.Errorf("address %.40q is no IPv4 address with the length of its prefix", n.Address)
	}
	return withSocket(func(fd int) error {
		if n.MAC != "" {
			mac, err := net.ParseMAC(n.MAC)
			if err != nil || len(mac) != 6 {
				return fmt.Errorf("MAC %.40q", n.MAC)
			}
			var data [16]byte
			binary.NativeEndian.PutUint16(data[:], unix.ARPHRD_ETHER)
			copy(data[2:], mac)
			if err := ifreq(fd, device, unix.SIOCSIFHWADDR, data); err != nil {
				return err
			}
		}
		if n.MTU > 0 {
			var data [16]byte
			binary.NativeEndian.PutUint32(data[:], uint32(n.MTU))
			if err := ifreq(fd, device, unix.SIOCSIFMTU, data); err != nil {
				return err
			}
		}
		mask := netip.AddrFrom4([4]byte(net.CIDRMask(address.Bits(), 32)))
		if err := ifreq(fd, device, unix.SIOCSIFADDR, inet(address.Addr())); err != nil {
			return err
		}
		if err := ifreq(fd, device, unix.SIOCSIFNETMASK, inet(mask)); err != nil {
			return err
		}
		if err := setFlags(fd, device, unix.IFF_UP|unix.IFF_RUNNING); err != nil || n.Gateway == "" {
			return err
		}
		return route(fd, n.Gateway)
	})
}

// inet is a struct sockaddr_in without a port.
func inet(a netip.Addr) [16]byte {
	var data [16]byte
	binary.NativeEndian.PutUint16(data[:], unix.AF_INET)
	ip := a.As4()
	copy(data[4:], ip[:])
	return data
}

// route adds the default route.
func route(fd int, gateway string) error {
	gw, err := netip.ParseAddr(gateway)
	if err != nil || !gw.Is4() {
		return fmt.Errorf("gateway %.40q", gateway)
	}
	any := inet(netip.IPv4Unspecified())
	var r struct { // struct rtentry
		_                 uint64
		dst, gateway, net [16]byte
		flags             uint16
		_                 int16
		_                 [5]uint64
		_                 [6]uint64
	}
	r.dst, r.gateway, r.net, r.flags = any, inet(gw), any, unix.RTF_UP|unix.RTF_GATEWAY
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCADDRT, uintptr(unsafe.Pointer(&r))); e != 0 {
		return fmt.Errorf("default route: %w", e)
	}
	return nil
}

func setFlags(fd int, device string, flags uint16) error {
	var data [16]byte
	binary.NativeEndian.PutUint16(data[:], flags)
	return ifreq(fd, device, unix.SIOCSIFFLAGS, data)
}

func ifreq(fd int, device string, request uintptr, data [16]byte) error {
	var r struct {
		name [unix.IFNAMSIZ]byte
		data [24]byte
	}
	copy(r.name[:unix.IFNAMSIZ-1], device)
	copy(r.data[:], data[:])
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&r))); e != 0 {
		return fmt.Errorf("network device %s: request %x: %w", device, request, e)
	}
	return nil
}

func withSocket(do func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("network: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	return do(fd)
}
