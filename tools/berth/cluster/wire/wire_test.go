package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// rig is a switch with the ports a and b, each in a namespace of its own, and root.
type rig struct {
	*Switch
	ns map[string]*Namespace
}

var rigAddrs = map[string]string{"a": "10.78.91.2/24", "b": "10.78.91.3/24"}

func newRig(t testing.TB) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("not root: network namespaces cannot be made")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skipf("no TUN devices here: %v", err)
	}
	r := &rig{NewSwitch(1), map[string]*Namespace{}}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		for _, n := range r.ns {
			n.Close()
		}
	})
	for name, at := range rigAddrs {
		n, err := NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		r.ns[name] = n
		if err := r.Join(name, n, "berth0", netip.MustParsePrefix(at)); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// udp is a socket in a namespace.
func (r *rig) udp(t testing.TB, in string) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	err := r.ns[in].Do(func() (err error) {
		c, err = net.ListenUDP("udp4", &net.UDPAddr{IP: netip.MustParsePrefix(rigAddrs[in]).Addr().AsSlice(), Port: 4000})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// tcp is a connection from a to b.
func (r *rig) tcp(t testing.TB) (a, b net.Conn) {
	t.Helper()
	var l net.Listener
	err := r.ns["b"].Do(func() (err error) {
		l, err = net.Listen("tcp4", "10.78.91.3:5000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = r.ns["a"].Do(func() (err error) {
		a, err = (&net.Dialer{Timeout: 5 * time.Second}).Dial("tcp4", "10.78.91.3:5000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// say sends words from one to the other and returns what arrives: as many as are wanted, however long
// a busy machine takes, and what comes soon after.
func (r *rig) say(t *testing.T, from, to *net.UDPConn, wanted int, words ...string) string {
	t.Helper()
	at := to.LocalAddr().(*net.UDPAddr).AddrPort()
	for _, w := range words {
		if _, err := from.WriteToUDPAddrPort([]byte(w), at); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	buf := make([]byte, 1<<16)
	for {
		patience := 300 * time.Millisecond
		if len(got) < wanted {
			patience = 10 * time.Second
		}
		_ = to.SetReadDeadline(time.Now().Add(patience))
		n, err := to.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return strings.Join(got, " ")
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(buf[:n]))
	}
}

// A cut of one direction must leave the other one, and healing must bring it back.
func TestCutIsOneWayAndHeals(t *testing.T) {
	r := newRig(t)
	a, b := r.udp(t, "a"), r.udp(t, "b")
	for _, step := range []struct {
		rule     Rule
		to, back string
	}{
		{Rule{}, "1 2 3", "1 2 3"},
		{Rule{Cut: true}, "", "1 2 3"},
		{Rule{Loss: 100}, "", "1 2 3"},
		{Rule{Duplicate: 100}, "1 1 2 2 3 3", "1 2 3"},
		{Rule{Delay: 20 * time.Millisecond}, "1 2 3", "1 2 3"},
		{Rule{}, "1 2 3", "1 2 3"},
	} {
		if err := r.Set("a", "b", step.rule); err != nil {
			t.Fatal(err)
		}
		if got := r.Rule("a", "b"); got != step.rule {
			t.Errorf("the rule is %+v, want %+v", got, step.rule)
		}
		if got := r.say(t, a, b, len(strings.Fields(step.to)), "1", "2", "3"); got != step.to {
			t.Errorf("%+v: b heard %q, want %q", step.rule, got, step.to)
		}
		if got := r.say(t, b, a, len(strings.Fields(step.back)), "1", "2", "3"); got != step.back {
			t.Errorf("%+v: a heard %q, want %q", step.rule, got, step.back)
		}
	}
}

// Packets that are reordered arrive all the same, in another order.
func TestReorderLosesNothing(t *testing.T) {
	r := newRig(t)
	a, b := r.udp(t, "a"), r.udp(t, "b")
	if err := r.Set("a", "b", Rule{Reorder: 40}); err != nil {
		t.Fatal(err)
	}
	words := strings.Fields("a b c d e f g h i j k l m n o p q r s t")
	got := r.say(t, a, b, len(words), words...)
	if len(strings.Fields(got)) != len(words) {
		t.Errorf("of %v came %v", words, got)
	}
	if got == strings.Join(words, " ") {
		t.Errorf("nothing was reordered: %v", got)
	}
}

// A connection must live through losses, and bytes must arrive whole.
func TestBytesArriveWholeOverABadLink(t *testing.T) {
	r := newRig(t)
	a, b := r.tcp(t)
	for _, to := range [][2]string{{"a", "b"}, {"b", "a"}} {
		if err := r.Set(to[0], to[1], Rule{Loss: 2, Duplicate: 5, Reorder: 5, Jitter: time.Millisecond}); err != nil {
			t.Fatal(err)
		}
	}
	want := make([]byte, 4<<20)
	for i := range want {
		want[i] = byte(i * i >> 7)
	}
	go func() { _, _ = a.Write(want) }()
	got := make([]byte, len(want))
	_ = b.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("what arrived is not what was sent: %v", err)
	}
}

// A member that is taken over must not speak as another one.
func TestASourceAddressOfAnotherIsRefused(t *testing.T) {
	r := newRig(t)
	b := r.udp(t, "b")
	send := func(src [4]byte) {
		err := r.ns["a"].Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Sendto(fd, packet(src, [4]byte{10, 78, 91, 3}, "forged"), 0, &unix.SockaddrInet4{Addr: [4]byte{10, 78, 91, 3}})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	send([4]byte{10, 78, 91, 2})
	if got := r.say(t, b, b, 1); got != "forged" {
		t.Fatalf("with its own address b heard %q", got)
	}
	send([4]byte{10, 78, 91, 1})
	if got := r.say(t, b, b, 0); got != "" {
		t.Errorf("with another's address b heard %q", got)
	}
	if r.Counts("a").Refused != 1 {
		t.Errorf("the counts are %+v", r.Counts("a"))
	}
}

// packet is a UDP packet to port 4000; the kernel fills the header's sum in.
func packet(src, dst [4]byte, text string) []byte {
	p := make([]byte, 28, 28+len(text))
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(p[2:], uint16(28+len(text)))
	copy(p[12:], src[:])
	copy(p[16:], dst[:])
	binary.BigEndian.PutUint16(p[20:], 4001)
	binary.BigEndian.PutUint16(p[22:], 4000)
	binary.BigEndian.PutUint16(p[24:], uint16(8+len(text)))
	return append(p, text...)
}

// What is left of a switch would be found by the next one: devices go with it, and no namespace has a name.
func TestNothingIsLeft(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root: network namespaces cannot be made")
	}
	own, err := Own()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	names := func() string {
		d, _ := os.ReadDir("/run/netns")
		return strings.Join(dirNames(d), " ")
	}
	before := names()
	s := NewSwitch(1)
	if err := s.Join("root", own, "berth-wire", netip.MustParsePrefix("10.78.92.1/24")); err != nil {
		t.Fatal(err)
	}
	if _, err := net.InterfaceByName("berth-wire"); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := net.InterfaceByName("berth-wire"); err == nil {
		t.Error("the device is left")
	}
	if after := names(); after != before {
		t.Errorf("named namespaces were %q and are %q", before, after)
	}
}

func dirNames(d []os.DirEntry) (out []string) {
	for _, e := range d {
		out = append(out, e.Name())
	}
	return out
}

// BenchmarkTCP reports what one connection carries through the switch.
func BenchmarkTCP(b *testing.B) {
	r := newRig(b)
	from, to := r.tcp(b)
	const chunk = 1 << 20
	b.SetBytes(chunk)
	go func() {
		buf := make([]byte, chunk)
		for range b.N {
			if _, err := from.Write(buf); err != nil {
				return
			}
		}
	}()
	if _, err := io.CopyN(io.Discard, to, int64(b.N)*chunk); err != nil {
		b.Fatal(err)
	}
}
