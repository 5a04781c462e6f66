package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// setting is one of the kernel's for a namespace, below /proc/sys/net.
type setting struct{ name, value string }

// silent are those of every interface, here and in a sandbox: no address, route or neighbour is taken from
// what somebody sends.
func silent(of string) []setting {
	four, six := "ipv4/conf/"+of+"/", "ipv6/conf/"+of+"/"
	return []setting{
		{four + "forwarding", "0"}, {four + "accept_redirects", "0"}, {four + "send_redirects", "0"},
		{four + "secure_redirects", "0"}, {four + "accept_source_route", "0"}, {four + "proxy_arp", "0"},
		{six + "disable_ipv6", "0"}, {six + "forwarding", "0"}, {six + "accept_ra", "0"}, {six + "autoconf", "0"},
		{six + "accept_redirects", "0"}, {six + "accept_source_route", "-1"}, {six + "addr_gen_mode", "1"},
		{six + "dad_transmits", "0"}, {six + "accept_dad", "0"}, {six + "router_solicitations", "0"},
	}
}

// routerSettings puts those of the router; it runs in there.
func routerSettings() error {
	all := []setting{
		{"ipv4/ip_forward", "0"}, {"ipv4/icmp_echo_ignore_all", "1"}, {"ipv4/icmp_echo_ignore_broadcasts", "1"},
		{"ipv6/icmp/echo_ignore_all", "1"}, {"ipv4/tcp_fwmark_accept", "0"},
	}
	for _, of := range []string{"all", "default"} {
		all = append(all, silent(of)...)
		four := "ipv4/conf/" + of + "/"
		// The way back to a sandbox's address is its own link, so a strict check fits, also with a mark.
		all = append(all, setting{four + "rp_filter", "1"}, setting{four + "src_valid_mark", "0"},
			setting{four + "arp_ignore", "8"}, setting{four + "route_localnet", "0"})
	}
	return apply(all)
}

// sandboxSettings puts those of a sandbox's namespace; it runs in there.
func sandboxSettings(of ...string) error {
	var all []setting
	for _, o := range of {
		all = append(all, silent(o)...)
	}
	return apply(all)
}

func apply(all []setting) error {
	for _, s := range all {
		err := os.WriteFile(filepath.Join("/proc/sys/net", s.name), []byte(s.value), 0)
		// "all" has no such switch for some; an old kernel lacks others.
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("set %s: %w", s.name, err)
		}
	}
	return nil
}

func hostPrefixOf(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// nodad is an address that is used without asking whether somebody else has it.
func nodad(p netip.Prefix) *netlink.Addr {
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	return a
}

func everything(family int) *net.IPNet {
	if family == unix.AF_INET {
		return ipNet(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
	}
	return ipNet(netip.PrefixFrom(netip.IPv6Unspecified(), 0))
}

// neighbour is a permanent entry: nobody is asked and nobody is believed.
func neighbour(index int, a netip.Addr, mac net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac}
}
