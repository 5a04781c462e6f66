//go:build linux

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// nets try to reach something that is not in the sandbox.
var nets = map[string]attempt{
	"dial":       dial,
	"dial-all":   dialAll,
	"listen":     func(a []string) (string, error) { return listenForever(a) },
	"abstract":   abstract,
	"vsock":      vsock,
	"packet":     packet,
	"raw-icmp":   rawICMP,
	"udp":        udp,
	"add-route":  addAddress,
	"interfaces": interfaces,
	"resolve":    func(a []string) (string, error) { got, err := net.LookupHost(a[0]); return strings.Join(got, " "), err },
	"tun":        func([]string) (string, error) { return readOpen("/dev/net/tun") },
}

const patience = time.Second

// dial reaches something if that speaks, or waits to be spoken to. The gate of the sandbox's host takes every
// connection to say no by resetting it: that is nobody.
func dial(a []string) (string, error) {
	c, err := net.DialTimeout(a[0], a[1], patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 64)
	n, err := c.Read(b)
	if n == 0 && errors.Is(err, syscall.ECONNRESET) {
		return "", fmt.Errorf("taken and reset: %w", err)
	}
	return fmt.Sprintf("connected; it says %q", b[:n]), nil
}

// dialAll tries a port at every address that the sandbox might guess for its host.
func dialAll(a []string) (string, error) {
	var last error
	hosts := append([]string{"127.0.0.1", "::1", "10.0.2.2", "172.17.0.1", "192.168.0.1", "169.254.1.1"}, a[1:]...)
	for _, host := range hosts {
		got, err := dial([]string{"tcp", net.JoinHostPort(host, a[0])})
		if err == nil {
			return host + ": " + got, nil
		}
		last = err
	}
	return "", last
}

// listenForever listens on a port and an abstract socket, and says its mark to whoever comes.
func listenForever(a []string) (string, error) {
	tcp, err := net.Listen("tcp", ":"+a[0])
	if err != nil {
		return "", err
	}
	local, err := net.Listen("unix", "@berth-hostile")
	if err != nil {
		return "", err
	}
	for _, l := range []net.Listener{tcp, local} {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = c.Write([]byte(a[1]))
				_ = c.Close()
			}
		}()
	}
	select {}
}

func abstract([]string) (string, error) { return dial([]string{"unix", "@berth-hostile"}) }

func vsock([]string) (string, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	_ = unix.SetsockoptTimeval(fd, unix.AF_VSOCK, 6, &unix.Timeval{Sec: 1})
	for _, cid := range []uint32{0, 1, 2} {
		for _, port := range []uint32{22, 1024, 4222, 5001, 5002} {
			if err = unix.Connect(fd, &unix.SockaddrVM{CID: cid, Port: port}); err == nil {
				return fmt.Sprintf("connected to %d:%d", cid, port), nil
			}
		}
	}
	return "", err
}

// packet listens to everything on the wire for a moment; loopback alone is its own.
func packet([]string) (string, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0x0300)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 500_000})
	b := make([]byte, 2048)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		n, from, err := unix.Recvfrom(fd, b, 0)
		if err != nil {
			continue
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING && ll.Hatype != unix.ARPHRD_LOOPBACK {
			return fmt.Sprintf("%d bytes of somebody else", n), nil
		}
	}
	return "", errors.New("nothing of anybody was heard")
}

func rawICMP(a []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	to := &unix.SockaddrInet4{}
	copy(to.Addr[:], net.ParseIP(a[0]).To4())
	if err := unix.Sendto(fd, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}, 0, to); err != nil {
		return "", err
	}
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1})
	n, _, err := unix.Recvfrom(fd, make([]byte, 256), 0)
	if err != nil {
		return "", fmt.Errorf("no answer: %w", err)
	}
	return fmt.Sprintf("%d bytes came back", n), nil
}

func udp(a []string) (string, error) {
	c, err := net.DialTimeout("udp", a[0], patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := c.Write([]byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x04test\x00\x00\x01\x00\x01")); err != nil {
		return "", err
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	n, err := c.Read(make([]byte, 512))
	return fmt.Sprintf("%d bytes came back", n), err
}

// addAddress gives the loopback interface an address of the neighbourhood and tries to leave by it.
func addAddress(a []string) (string, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	// RTM_NEWROUTE of 0.0.0.0/0 by device 1.
	msg := []byte{36, 0, 0, 0, 24, 0, 5, 6, 1, 0, 0, 0, 0, 0, 0, 0, unix.AF_INET, 0, 0, 0, 254, 3, 253, 1, 0, 0, 0, 0, 8, 0, 4, 0, 1, 0, 0, 0}
	if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return "", err
	}
	b := make([]byte, 256)
	if n, _, err := unix.Recvfrom(fd, b, 0); err != nil || n < 20 || b[16]|b[17]|b[18]|b[19] != 0 {
		return "", errors.New("the route was refused")
	}
	return dial([]string{"tcp", a[0]})
}

// links are the addresses of sandboxes' links, which lead to the gate of the host and nowhere else.
var links = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("fd62:6572:7468:1::/64")}

// ofLink reports whether an address is one of the sandbox's own link.
func ofLink(a net.Addr) bool {
	p, err := netip.ParsePrefix(a.String())
	return err == nil && p.IsSingleIP() && slices.ContainsFunc(links, func(l netip.Prefix) bool { return l.Contains(p.Addr()) })
}

// interfaces other than loopback and the link to the gate that are up and have an address.
func interfaces([]string) (string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return "", err
	}
	var hits []string
	for _, i := range all {
		addrs, _ := i.Addrs()
		addrs = slices.DeleteFunc(addrs, func(a net.Addr) bool { return i.Name == "eth0" && ofLink(a) })
		if i.Flags&net.FlagLoopback == 0 && i.Flags&net.FlagUp != 0 && len(addrs) > 0 {
			hits = append(hits, fmt.Sprintf("%s %v", i.Name, addrs))
		}
	}
	return found(strings.Join(hits, "; "), nil)
}

func readOpen(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	return path + " is open", f.Close()
}
