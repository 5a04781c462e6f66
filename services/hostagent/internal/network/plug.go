package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
)

// inside is the name of a link in its sandbox.
const inside = "eth0"

// Plug moves the link's peer into the namespace at a path, as eth0, with its addresses, the default routes
// and the gateway as permanent neighbour. It is idempotent, and finishes what was left in the middle; a
// namespace that has another eth0 is refused.
func (l Link) Plug(path string) error {
	s, err := l.slot()
	if err != nil {
		return err
	}
	if l.Tap {
		return fmt.Errorf("plug %s: a tap has no other end", l.Name)
	}
	ns, err := netns.Open(path)
	if err != nil {
		return fmt.Errorf("plug %s: %w", l.Name, err)
	}
	defer ns.Close()
	h, err := handle(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	// Before the move: an interface begins with the settings of its new namespace.
	if err := netns.In(ns, func() error { return sandboxSettings("all", "default") }); err != nil {
		return fmt.Errorf("plug %s: %w", l.Name, err)
	}
	end, err := l.move(h, ns)
	if err != nil {
		return fmt.Errorf("plug %s: %w", l.Name, err)
	}
	if err := netns.In(ns, func() error { return sandboxSettings(inside) }); err != nil {
		return fmt.Errorf("plug %s: %w", l.Name, err)
	}
	if err := l.dress(h, end, s.hostMAC()); err != nil {
		return fmt.Errorf("plug %s: %w", l.Name, err)
	}
	return errors.Join(local(h, l.Address6.Addr()), up(h, inside),
		l.inRouter(func(h *netlink.Handle) error { return up(h, l.Name) }))
}

// inRouter speaks to the router's kernel state.
func (l Link) inRouter(f func(*netlink.Handle) error) error {
	router, err := netns.Open(l.Router)
	if err != nil {
		return err
	}
	defer router.Close()
	h, err := handle(router)
	if err != nil {
		return err
	}
	defer h.Close()
	return f(h)
}

// move brings the peer into the namespace and gives it its name there.
func (l Link) move(h *netlink.Handle, ns *os.File) (netlink.Link, error) {
	end, err := h.LinkByName(inside)
	if err == nil {
		if end.Attrs().HardwareAddr.String() != l.MAC {
			return nil, errors.New("the namespace has another eth0")
		}
		return end, nil
	}
	if end, err = h.LinkByName(l.Peer); err != nil {
		err := l.inRouter(func(from *netlink.Handle) error {
			peer, err := from.LinkByName(l.Peer)
			if err != nil {
				return fmt.Errorf("%w: %s is not in the router", ErrNoLink, l.Peer)
			}
			return from.LinkSetNsFd(peer, int(ns.Fd()))
		})
		if err != nil {
			return nil, fmt.Errorf("move it: %w", err)
		}
		if end, err = h.LinkByName(l.Peer); err != nil {
			return nil, err
		}
	}
	if end.Attrs().HardwareAddr.String() != l.MAC {
		return nil, errors.New("its hardware address is another")
	}
	if err := h.LinkSetName(end, inside); err != nil {
		return nil, fmt.Errorf("name it: %w", err)
	}
	return h.LinkByName(inside)
}

// dress brings the interface up with its addresses and routes.
func (l Link) dress(h *netlink.Handle, end netlink.Link, gateway net.HardwareAddr) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := errors.Join(h.LinkSetUp(lo), h.LinkSetMTU(end, l.MTU), h.LinkSetUp(end)); err != nil {
		return fmt.Errorf("bring it up: %w", err)
	}
	index := end.Attrs().Index
	for _, a := range []struct {
		own netip.Prefix
		via netip.Addr
		all int
	}{{l.Address4, Gateway4, unix.AF_INET}, {l.Address6, Gateway6, unix.AF_INET6}} {
		if err := h.AddrReplace(end, nodad(a.own)); err != nil {
			return fmt.Errorf("give it %s: %w", a.own, err)
		}
		if err := h.NeighSet(neighbour(index, a.via, gateway)); err != nil {
			return fmt.Errorf("set the gateway's hardware address: %w", err)
		}
		// The gateway's own route lets those that copy the table do without the flag onlink.
		to := &netlink.Route{LinkIndex: index, Scope: netlink.SCOPE_LINK, Dst: ipNet(hostPrefixOf(a.via))}
		out := &netlink.Route{LinkIndex: index, Dst: everything(a.all), Gw: a.via.AsSlice()}
		if err := errors.Join(h.RouteReplace(to), h.RouteReplace(out)); err != nil {
			return fmt.Errorf("route %s: %w", a.via, err)
		}
	}
	return nil
}

// OpenTap opens the link's tap, for a machine that reads and writes frames with a virtio-net header. One
// descriptor at a time can be open; it may be used from any namespace.
func (l Link) OpenTap() (f *os.File, err error) {
	if _, err := l.slot(); err != nil {
		return nil, err
	}
	if !l.Tap {
		return nil, fmt.Errorf("open the tap of %s: the link is none", l.Sandbox)
	}
	err = netns.Do(l.Router, func() error {
		// Asked for a tap that is not there, the kernel would make one.
		if _, err := net.InterfaceByName(l.Name); err != nil {
			return ErrNoLink
		}
		f, err = openTap(l.Name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the tap of %s: %w", l.Sandbox, err)
	}
	return f, nil
}

// openTap attaches to a tap of the thread's namespace, or makes it.
func openTap(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open /dev/net/tun", err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("attach to the tap", err)
	}
	return os.NewFile(uintptr(fd), "/dev/net/tun"), nil
}
