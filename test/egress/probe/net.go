//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// short is for what is dropped without an answer.
const short = 2 * time.Second

// dial connects, and says whether the other side said something.
func dial(a args) (Outcome, error) {
	c, err := (&net.Dialer{Timeout: short}).Dial("tcp"+a["family"], a["addr"])
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(short))
	if _, err := io.WriteString(c, a.or("say", "hello\n")); err != nil {
		return Outcome{}, err
	}
	buf := make([]byte, 256)
	n, err := c.Read(buf)
	return Outcome{Body: string(buf[:n])}, err
}

// udp sends a datagram and waits for one.
func udp(a args) (Outcome, error) {
	c, err := net.Dial("udp", a["addr"])
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(short))
	if _, err := io.WriteString(c, a.or("say", "hello")); err != nil {
		return Outcome{}, err
	}
	buf := make([]byte, 1500)
	n, err := c.Read(buf)
	return Outcome{Body: string(buf[:n])}, err
}

// lookup asks as programs do.
func lookup(a args) (Outcome, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip"+a["family"], a["name"])
	var out []string
	for _, f := range found {
		out = append(out, f.String())
	}
	return Outcome{Body: strings.Join(out, " ")}, err
}

// query asks a server for a name by hand, over udp or tcp.
func query(a args) (Outcome, error) {
	name, err := dnsmessage.NewName(strings.TrimSuffix(a["name"], ".") + ".")
	if err != nil {
		return Outcome{}, err
	}
	kind, _ := strconv.Atoi(a.or("type", "1"))
	m := dnsmessage.Message{Header: dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: name, Type: dnsmessage.Type(kind), Class: dnsmessage.ClassINET}}}
	raw, err := m.Pack()
	if err != nil {
		return Outcome{}, err
	}
	network := a.or("network", "udp")
	c, err := (&net.Dialer{Timeout: short}).Dial(network, a["server"])
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(short))
	if network == "tcp" {
		raw = append(binary.BigEndian.AppendUint16(nil, uint16(len(raw))), raw...)
	}
	if _, err := c.Write(raw); err != nil {
		return Outcome{}, err
	}
	buf := make([]byte, 64<<10)
	n, err := c.Read(buf)
	if err != nil {
		return Outcome{}, err
	}
	buf = buf[:n]
	if network == "tcp" && n > 2 {
		buf = buf[2:]
	}
	var got dnsmessage.Message
	if err := got.Unpack(buf); err != nil {
		return Outcome{}, err
	}
	var out []string
	for _, r := range got.Answers {
		switch b := r.Body.(type) {
		case *dnsmessage.AResource:
			out = append(out, net.IP(b.A[:]).String())
		case *dnsmessage.AAAAResource:
			out = append(out, net.IP(b.AAAA[:]).String())
		default:
			out = append(out, r.Header.Type.String())
		}
	}
	return Outcome{Status: int(got.RCode), Body: strings.Join(out, " ")}, nil
}

// ping sends an ICMP echo by a datagram socket, as an unprivileged ping does.
func ping(a args) (Outcome, error) {
	ip := net.ParseIP(a["addr"])
	family, proto, kind := unix.AF_INET, unix.IPPROTO_ICMP, byte(8)
	var to unix.Sockaddr
	if v4 := ip.To4(); v4 != nil {
		to = &unix.SockaddrInet4{Addr: [4]byte(v4)}
	} else {
		family, proto, kind = unix.AF_INET6, unix.IPPROTO_ICMPV6, 128
		to = &unix.SockaddrInet6{Addr: [16]byte(ip.To16())}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return Outcome{}, fmt.Errorf("socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2})
	if err := unix.Sendto(fd, []byte{kind, 0, 0xf7, 0xff, 0, 0, 0, 0}, 0, to); err != nil {
		return Outcome{}, fmt.Errorf("send: %w", err)
	}
	n, _, err := unix.Recvfrom(fd, make([]byte, 1500), 0)
	return Outcome{Body: strconv.Itoa(n)}, err
}

// socket only opens one: family, type and protocol as numbers.
func socket(a args) (Outcome, error) {
	f, _ := strconv.Atoi(a["domain"])
	k, _ := strconv.Atoi(a["type"])
	p, _ := strconv.Atoi(a["protocol"])
	fd, err := unix.Socket(f, k|unix.SOCK_CLOEXEC, p)
	if err != nil {
		return Outcome{}, err
	}
	return Outcome{Body: "open"}, unix.Close(fd)
}

func unixDial(a args) (Outcome, error) {
	c, err := net.DialTimeout("unix", a["path"], short)
	if err != nil {
		return Outcome{}, err
	}
	return Outcome{Body: "connected"}, c.Close()
}

// spoof sends a datagram from an address that is not the sandbox's.
func spoof(a args) (Outcome, error) {
	d := &net.Dialer{Timeout: short, LocalAddr: &net.UDPAddr{IP: net.ParseIP(a["from"])}}
	c, err := d.Dial("udp", a["addr"])
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	_, err = io.WriteString(c, "spoofed")
	return Outcome{Body: "sent"}, err
}

// relay forwards connections to a port of the loopback interface, for a second, and fetches through it.
func relay(a args) (Outcome, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = l.Close() }()
	go func() {
		in, err := l.Accept()
		if err != nil {
			return
		}
		out, err := reach(a)
		if err != nil {
			_ = in.Close()
			return
		}
		go func() { _, _ = io.Copy(out, in) }()
		_, _ = io.Copy(in, out)
		_ = in.Close()
	}()
	b := args{}
	for k, v := range a {
		b[k] = v
	}
	b["addr"], b["via"], b["family"] = l.Addr().String(), "", "4"
	return fetch(b)
}

func read(a args) (Outcome, error) {
	b, err := os.ReadFile(a["path"])
	if errors.Is(err, os.ErrNotExist) {
		return Outcome{}, errors.New("not there")
	}
	return Outcome{Body: string(b)}, err
}

// addresses prints those of this sandbox, a line each.
func addresses() {
	all, _ := net.InterfaceAddrs()
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() {
			fmt.Println(n.IP)
		}
	}
}
