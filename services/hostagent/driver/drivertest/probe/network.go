//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

func init() {
	operations["netall"] = netAll
	operations["serve"] = serve
	operations["ping"] = ping
	operations["through"] = through
	operations["ask"] = ask
	attempts["raw4"] = func() error { return socket(syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_ICMP) }
	attempts["raw4any"] = func() error { return socket(syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_RAW) }
	attempts["raw6"] = func() error { return socket(syscall.AF_INET6, syscall.SOCK_RAW, syscall.IPPROTO_ICMPV6) }
	attempts["packet"] = func() error { return socket(syscall.AF_PACKET, syscall.SOCK_DGRAM, 0) }
	attempts["address"] = func() error { return ifreq(syscall.SIOCSIFADDR, inet(100, 64, 99, 99)) }
	attempts["mac"] = func() error { return ifreq(syscall.SIOCSIFHWADDR, [16]byte{1, 0, 2, 0, 0, 0, 9, 9}) }
	attempts["down"] = func() error { return ifreq(syscall.SIOCSIFFLAGS, [16]byte{}) }
	attempts["mtu"] = func() error { return ifreq(syscall.SIOCSIFMTU, [16]byte{0, 3}) }
	attempts["address6"] = func() error { return routes(syscall.RTM_NEWADDR, newAddress()) }
	attempts["interface"] = func() error { return routes(syscall.RTM_NEWLINK, newInterface("dummy")) }
	attempts["route"] = func() error { return routes(syscall.RTM_NEWROUTE, newRoute()) }
	attempts["netns"] = func() error { return syscall.Unshare(syscall.CLONE_NEWNET) }
}

func socket(family, kind, protocol int) error {
	fd, err := syscall.Socket(family, kind, protocol)
	return closed(uintptr(fd), err)
}

// netAll tells the interfaces with their addresses, and the routes of the main table.
func netAll([]string) (string, error) {
	ifs, err := net.Interfaces()
	var out []string
	for _, i := range ifs {
		state := "down"
		if i.Flags&net.FlagUp != 0 {
			state = "up"
		}
		line := fmt.Sprintf("%s %s %d %s", i.Name, state, i.MTU, i.HardwareAddr)
		addrs, aerr := i.Addrs()
		err = errors.Join(err, aerr)
		var all []string
		for _, a := range addrs {
			all = append(all, a.String())
		}
		slices.Sort(all)
		out = append(out, strings.TrimSpace(line+" "+strings.Join(all, " ")))
	}
	for _, family := range []int{syscall.AF_INET, syscall.AF_INET6} {
		rib, rerr := syscall.NetlinkRIB(syscall.RTM_GETROUTE, family)
		if rerr != nil {
			return "", errors.Join(err, rerr)
		}
		all, rerr := syscall.ParseNetlinkMessage(rib)
		err = errors.Join(err, rerr)
		for _, m := range all {
			if line := route(&m); line != "" && !slices.Contains(out, line) { // some kernels list every family
				out = append(out, line)
			}
		}
	}
	return strings.Join(out, "\n"), err
}

// route tells one of the main table that is not the loopback's own.
func route(m *syscall.NetlinkMessage) string {
	if m.Header.Type != syscall.RTM_NEWROUTE || len(m.Data) < syscall.SizeofRtMsg {
		return ""
	}
	bits, table, kind := m.Data[1], m.Data[4], m.Data[7]
	if table != syscall.RT_TABLE_MAIN || kind != syscall.RTN_UNICAST {
		return ""
	}
	attrs, err := syscall.ParseNetlinkRouteAttr(m)
	if err != nil {
		return "route " + err.Error()
	}
	to, via, device := "default", "", ""
	for _, a := range attrs {
		switch a.Attr.Type {
		case syscall.RTA_DST:
			if addr, ok := netip.AddrFromSlice(a.Value); ok && bits > 0 {
				to = netip.PrefixFrom(addr, int(bits)).String()
			}
		case syscall.RTA_GATEWAY:
			if addr, ok := netip.AddrFromSlice(a.Value); ok && !addr.IsUnspecified() {
				via = " via " + addr.String()
			}
		case syscall.RTA_OIF:
			if i, err := net.InterfaceByIndex(int(binary.NativeEndian.Uint32(a.Value))); err == nil {
				device = " dev " + i.Name
			}
		}
	}
	if device == " dev lo" {
		return ""
	}
	return "route " + to + via + device
}

// serve listens on a port of every address from now on, and answers what it is told.
func serve(a []string) (string, error) {
	l, err := net.Listen("tcp", ":"+a[0])
	if err != nil {
		return "", err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	return "", nil
}

// through sends so many MiB to one who sends all of it back, and compares.
func through(a []string) (string, error) {
	mib, _ := strconv.Atoi(a[1])
	c, err := net.DialTimeout("tcp", a[0], 5*time.Second)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(50 * time.Second))
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i * 7 >> 3)
	}
	sent := make(chan error, 1)
	go func() {
		for range mib {
			if _, err := c.Write(block); err != nil {
				sent <- err
				return
			}
		}
		sent <- c.(*net.TCPConn).CloseWrite()
	}()
	back := make([]byte, len(block))
	for n := range mib {
		if _, err := io.ReadFull(c, back); err != nil {
			return "", fmt.Errorf("after %d MiB: %w", n, err)
		}
		if !bytes.Equal(back, block) {
			return "", fmt.Errorf("MiB %d is another", n)
		}
	}
	return "", <-sent
}

// ask sends one datagram and tells the answer.
func ask(a []string) (string, error) {
	c, err := net.Dial("udp", a[0])
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write([]byte(a[1])); err != nil {
		return "", err
	}
	b := make([]byte, 2048)
	n, err := c.Read(b)
	return string(b[:max(n, 0)]), err
}

// ping sends an echo request without any right and waits for an answer.
func ping(a []string) (string, error) {
	to, err := netip.ParseAddr(a[0])
	if err != nil {
		return "", err
	}
	family, protocol, kind := syscall.AF_INET, syscall.IPPROTO_ICMP, byte(8)
	var sa syscall.Sockaddr
	if to.Is4() {
		sa = &syscall.SockaddrInet4{Addr: to.As4()}
	} else {
		family, protocol, kind = syscall.AF_INET6, syscall.IPPROTO_ICMPV6, 128
		sa = &syscall.SockaddrInet6{Addr: to.As16()}
	}
	fd, err := syscall.Socket(family, syscall.SOCK_DGRAM, protocol)
	if err != nil {
		return "", err
	}
	defer func() { _ = syscall.Close(fd) }()
	wait := syscall.NsecToTimeval(int64(500 * time.Millisecond))
	if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &wait); err != nil {
		return "", err
	}
	packet := []byte{kind, 0, 0, 0, 0, 1, 0, 1, 'b', 'e', 'r', 't', 'h', 0, 0, 0}
	if family == syscall.AF_INET { // the kernel does it for IPv6
		sum := uint32(0)
		for i := 0; i < len(packet); i += 2 {
			sum += uint32(packet[i])<<8 | uint32(packet[i+1])
		}
		binary.BigEndian.PutUint16(packet[2:], ^uint16(sum>>16+sum&0xffff))
	}
	if err := syscall.Sendto(fd, packet, 0, sa); err != nil {
		return "", err
	}
	_, _, err = syscall.Recvfrom(fd, make([]byte, 512), 0)
	return "", err
}

// ifreq asks for a change of eth0.
func ifreq(what uintptr, data [16]byte) error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(fd) }()
	r := struct {
		name [16]byte
		data [24]byte
	}{name: [16]byte{'e', 't', 'h', '0'}}
	copy(r.data[:], data[:])
	return call(syscall.SYS_IOCTL, uintptr(fd), what, uintptr(unsafe.Pointer(&r)))
}

func inet(a, b, c, d byte) [16]byte { return [16]byte{syscall.AF_INET, 0, 0, 0, a, b, c, d} }

func attr(kind uint16, data []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(data)))
	b = append(binary.NativeEndian.AppendUint16(b, kind), data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func index(name string) []byte {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return make([]byte, 4)
	}
	return binary.NativeEndian.AppendUint32(nil, uint32(i.Index))
}

func newAddress() []byte {
	ip := netip.MustParseAddr("fd62:6572:7468:1::9999").AsSlice()
	b := append([]byte{syscall.AF_INET6, 128, 0, 0}, index("eth0")...)
	return append(b, attr(syscall.IFA_ADDRESS, ip)...)
}

func newRoute() []byte {
	b := []byte{syscall.AF_INET, 32, 0, 0, syscall.RT_TABLE_MAIN, syscall.RTPROT_STATIC, syscall.RT_SCOPE_LINK, syscall.RTN_UNICAST, 0, 0, 0, 0}
	return append(append(b, attr(syscall.RTA_DST, []byte{192, 0, 2, 1})...), attr(syscall.RTA_OIF, index("eth0"))...)
}

func newInterface(kind string) []byte {
	b := append(make([]byte, 16), attr(syscall.IFLA_IFNAME, []byte("more0\x00"))...)
	return append(b, attr(18 /* IFLA_LINKINFO */, attr(1 /* IFLA_INFO_KIND */, []byte(kind)))...)
}

// routes asks for a change by rtnetlink and waits for the answer.
func routes(kind uint16, body []byte) error {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW, syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(fd) }()
	b := binary.NativeEndian.AppendUint32(nil, uint32(16+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, syscall.NLM_F_REQUEST|syscall.NLM_F_ACK|syscall.NLM_F_CREATE|syscall.NLM_F_EXCL)
	b = append(append(b, 1, 0, 0, 0, 0, 0, 0, 0), body...)
	if err := syscall.Sendto(fd, b, 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := syscall.Recvfrom(fd, answer, 0)
	if err != nil {
		return err
	}
	if n < 20 || binary.NativeEndian.Uint16(answer[4:]) != syscall.NLMSG_ERROR {
		return errors.New("no answer")
	}
	return orNil(syscall.Errno(-int32(binary.NativeEndian.Uint32(answer[16:]))))
}
