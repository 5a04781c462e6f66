package network

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// probe is one frame that a sandbox could send, and whether it reaches a door while its link is bound and
// the lease holds. Else none does.
type probe struct {
	what    string
	frame   []byte
	through bool
	// seen: the rules see it; ARP they never do.
	seen bool
}

// Destinations of probes, of ranges that are for examples.
var (
	example4 = netip.MustParseAddr("203.0.113.7")
	example6 = netip.MustParseAddr("2001:db8::7")
)

const tcpReset = 0x04 // nobody answers a reset

// probes are frames of the link in the slot s; other is another sandbox.
func probes(s, other slot) []probe {
	var all []probe
	for _, v := range []struct {
		name               string
		own, neighbour     netip.Addr
		gateway, elsewhere netip.Addr
		all                netip.Addr
	}{
		{"IPv4", s.address4(), other.address4(), Gateway4, example4, netip.MustParseAddr("224.0.0.1")},
		{"IPv6", s.address6(), other.address6(), Gateway6, example6, netip.MustParseAddr("ff02::1")},
	} {
		add := func(through bool, what string, frame []byte) {
			all = append(all, probe{v.name + " " + what, frame, through, true})
		}
		mine := func(to netip.Addr, protocol byte, payload []byte) []byte {
			return ether(s.hostMAC(), s.mac(), packet(v.own, to, protocol, payload))
		}
		tcp := func(to netip.Addr, port uint16) []byte { return mine(to, unix.IPPROTO_TCP, segment(v.own, to, port)) }
		udp := func(to netip.Addr, port uint16) []byte { return mine(to, unix.IPPROTO_UDP, datagram(v.own, to, port)) }
		for _, port := range []uint16{DNSPort, SocksPort, ConnectPort} {
			add(true, fmt.Sprintf("TCP to the door %d", port), tcp(v.gateway, port))
		}
		add(true, "UDP to the resolver", udp(v.gateway, DNSPort))
		add(true, "TCP to anywhere", tcp(v.elsewhere, 443))
		add(true, "TCP to another sandbox's address", tcp(v.neighbour, 443)) // it ends at the transparent door
		add(false, "TCP to another port of the gateway", tcp(v.gateway, 22))
		add(false, "TCP to the transparent door by its port", tcp(v.gateway, TransparentPort))
		add(false, "UDP to another port of the gateway", udp(v.gateway, 54))
		add(false, "UDP to another resolver", udp(v.elsewhere, DNSPort))
		add(false, "QUIC", udp(v.elsewhere, 443))
		add(false, "UDP to another sandbox", udp(v.neighbour, DNSPort))
		add(false, "GRE", mine(v.gateway, unix.IPPROTO_GRE, make([]byte, 8)))
		add(false, "SCTP", mine(v.elsewhere, unix.IPPROTO_SCTP, make([]byte, 16)))
		add(false, "UDP to everybody", udp(v.all, DNSPort))
		add(false, "echo request to the gateway", mine(v.gateway, icmpOf(v.own), echo(v.own, v.gateway)))
		add(false, "echo request to anywhere", mine(v.elsewhere, icmpOf(v.own), echo(v.own, v.elsewhere)))
		add(false, "a neighbour's source address", ether(s.hostMAC(), s.mac(),
			packet(v.neighbour, v.gateway, unix.IPPROTO_TCP, segment(v.neighbour, v.gateway, ConnectPort))))
		add(false, "a neighbour's hardware address", ether(s.hostMAC(), other.mac(),
			packet(v.own, v.gateway, unix.IPPROTO_TCP, segment(v.own, v.gateway, ConnectPort))))
		add(false, "both of a neighbour's addresses", ether(s.hostMAC(), other.mac(),
			packet(v.neighbour, v.gateway, unix.IPPROTO_TCP, segment(v.neighbour, v.gateway, ConnectPort))))
		add(false, "the gateway's source address", ether(s.hostMAC(), s.mac(),
			packet(v.gateway, v.gateway, unix.IPPROTO_TCP, segment(v.gateway, v.gateway, ConnectPort))))
		add(false, "to every hardware address", ether(broadcast, s.mac(),
			packet(v.own, v.gateway, unix.IPPROTO_TCP, segment(v.own, v.gateway, ConnectPort))))
	}
	return append(append(all, odd4(s)...), odd6(s)...)
}

var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// odd4 are IPv4 packets that no honest client sends, and ARP.
func odd4(s slot) []probe {
	whole := packet(s.address4(), Gateway4, unix.IPPROTO_UDP, datagram(s.address4(), Gateway4, DNSPort))
	first, last := clone(whole), clone(whole)
	first[6], last[7] = 0x20, 2 // one after the other, sixteen bytes on
	sum4(first)
	sum4(last)
	options := func(bytes ...byte) []byte {
		p := append(append(clone(whole[:20]), bytes...), whole[20:]...)
		p[0] += byte(len(bytes) / 4)
		binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
		sum4(p)
		return p
	}
	request := ethernet(broadcast, s.mac(), unix.ETH_P_ARP)
	request = append(request, 0, 1, 8, 0, 6, 4, 0, 1)
	request = append(append(request, s.mac()...), s.address4().AsSlice()...)
	request = append(append(request, make([]byte, 6)...), Gateway4.AsSlice()...)
	return []probe{
		{"IPv4 the first fragment", ether(s.hostMAC(), s.mac(), first), false, true},
		{"IPv4 the last fragment", ether(s.hostMAC(), s.mac(), last), false, true},
		{"IPv4 options", ether(s.hostMAC(), s.mac(), options(1, 1, 1, 0)), false, true},
		{"IPv4 a source route", ether(s.hostMAC(), s.mac(), options(0x83, 7, 4, 203, 0, 113, 7, 0)), false, true},
		{"ARP for the gateway", request, false, false},
	}
}

// odd6 are IPv6 packets with headers in between, and neighbour discovery.
func odd6(s slot) []probe {
	var all []probe
	inner := datagram(s.address6(), Gateway6, DNSPort)
	for _, h := range []struct {
		what   string
		number byte
		header []byte
	}{
		{"hop-by-hop options", unix.IPPROTO_HOPOPTS, []byte{unix.IPPROTO_UDP, 0, 1, 4, 0, 0, 0, 0}},
		{"destination options", unix.IPPROTO_DSTOPTS, []byte{unix.IPPROTO_UDP, 0, 1, 4, 0, 0, 0, 0}},
		{"a routing header", unix.IPPROTO_ROUTING, []byte{unix.IPPROTO_UDP, 0, 2, 0, 0, 0, 0, 0}},
		{"a fragment header", unix.IPPROTO_FRAGMENT, []byte{unix.IPPROTO_UDP, 0, 0, 1, 0, 0, 0, 7}},
		{"a whole packet's fragment header", unix.IPPROTO_FRAGMENT, []byte{unix.IPPROTO_UDP, 0, 0, 0, 0, 0, 0, 8}},
	} {
		p := packet(s.address6(), Gateway6, h.number, append(h.header, inner...))
		all = append(all, probe{"IPv6 " + h.what, ether(s.hostMAC(), s.mac(), p), false, true})
	}
	four := netip.AddrFrom16(Gateway4.As16())
	p := packet(s.address6(), four, unix.IPPROTO_TCP, segment(s.address6(), four, ConnectPort))
	all = append(all, probe{"IPv6 TCP to a mapped address", ether(s.hostMAC(), s.mac(), p), false, true})
	local := netip.MustParseAddr("fe80::1")
	for _, from := range []netip.Addr{s.address6(), local} {
		ask := append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, Gateway6.AsSlice()...)
		ask = append(append(ask, 1, 1), s.mac()...)
		binary.BigEndian.PutUint16(ask[2:], sum(ask, pseudo(from, Gateway6, unix.IPPROTO_ICMPV6, len(ask))))
		p := packet(from, Gateway6, unix.IPPROTO_ICMPV6, ask)
		p[7] = 255
		all = append(all, probe{"a neighbour solicitation from " + from.String(), ether(s.hostMAC(), s.mac(), p), false, true})
	}
	p = packet(local, Gateway6, unix.IPPROTO_UDP, datagram(local, Gateway6, DNSPort))
	return append(all, probe{"IPv6 a link-local source", ether(s.hostMAC(), s.mac(), p), false, true})
}

func clone(b []byte) []byte { return append([]byte(nil), b...) }

func ethernet(to, from net.HardwareAddr, kind uint16) []byte {
	return binary.BigEndian.AppendUint16(append(clone(to), from...), kind)
}

func ether(to, from net.HardwareAddr, packet []byte) []byte {
	kind := uint16(unix.ETH_P_IP)
	if packet[0]>>4 == 6 {
		kind = unix.ETH_P_IPV6
	}
	return append(ethernet(to, from, kind), packet...)
}

func packet(from, to netip.Addr, protocol byte, payload []byte) []byte {
	if from.Is6() {
		h := make([]byte, 8, 40+len(payload))
		h[0], h[6], h[7] = 0x60, protocol, 64
		binary.BigEndian.PutUint16(h[4:], uint16(len(payload)))
		return append(append(append(h, from.AsSlice()...), to.AsSlice()...), payload...)
	}
	h := make([]byte, 12, 20+len(payload))
	h[0], h[8], h[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(payload)))
	h = append(append(h, from.AsSlice()...), to.AsSlice()...)
	sum4(h)
	return append(h, payload...)
}

// sum4 puts the checksum of an IPv4 header.
func sum4(p []byte) {
	p[10], p[11] = 0, 0
	binary.BigEndian.PutUint16(p[10:], sum(p[:int(p[0]&15)*4], 0))
}

func segment(from, to netip.Addr, port uint16) []byte {
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h, 40000)
	binary.BigEndian.PutUint16(h[2:], port)
	h[12], h[13] = 5<<4, tcpReset
	binary.BigEndian.PutUint16(h[16:], sum(h, pseudo(from, to, unix.IPPROTO_TCP, len(h))))
	return h
}

func datagram(from, to netip.Addr, port uint16) []byte {
	h := make([]byte, 8, 16)
	binary.BigEndian.PutUint16(h, 40000)
	binary.BigEndian.PutUint16(h[2:], port)
	binary.BigEndian.PutUint16(h[4:], 16)
	h = append(h, "12345678"...)
	binary.BigEndian.PutUint16(h[6:], sum(h, pseudo(from, to, unix.IPPROTO_UDP, len(h))))
	return h
}

func icmpOf(a netip.Addr) byte {
	if a.Is4() {
		return unix.IPPROTO_ICMP
	}
	return unix.IPPROTO_ICMPV6
}

func echo(from, to netip.Addr) []byte {
	h := []byte{8, 0, 0, 0, 0, 1, 0, 1}
	start := uint32(0)
	if from.Is6() {
		h[0], start = 128, pseudo(from, to, unix.IPPROTO_ICMPV6, len(h))
	}
	binary.BigEndian.PutUint16(h[2:], sum(h, start))
	return h
}

// pseudo adds up what a transport's checksum takes from the IP header.
func pseudo(from, to netip.Addr, protocol byte, n int) uint32 {
	return add(add(uint32(protocol)+uint32(n), from.AsSlice()), to.AsSlice())
}

func add(s uint32, b []byte) uint32 {
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		s += uint32(b[len(b)-1]) << 8
	}
	return s
}

// sum is the internet checksum.
func sum(b []byte, start uint32) uint16 {
	s := add(start, b)
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}
