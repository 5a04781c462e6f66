package cluster

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/cluster/wire"
)

// Where the members of each kind begin in the network's last byte, from 1.
const (
	natsFrom      = 10
	schedulerFrom = 20
	hostFrom      = 100
)

// network is the cluster's /24, its switch and its namespaces.
type network struct {
	prefix netip.Prefix
	device string // in the machine's own namespace
	sw     *wire.Switch
	root   *wire.Namespace
	spaces map[string]*wire.Namespace
}

// openNetwork uses the network that the state folder has, or chooses one: the folder's name decides
// where the search begins, so that two clusters seldom meet.
func openNetwork(dir, have string, seed uint64) (*network, error) {
	root, err := wire.Own()
	if err != nil {
		return nil, err
	}
	n := &network{sw: wire.NewSwitch(seed), root: root, spaces: map[string]*wire.Namespace{}}
	if have != "" {
		p, err := netip.ParsePrefix(have)
		if err == nil {
			err = taken(p)
		}
		if err == nil {
			err = n.attach(p)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("the network %s of this cluster cannot be used: %w", have, err), n.close())
		}
		return n, nil
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(dir))
	for i := range uint32(254) {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, byte((h.Sum32()+i)%254 + 1), 0}), 24)
		if err = taken(p); err != nil {
			continue
		}
		if err = n.attach(p); err == nil {
			return n, nil
		}
	}
	return nil, errors.Join(fmt.Errorf("no free network in 10.77.0.0/16 for the cluster: %w", err), n.close())
}

// taken says who uses addresses of a network already.
func taken(p netip.Prefix) error {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list this machine's routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		if other, ok := prefixOf(r.Dst); ok && other.Bits() > 0 && other.Overlaps(p) {
			return fmt.Errorf("this machine has a route to %s", other)
		}
	}
	return nil
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	addr, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), bits), ok
}

// attach makes the machine's own end.
func (n *network) attach(p netip.Prefix) error {
	n.prefix = p
	n.device = fmt.Sprintf("berth77-%03d", p.Addr().As4()[2])
	return n.sw.Join(control.Root, n.root, n.device, n.at(1))
}

func (n *network) at(last int) netip.Prefix {
	b := n.prefix.Addr().As4()
	b[3] = byte(last)
	return netip.PrefixFrom(netip.AddrFrom4(b), n.prefix.Bits())
}

// space makes the namespace of a member.
func (n *network) space(name string, last int) (*wire.Namespace, error) {
	ns, err := wire.NewNamespace()
	if err != nil {
		return nil, err
	}
	n.spaces[name] = ns
	return ns, n.sw.Join(name, ns, "berth0", n.at(last))
}

// marks tell this cluster's device and namespaces from others.
func (n *network) marks() []string {
	out := []string{n.device}
	for _, ns := range n.spaces {
		out = append(out, fmt.Sprintf("net:[%d]", ns.Inode()))
	}
	return out
}

func (n *network) close() error {
	err := n.sw.Close()
	for _, ns := range n.spaces {
		ns.Close()
	}
	n.root.Close()
	return err
}
