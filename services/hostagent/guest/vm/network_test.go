package vm

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

func want() *vmwire.Network {
	return &vmwire.Network{Address: "100.64.0.16/32", Gateway: "100.64.0.1", Address6: "fd62:6572:7468:1::10/128", Gateway6: "fd62:6572:7468::1",
		MAC: "02:00:00:00:00:10", GatewayMAC: "02:00:00:00:00:11", MTU: 1400}
}

// A machine that makes up addresses of its own, asks who is there, or believes whoever offers a route.
func TestADeviceHasWhatItIsToldAndNothingElse(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: network namespaces need root")
	}
	path := t.TempDir() + "/ns"
	if _, err := netns.Pin(path); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := netns.Remove(path); err != nil {
			t.Error(err)
		}
	}()
	err := netns.Do(path, func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "other"}); err != nil {
			return err
		}
		other, err := netlink.LinkByName("other")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(other); err != nil {
			return err
		}
		for range 2 { // once more changes nothing
			if err := errors.Join(loopback(), network(want())); err != nil {
				return err
			}
			if got, err := state(); err != nil || !slices.Equal(got, []string{
				"02:00:00:00:00:10 1400", "100.64.0.16/32", "fd62:6572:7468:1::10/128",
				"100.64.0.1 02:00:00:00:00:11", "fd62:6572:7468::1 02:00:00:00:00:11",
				"0.0.0.0/0 by 100.64.0.1", "::/0 by fd62:6572:7468::1", "addr_gen_mode 1", "accept_ra 0",
			}) {
				return fmt.Errorf("it has %q, %w", got, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// state is what eth0 of this namespace has.
func state() (out []string, err error) {
	eth, err := netlink.LinkByName("eth0")
	if err != nil {
		return nil, err
	}
	out = append(out, fmt.Sprint(eth.Attrs().HardwareAddr, " ", eth.Attrs().MTU))
	addrs, err := netlink.AddrList(eth, unix.AF_UNSPEC)
	for _, a := range addrs {
		out = append(out, a.IPNet.String())
	}
	neighbours, nerr := netlink.NeighList(eth.Attrs().Index, unix.AF_UNSPEC)
	slices.SortFunc(neighbours, func(a, b netlink.Neigh) int { return a.Family - b.Family })
	for _, n := range neighbours {
		if n.State == unix.NUD_PERMANENT {
			out = append(out, fmt.Sprint(n.IP, " ", n.HardwareAddr))
		}
	}
	routes, rerr := netlink.RouteList(eth, unix.AF_UNSPEC)
	slices.SortFunc(routes, func(a, b netlink.Route) int { return a.Family - b.Family })
	for _, r := range routes {
		if r.Gw != nil {
			out = append(out, fmt.Sprint(r.Dst, " by ", r.Gw))
		}
	}
	for _, name := range []string{"addr_gen_mode", "accept_ra"} {
		b, ferr := os.ReadFile("/proc/sys/net/ipv6/conf/eth0/" + name)
		out, err = append(out, name+" "+string(b[:max(len(b)-1, 0)])), errors.Join(err, ferr)
	}
	return out, errors.Join(err, nerr, rerr)
}

func TestANetworkThatMakesNoSenseIsRefused(t *testing.T) {
	for name, change := range map[string]func(*vmwire.Network){
		"no address":        func(n *vmwire.Network) { n.Address = "" },
		"no prefix":         func(n *vmwire.Network) { n.Address = "100.64.0.16" },
		"the other kind":    func(n *vmwire.Network) { n.Address = n.Address6 },
		"the other kind, 6": func(n *vmwire.Network) { n.Address6 = n.Address },
		"a kind in another": func(n *vmwire.Network) { n.Address6 = "::ffff:100.64.0.16/128" },
		"a gateway's kind":  func(n *vmwire.Network) { n.Gateway6 = n.Gateway },
		"a gateway's zone":  func(n *vmwire.Network) { n.Gateway6 = "fe80::1%eth0" },
		"no gateway":        func(n *vmwire.Network) { n.Gateway = "x" },
	} {
		n := want()
		change(n)
		if got, err := addresses(n); err == nil {
			t.Errorf("%s: %v", name, got)
		}
	}
	for _, mac := range []string{"x", "02:00:00:00:00", "02:00:00:00:00:00:00:01"} {
		if got, err := hardware(mac); err == nil {
			t.Errorf("%s: %v", mac, got)
		}
	}
}
