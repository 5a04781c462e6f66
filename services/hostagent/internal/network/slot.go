package network

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// A slot is the number that every name and address of a link follows from.
type slot uint32

const (
	// firstSlot leaves the first addresses to the gateway and to what may come.
	firstSlot slot = 16
	lastSlot  slot = 1<<22 - 2

	hostPrefix = "be"
	peerPrefix = "bp"
	mtu        = 1500
)

func (s slot) name() string { return hostPrefix + strconv.FormatUint(uint64(s), 10) }
func (s slot) peer() string { return peerPrefix + strconv.FormatUint(uint64(s), 10) }

// parseSlot reads the slot from the name of a host's end.
func parseSlot(name string) (slot, bool) {
	digits, ok := strings.CutPrefix(name, hostPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	s := slot(n)
	if err != nil || s < firstSlot || s > lastSlot || s.name() != name {
		return 0, false
	}
	return s, true
}

func (s slot) address4() netip.Addr {
	base := Sandboxes4.Addr().As4()
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(base[:])+uint32(s))
	return netip.AddrFrom4(a)
}

func (s slot) address6() netip.Addr {
	a := Sandboxes6.Addr().As16()
	binary.BigEndian.PutUint32(a[12:], uint32(s))
	return netip.AddrFrom16(a)
}

// mac is the sandbox's hardware address, hostMAC that of the host's end; both are locally administered.
func (s slot) mac() net.HardwareAddr     { return s.hardware(1) }
func (s slot) hostMAC() net.HardwareAddr { return s.hardware(0) }

func (s slot) hardware(end byte) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0xbe, end, byte(s >> 16), byte(s >> 8), byte(s)}
}

func (s slot) link(router, sandbox string, tap bool) Link {
	l := Link{
		Sandbox: sandbox, Router: router, Name: s.name(), Tap: tap,
		Address4: netip.PrefixFrom(s.address4(), 32), Address6: netip.PrefixFrom(s.address6(), 128),
		MAC: s.mac().String(), HostMAC: s.hostMAC().String(), MTU: mtu,
	}
	if !tap {
		l.Peer = s.peer()
	}
	return l
}

// slot is the link's. A link that was read from a record is judged: every part must follow from its name.
func (l Link) slot() (slot, error) {
	s, ok := parseSlot(l.Name)
	if !ok || l != s.link(l.Router, l.Sandbox, l.Tap) {
		return 0, fmt.Errorf("the link %q of %q is none that a router made", l.Name, l.Sandbox)
	}
	return s, nil
}
