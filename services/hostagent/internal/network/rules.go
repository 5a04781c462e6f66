package network

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// tableName is the router's table, of the family inet.
const tableName = "berth"

// mark is on packets for the transparent door; markTable is the routing table that keeps them here.
const (
	mark      = 1
	markTable = 100
)

// Why a packet was dropped, as Drops counts it.
const (
	DropLocal     = "local"     // from the router itself, over loopback
	DropCast      = "cast"      // to a group or to everybody, or not to the host's end
	DropFragment  = "fragment"  // a part of a packet
	DropOptions   = "options"   // IPv4 options
	DropExtension = "extension" // IPv6 extension headers
	DropMapped    = "mapped"    // to an IPv4 address written as an IPv6 one
	DropLease     = "lease"     // of a bound link while the host has no lease
	DropSource    = "source"    // of a link that is not bound, or with another's source address
	DropGateway   = "gateway"   // to a port of the gateway that is no door
	DropClosed    = "closed"    // TCP while the transparent door is not open
	DropProtocol  = "protocol"  // neither TCP nor a question to the resolver
	DropForward   = "forward"   // to be sent on, which the router never does
	DropOutput    = "output"    // from the router to a sandbox, and no answer
)

var reasons = []string{
	DropLocal, DropCast, DropFragment, DropOptions, DropExtension, DropMapped, DropLease, DropSource, DropGateway, DropClosed,
	DropProtocol, DropForward, DropOutput,
}

// chain is one base chain: its rules in order, and drop where none decides.
type chain struct {
	name     string
	hook     *nftables.ChainHook
	priority nftables.ChainPriority
	rules    [][]expr.Any
}

// chains are the whole table. The guard comes before the kernel puts fragments together, so that nobody
// adds a part to another's packet. It lets through what it found in the sets; what it cannot read, it drops.
func chains() []chain {
	return []chain{
		{"guard", nftables.ChainHookPrerouting, -450, guard()},
		{"doors", nftables.ChainHookPrerouting, -150, doors()},
		{"forward", nftables.ChainHookForward, 0, [][]expr.Any{drop(DropForward)}},
		{"answers", nftables.ChainHookOutput, 0, answers()},
	}
}

// mapped is how such an address begins: a program would be told the IPv4 one.
var mapped = []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}

func guard() [][]expr.Any {
	return [][]expr.Any{
		rule(metaIs(expr.MetaKeyIIFNAME, name("lo")), drop(DropLocal)),
		rule(load(expr.MetaKeyPKTTYPE), isNot([]byte{unix.PACKET_HOST}), drop(DropCast)),
		rule(proto(unix.NFPROTO_IPV4), bits(6, []byte{0xbf, 0xff}), isNot([]byte{0, 0}), drop(DropFragment)),
		rule(proto(unix.NFPROTO_IPV4), header(0, 1), isNot([]byte{0x45}), drop(DropOptions)),
		rule(proto(unix.NFPROTO_IPV6), header(6, 1), isNot([]byte{unix.IPPROTO_TCP}), isNot([]byte{unix.IPPROTO_UDP}),
			isNot([]byte{unix.IPPROTO_ICMPV6}), drop(DropExtension)),
		rule(proto(unix.NFPROTO_IPV6), header(24, 12), is(mapped), drop(DropMapped)),
		rule(proto(unix.NFPROTO_IPV4), bound(4), leased(), verdict(expr.VerdictAccept)),
		rule(proto(unix.NFPROTO_IPV6), bound(6), leased(), verdict(expr.VerdictAccept)),
		rule(proto(unix.NFPROTO_IPV4), bound(4), drop(DropLease)),
		rule(proto(unix.NFPROTO_IPV6), bound(6), drop(DropLease)),
		drop(DropSource),
	}
}

func doors() [][]expr.Any {
	var all [][]expr.Any
	for _, gateway := range []netip.Addr{Gateway4, Gateway6} {
		for _, door := range []struct {
			protocol byte
			port     uint16
		}{
			{unix.IPPROTO_UDP, DNSPort}, {unix.IPPROTO_TCP, DNSPort},
			{unix.IPPROTO_TCP, ConnectPort}, {unix.IPPROTO_TCP, SocksPort},
		} {
			all = append(all, rule(to(gateway), l4(door.protocol), port(2, door.port), verdict(expr.VerdictAccept)))
		}
		all = append(all, rule(to(gateway), drop(DropGateway)))
		all = append(all, rule(proto(family(gateway)), l4(unix.IPPROTO_TCP), transparent(gateway), verdict(expr.VerdictAccept)))
	}
	return append(all, rule(l4(unix.IPPROTO_TCP), drop(DropClosed)), drop(DropProtocol))
}

// answers lets the router answer and never ask.
func answers() [][]expr.Any {
	synAck := []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{0x12}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0x02}},
	}
	return [][]expr.Any{
		rule(leased(), l4(unix.IPPROTO_TCP), synAck, verdict(expr.VerdictAccept)),
		rule(leased(), from(Gateway4), l4(unix.IPPROTO_UDP), port(0, DNSPort), verdict(expr.VerdictAccept)),
		rule(leased(), from(Gateway6), l4(unix.IPPROTO_UDP), port(0, DNSPort), verdict(expr.VerdictAccept)),
		drop(DropOutput),
	}
}

func rule(parts ...[]expr.Any) []expr.Any {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func load(key expr.MetaKey) []expr.Any { return []expr.Any{&expr.Meta{Key: key, Register: 1}} }

func is(data []byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data}}
}

func isNot(data []byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: data}}
}

func metaIs(key expr.MetaKey, data []byte) []expr.Any { return rule(load(key), is(data)) }

func proto(family byte) []expr.Any { return metaIs(expr.MetaKeyNFPROTO, []byte{family}) }

func l4(protocol byte) []expr.Any { return metaIs(expr.MetaKeyL4PROTO, []byte{protocol}) }

// header loads a part of the IP header.
func header(offset, n uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: n}}
}

func bits(offset uint32, mask []byte) []expr.Any {
	n := uint32(len(mask))
	return rule(header(offset, n),
		[]expr.Any{&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: n, Mask: mask, Xor: make([]byte, n)}})
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

func from(a netip.Addr) []expr.Any { return address(a, 12, 8) }
func to(a netip.Addr) []expr.Any   { return address(a, 16, 24) }

func address(a netip.Addr, offset4, offset6 uint32) []expr.Any {
	offset := offset6
	if a.Is4() {
		offset = offset4
	}
	return rule(proto(family(a)), header(offset, uint32(a.BitLen()/8)), is(a.AsSlice()))
}

// port compares a port of the transport header: the source at 0, the destination at 2.
func port(offset uint32, n uint16) []expr.Any {
	return rule([]expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2}},
		is(binaryutil.BigEndian.PutUint16(n)))
}

// transparent hands a packet to the transparent door, and does not decide where that is not open.
func transparent(gateway netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: gateway.AsSlice()},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(TransparentPort)},
		&expr.TProxy{Family: family(gateway), TableFamily: unix.NFPROTO_INET, RegAddr: 1, RegPort: 2},
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
	}
}

// bound holds for the source of a bound link: end, hardware address and address as one key.
func bound(version int) []expr.Any {
	offset, n, set := uint32(12), uint32(4), setBound4
	if version == 6 {
		offset, n, set = 8, 16, setBound6
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: unix.NFT_REG32_00},
		&expr.Payload{DestRegister: unix.NFT_REG32_00 + 4, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6},
		&expr.Payload{DestRegister: unix.NFT_REG32_00 + 6, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: n},
		&expr.Lookup{SourceRegister: unix.NFT_REG32_00, SetName: set.name, SetID: set.id},
	}
}

func leased() []expr.Any {
	return rule(load(expr.MetaKeyNFPROTO),
		[]expr.Any{&expr.Lookup{SourceRegister: 1, SetName: setLease.name, SetID: setLease.id}})
}

func verdict(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

func drop(reason string) []expr.Any {
	return rule([]expr.Any{&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: reason}}, verdict(expr.VerdictDrop))
}

// name is an interface's name as the kernel compares it.
func name(of string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, of)
	return b
}

// edition tells tables of different rules apart.
var edition = sync.OnceValue(func() string {
	h := sha256.New()
	for _, c := range chains() {
		fmt.Fprintf(h, "%s %d %d\n", c.name, *c.hook, c.priority)
		for _, r := range c.rules {
			for _, e := range r {
				fmt.Fprintf(h, "%T%+v;", e, e)
			}
			fmt.Fprintln(h)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
})
