package upstream

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"
)

// special are the ranges of IPv4 and of global IPv6 that are nobody's public host: the special-purpose
// registries of IANA, and what translates to or carries another address. Of IPv6 only 2000::/3 is global at
// all, so that mapped, compatible, translated (64:ff9b::/96, 64:ff9b:1::/48), site-local, link-local, unique
// local and multicast addresses need no line here.
var special = prefixes(
	"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
	"192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
	"203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32",
	"2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
)

// global is what is routed of IPv6.
var global = netip.MustParsePrefix("2000::/3")

// metadata are addresses at which clouds and hypervisors tell a machine its secrets. A range never allows
// them, only they themselves.
var metadata = addrs(
	"169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.169.253", "169.254.169.123", "100.100.100.200",
	"168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd00:ec2::253", "fd00:ec2::23", "fd20:ce::254", "fd00:42::42",
)

func prefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(list))
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func addrs(list ...string) map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	for _, s := range list {
		out[netip.MustParseAddr(s)] = true
	}
	return out
}

var (
	errNever    = errors.New("nobody is reached at that address")
	errMetadata = errors.New("it is a metadata service")
	errOwn      = errors.New("it is the host's own address")
	errPrivate  = errors.New("it is in no public range")
)

// Check says why a sandbox may not reach an address. allowed are ranges that the operator named; own are the
// host's addresses. Metadata services, and the host itself but for its loopback, are reached only where that
// very address is named. An address that carries an IPv4 address inside is allowed by a range of its own form
// alone.
func Check(a netip.Addr, allowed []netip.Prefix, own map[netip.Addr]bool) error {
	if !a.IsValid() || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return errNever
	}
	inner := embedded(a)
	if inner.IsUnspecified() || inner.IsMulticast() {
		return errNever
	}
	named, within := false, false
	for _, p := range allowed {
		if p.Contains(a) {
			within = true
			named = named || p.IsSingleIP()
		}
	}
	switch {
	case named:
		return nil
	case metadata[a] || metadata[inner]:
		return errMetadata
	case own[a] && !a.IsLoopback() || own[inner] && !inner.IsLoopback():
		return errOwn
	case within || public(a):
		return nil
	}
	return errPrivate
}

// public reports whether an address is in a range that is routed to everybody.
func public(a netip.Addr) bool {
	if a.Is6() && !global.Contains(a) {
		return false
	}
	for _, p := range special {
		if p.Contains(a) {
			return false
		}
	}
	return true
}

// embedded is the IPv4 address that an IPv6 address leads to: mapped, compatible, NAT64 or 6to4; else the
// address itself.
func embedded(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	b := a.As16()
	tail := netip.AddrFrom4([4]byte(b[12:16]))
	switch {
	case a.Is4In6(), prefixMapped.Contains(a), prefixNAT64.Contains(a), prefixNAT64Local.Contains(a):
		return tail
	case prefixCompatible.Contains(a) && !a.IsLoopback():
		return tail
	case prefix6to4.Contains(a):
		return netip.AddrFrom4([4]byte(b[2:6]))
	}
	return a
}

var (
	prefixMapped     = netip.MustParsePrefix("::ffff:0:0/96")
	prefixCompatible = netip.MustParsePrefix("::/96")
	prefixNAT64      = netip.MustParsePrefix("64:ff9b::/96")
	prefixNAT64Local = netip.MustParsePrefix("64:ff9b:1::/48")
	prefix6to4       = netip.MustParsePrefix("2002::/16")
)

// own keeps the host's addresses.
type own struct {
	read func() []netip.Addr

	mu   sync.Mutex
	at   time.Time
	list map[netip.Addr]bool
}

// ownEvery is how old the list of the host's addresses may be.
const ownEvery = 5 * time.Second

func (o *own) addresses() map[netip.Addr]bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.list == nil || time.Since(o.at) > ownEvery {
		fresh := map[netip.Addr]bool{}
		for _, a := range o.read() {
			fresh[a.Unmap().WithZone("")] = true
		}
		o.list, o.at = fresh, time.Now()
	}
	return o.list
}

// interfaces are the addresses of this machine as this namespace sees it.
func interfaces() []netip.Addr {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var out []netip.Addr
	for _, x := range list {
		if n, ok := x.(*net.IPNet); ok {
			if a, ok := netip.AddrFromSlice(n.IP); ok {
				out = append(out, a.Unmap())
			}
		}
	}
	return out
}
