package vm

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// routes is a socket of rtnetlink. What it asks for is done when a call returns nil, and fine if it was so before.
type routes struct {
	fd  int
	seq uint32
}

// message is one request while it grows.
type message []byte

// attr adds an attribute, with what fills it up to four bytes.
func (m message) attr(kind uint16, data []byte) message {
	m = binary.NativeEndian.AppendUint16(m, uint16(unix.SizeofRtAttr+len(data)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = append(m, data...)
	for len(m)%unix.NLMSG_ALIGNTO != 0 {
		m = append(m, 0)
	}
	return m
}

func number(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

func familyOf(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// link brings a device up, after it has got what is given of a hardware address and a size of packets.
func (c *routes) link(device int, mac net.HardwareAddr, mtu int) error {
	m := message{unix.AF_UNSPEC, 0, 0, 0}
	m = append(m, number(uint32(device))...)
	m = append(m, number(unix.IFF_UP)...)
	m = append(m, number(unix.IFF_UP)...) // the flags that are meant
	if mac != nil {
		m = m.attr(unix.IFLA_ADDRESS, mac)
	}
	if mtu > 0 {
		m = m.attr(unix.IFLA_MTU, number(uint32(mtu)))
	}
	return c.ask(unix.RTM_SETLINK, 0, m)
}

// address adds one, and does not ask whether anybody else has it.
func (c *routes) address(device int, p netip.Prefix) error {
	m := message{familyOf(p.Addr()), byte(p.Bits()), unix.IFA_F_PERMANENT, unix.RT_SCOPE_UNIVERSE}
	if p.Addr().Is6() {
		m[2] |= unix.IFA_F_NODAD
	}
	m = append(m, number(uint32(device))...)
	a := p.Addr().AsSlice()
	return c.ask(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, m.attr(unix.IFA_LOCAL, a).attr(unix.IFA_ADDRESS, a))
}

// neighbour says for good what hardware address one has.
func (c *routes) neighbour(device int, a netip.Addr, mac net.HardwareAddr) error {
	m := message{familyOf(a), 0, 0, 0}
	m = append(m, number(uint32(device))...)
	m = binary.NativeEndian.AppendUint16(m, unix.NUD_PERMANENT)
	m = append(m, 0, 0)
	return c.ask(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, m.attr(unix.NDA_DST, a.AsSlice()).attr(unix.NDA_LLADDR, mac))
}

// route adds the default route by a gateway that need not be in the network of any address.
func (c *routes) route(device int, gateway netip.Addr) error {
	m := message{familyOf(gateway), 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST}
	m = append(m, number(unix.RTNH_F_ONLINK)...)
	return c.ask(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE,
		m.attr(unix.RTA_GATEWAY, gateway.AsSlice()).attr(unix.RTA_OIF, number(uint32(device))))
}

// ask sends one request and waits for what the kernel says to it.
func (c *routes) ask(kind, flags uint16, body message) error {
	c.seq++
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	m = append(append(append(m, number(c.seq)...), number(0)...), body...)
	if err := unix.Sendto(c.fd, m, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	b := make([]byte, 4096)
	for {
		n, _, err := unix.Recvfrom(c.fd, b, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if ok, said := answer(b[:n], c.seq); ok {
			return said
		}
	}
}

// answer reads what the kernel said to a request; ok if it is that.
func answer(b []byte, seq uint32) (ok bool, err error) {
	if len(b) < unix.NLMSG_HDRLEN+4 || binary.NativeEndian.Uint16(b[4:]) != unix.NLMSG_ERROR || binary.NativeEndian.Uint32(b[8:]) != seq {
		return false, nil
	}
	if code := int32(binary.NativeEndian.Uint32(b[unix.NLMSG_HDRLEN:])); code != 0 {
		return true, unix.Errno(-code)
	}
	return true, nil
}
