package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
)

// maxName is what the kernel keeps of a name for an interface.
const maxName = 255

// Make gives a sandbox its link, not bound; asked again, the same one. A link that broke, as one does whose
// namespace ended, is made anew with another address.
func (r *Router) Make(ctx context.Context, sandbox string, tap bool) (Link, error) {
	if sandbox == "" || len(sandbox) > maxName {
		return Link{}, fmt.Errorf("make a link: %q is no name of a sandbox", sandbox)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := errors.Join(ctx.Err(), r.usable()); err != nil {
		return Link{}, err
	}
	if s, ok := r.links[sandbox]; ok {
		l := r.used[s]
		if l.Tap == tap && r.isLive(s, l) && r.alive(l) {
			return l, nil
		}
		if err := errors.Join(r.forbid(s), removeEnd(r.kernel, s)); err != nil {
			return Link{}, fmt.Errorf("remove the old link of %s: %w", sandbox, err)
		}
		delete(r.links, sandbox)
		delete(r.used, s)
	}
	s, err := r.free()
	if err != nil {
		return Link{}, err
	}
	l := s.link(r.path, sandbox, tap)
	if err := r.raise(s, l); err != nil {
		return Link{}, fmt.Errorf("make the link of %s: %w", sandbox, errors.Join(err, removeEnd(r.kernel, s)))
	}
	r.links[sandbox], r.used[s] = s, l
	r.setLive(s, l)
	return l, nil
}

func (r *Router) alive(l Link) bool {
	end, err := r.kernel.LinkByName(l.Name)
	return err == nil && end.Attrs().Alias == l.Sandbox && end.Attrs().HardwareAddr.String() == l.HostMAC
}

// free is the next slot after the last one given that nobody has.
func (r *Router) free() (slot, error) {
	for range lastSlot - firstSlot + 1 {
		if r.last++; r.last > lastSlot {
			r.last = firstSlot
		}
		if _, ok := r.used[r.last]; !ok {
			return r.last, nil
		}
	}
	return 0, errors.New("make a link: every address is taken")
}

// raise makes the host's end, and the other one with it.
func (r *Router) raise(s slot, l Link) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = l.Name, mtu, s.hostMAC()
	attrs.NumTxQueues, attrs.NumRxQueues, attrs.Flags = 1, 1, net.FlagUp
	var err error
	if l.Tap {
		err = r.raiseTap(attrs)
	} else {
		veth := netlink.NewVeth(attrs)
		veth.PeerName, veth.PeerHardwareAddr, veth.PeerMTU = l.Peer, s.mac(), mtu
		veth.PeerNumTxQueues, veth.PeerNumRxQueues = 1, 1
		err = r.kernel.LinkAdd(veth)
	}
	if err != nil {
		return fmt.Errorf("add the interface: %w", err)
	}
	end, err := r.kernel.LinkByName(l.Name)
	if err != nil {
		return err
	}
	// Neither asks for neighbours nor answers.
	if err := r.kernel.LinkSetARPOff(end); err != nil {
		return fmt.Errorf("turn ARP off: %w", err)
	}
	for _, p := range []netip.Prefix{l.Address4, l.Address6} {
		if err := r.kernel.NeighSet(neighbour(end.Attrs().Index, p.Addr(), s.mac())); err != nil {
			return fmt.Errorf("set the neighbour: %w", err)
		}
		route := &netlink.Route{LinkIndex: end.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: ipNet(p)}
		if err := r.kernel.RouteReplace(route); err != nil {
			return fmt.Errorf("route to the sandbox: %w", err)
		}
	}
	// Last: an end that tells whose it is is a whole one.
	if err := r.kernel.LinkSetAlias(end, l.Sandbox); err != nil {
		return fmt.Errorf("name the sandbox: %w", err)
	}
	return nil
}

// raiseTap makes a tap that stays without a process, in the router.
func (r *Router) raiseTap(attrs netlink.LinkAttrs) error {
	err := netns.In(r.ns, func() error {
		f, err := openTap(attrs.Name)
		if err != nil {
			return err
		}
		defer f.Close()
		return os.NewSyscallError("keep the tap", unix.IoctlSetInt(int(f.Fd()), unix.TUNSETPERSIST, 1))
	})
	if err != nil {
		return err
	}
	end, err := r.kernel.LinkByName(attrs.Name)
	if err != nil {
		return err
	}
	return errors.Join(r.kernel.LinkSetHardwareAddr(end, attrs.HardwareAddr), r.kernel.LinkSetMTU(end, attrs.MTU),
		r.kernel.LinkSetUp(end))
}

// Remove takes a sandbox's link away: first from what is bound, then both ends. One that is not there is fine.
func (r *Router) Remove(_ context.Context, sandbox string) error {
	s, h, err := r.leaving(sandbox)
	if err != nil || h == nil {
		return err
	}
	defer h.Close()
	if err := r.forbid(s); err != nil { // many at once go in one transaction
		return err
	}
	if err := removeEnd(h, s); err != nil {
		return fmt.Errorf("remove the link of %s: %w", sandbox, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.links[sandbox] == s {
		delete(r.links, sandbox)
	}
	delete(r.used, s)
	return nil
}

// leaving finds the slot of a sandbox, and a way to speak to the kernel that is nobody else's: it takes its
// time to remove a link, but does many at once. There is none if there is no link.
func (r *Router) leaving(sandbox string) (slot, *netlink.Handle, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.usable(); err != nil {
		return 0, nil, err
	}
	s, ok := r.links[sandbox]
	if !ok {
		return 0, nil, nil
	}
	h, err := handle(r.ns)
	return s, h, err
}

// forbid unbinds a slot for good: no Bind that comes later finds the link.
func (r *Router) forbid(s slot) error {
	r.view.Lock()
	delete(r.live, s)
	r.view.Unlock()
	return r.table.change(func(p *permits) { delete(p.bound, s) })
}

func removeEnd(h *netlink.Handle, s slot) error {
	end, err := h.LinkByName(s.name())
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := h.LinkDel(end); err != nil && !errors.Is(err, unix.ENODEV) {
		return err
	}
	return nil
}

// ends reads the hosts' ends that are there; one that is half made has no sandbox.
func (r *Router) ends() (map[slot]Link, error) {
	list, err := r.kernel.LinkList()
	if err != nil {
		return nil, fmt.Errorf("read the links: %w", err)
	}
	all := map[slot]Link{}
	for _, end := range list {
		s, ok := parseSlot(end.Attrs().Name)
		if !ok {
			continue
		}
		l := s.link(r.path, end.Attrs().Alias, end.Type() == "tuntap")
		if end.Attrs().HardwareAddr.String() != l.HostMAC || end.Attrs().Flags&net.FlagUp == 0 {
			l.Sandbox = ""
		}
		all[s] = l
	}
	return all, nil
}

// adoptLinks takes over the links that are there, and removes what an earlier process left in the middle.
func (r *Router) adoptLinks() error {
	ends, err := r.ends()
	if err != nil {
		return err
	}
	for s, l := range ends {
		_, twice := r.links[l.Sandbox]
		if l.Sandbox == "" || twice {
			r.log.Info("a half-made link is removed", "link", s.name())
			if err := removeEnd(r.kernel, s); err != nil {
				return err
			}
			continue
		}
		r.links[l.Sandbox], r.used[s] = s, l
		r.setLive(s, l)
	}
	return nil
}
