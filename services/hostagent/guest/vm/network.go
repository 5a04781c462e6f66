package vm

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// device4 and device6 are settings of a network device before it is up: it has the addresses that it is given
// and makes up none, asks nobody for a route and believes nobody who offers one.
var (
	device6 = []setting{{"addr_gen_mode", "1"}, {"accept_ra", "0"}, {"autoconf", "0"}, {"router_solicitations", "0"},
		{"accept_redirects", "0"}, {"accept_dad", "0"}}
	device4 = []setting{{"accept_redirects", "0"}, {"secure_redirects", "0"}, {"arp_ignore", "1"}}
)

type setting struct{ name, value string }

// loopback brings up the interface that every session has.
func loopback() error {
	return withRoutes(func(c *routes) error {
		lo, err := net.InterfaceByName("lo")
		if err != nil {
			return err
		}
		return c.link(lo.Index, nil, 0)
	})
}

// network sets the machine's addresses, its ways out and who is there.
func network(n *vmwire.Network) error {
	name := n.Device
	if name == "" {
		name = "eth0"
	}
	device, err := net.InterfaceByName(name)
	if err != nil {
		return fmt.Errorf("network device %s: %w", name, err)
	}
	mac, err := hardware(n.MAC)
	if err != nil {
		return err
	}
	neighbour, err := hardware(n.GatewayMAC)
	if err != nil {
		return err
	}
	families, err := addresses(n)
	if err != nil {
		return err
	}
	if err := errors.Join(set("ipv6", name, device6), set("ipv4", name, device4)); err != nil {
		return err
	}
	return withRoutes(func(c *routes) error {
		if err := c.link(device.Index, mac, n.MTU); err != nil {
			return fmt.Errorf("bring up %s: %w", name, err)
		}
		for _, f := range families {
			if err := c.family(device.Index, f, neighbour); err != nil {
				return err
			}
		}
		return nil
	})
}

// family is an address of one kind, and its way out if it has one.
type family struct {
	address netip.Prefix
	gateway netip.Addr
}

func addresses(n *vmwire.Network) (out []family, err error) {
	for _, one := range []struct {
		address, gateway string
		six              bool
	}{{n.Address, n.Gateway, false}, {n.Address6, n.Gateway6, true}} {
		if one.address == "" && one.six {
			continue
		}
		var f family
		if f.address, err = netip.ParsePrefix(one.address); err != nil || f.address.Addr().Is6() != one.six || f.address.Addr().Is4In6() {
			return nil, fmt.Errorf("address %.64q is none of its kind with the length of its prefix", one.address)
		}
		if one.gateway != "" {
			if f.gateway, err = netip.ParseAddr(one.gateway); err != nil || f.gateway.Is6() != one.six || f.gateway.Is4In6() || f.gateway.Zone() != "" {
				return nil, fmt.Errorf("gateway %.64q", one.gateway)
			}
		}
		out = append(out, f)
	}
	return out, nil
}

func hardware(text string) (net.HardwareAddr, error) {
	if text == "" {
		return nil, nil
	}
	mac, err := net.ParseMAC(text)
	if err != nil || len(mac) != 6 {
		return nil, fmt.Errorf("MAC %.40q", text)
	}
	return mac, nil
}

// set writes settings of a device. A kernel that does not know one does not do what it forbids.
func set(kind, device string, list []setting) error {
	for _, s := range list {
		err := os.WriteFile("/proc/sys/net/"+kind+"/conf/"+device+"/"+s.name, []byte(s.value), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set %s of %s: %w", s.name, device, err)
		}
	}
	return nil
}

// family sets an address, the neighbour that is its gateway, and the route to it.
func (c *routes) family(device int, f family, neighbour net.HardwareAddr) error {
	if err := c.address(device, f.address); err != nil {
		return fmt.Errorf("address %s: %w", f.address, err)
	}
	if !f.gateway.IsValid() {
		return nil
	}
	if neighbour != nil {
		if err := c.neighbour(device, f.gateway, neighbour); err != nil {
			return fmt.Errorf("neighbour %s: %w", f.gateway, err)
		}
	}
	if err := c.route(device, f.gateway); err != nil {
		return fmt.Errorf("route by %s: %w", f.gateway, err)
	}
	return nil
}

// withRoutes speaks with the kernel of links, addresses and routes.
func withRoutes(do func(*routes) error) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("network: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	patience := unix.NsecToTimeval(int64(5 * time.Second))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience); err != nil {
		return fmt.Errorf("network: %w", err)
	}
	return do(&routes{fd: fd})
}
