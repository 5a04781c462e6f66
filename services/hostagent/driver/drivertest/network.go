package drivertest

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// interfaces: a sandbox that sees an interface of the host, or of another sandbox.
func (s *suite) interfaces(t *testing.T) {
	host, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Fields(s.pair.ka.must(t, "netifs"))
	if len(got) > 2 {
		t.Errorf("network interfaces: %v", got)
	}
	for _, i := range host {
		if i.Name != "lo" && len(i.HardwareAddr) > 0 && strings.Contains(s.pair.ka.must(t, "netaddrs"), i.HardwareAddr.String()) {
			t.Errorf("it sees the host's %s", i.Name)
		}
	}
	if s.pair.one.Disk != "" && slices.Contains(got, "docker0") {
		t.Error("it sees the host's bridge")
	}
}

// noRoute: a sandbox without any grant that reaches the network.
func (s *suite) noRoute(t *testing.T) {
	for _, to := range []string{"192.0.2.1:80", "169.254.169.254:80", "[2001:db8::1]:80"} {
		if _, err := s.pair.ka.Do("dial", "tcp", to); err == nil {
			t.Errorf("it reached %s", to)
		}
	}
}

// hostLoopback: a service that listens on the host's own address only, and is reached from a sandbox.
func (s *suite) hostLoopback(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if _, err := s.pair.ka.Do("dial", "tcp", l.Addr().String()); err == nil {
		t.Error("it reached the host's loopback address")
	}
}

// hostSockets: a socket of the host that has no path, and is reached from a sandbox by its name.
func (s *suite) hostSockets(t *testing.T) {
	name := fmt.Sprintf("@berth-suite-%d", os.Getpid())
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if _, err := s.pair.ka.Do("dial", "unix", name); err == nil {
		t.Error("it reached a socket of the host by name")
	}
}

// loopbacksApart: two sandboxes that reach each other's services.
func (s *suite) loopbacksApart(t *testing.T) {
	addr := s.pair.ka.must(t, "listen")
	if _, err := s.pair.ka.Do("dial", "tcp", addr); err != nil {
		t.Errorf("it does not reach itself: %v", err)
	}
	if _, err := s.pair.kb.Do("dial", "tcp", addr); err == nil {
		t.Error("it reached the other's loopback address")
	}
}

// netns: rules for one session's network that are set on the host's, or on another session's.
func (s *suite) netns(t *testing.T) {
	n := optional[driver.Networker](t, s.pair.d, "Networker")
	own := inode(t, "/proc/self/ns/net")
	seen := map[uint64]bool{own: true}
	for _, sb := range []driver.Sandbox{s.pair.a, s.pair.b} {
		path, err := n.Netns(ctx(t), sb.ID)
		unless(t, err)
		if err != nil {
			t.Fatal(err)
		}
		ino := inode(t, path)
		if seen[ino] {
			t.Errorf("%s is the host's or the other's", path)
		}
		seen[ino] = true
	}
	if _, err := n.Netns(ctx(t), "bnone"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("the network of nothing: %v", err)
	}
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return st.Ino
}

func number(t *testing.T, s string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 64)
	if err != nil {
		t.Fatalf("%q is no number", s)
	}
	return n
}

// grow makes a disk image a quarter larger, and returns its size.
func grow(t *testing.T, image string) uint64 {
	t.Helper()
	st, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	size := st.Size() + st.Size()/4
	size -= size % 4096
	if err := os.Truncate(image, size); err != nil {
		t.Fatal(err)
	}
	return uint64(size)
}

func isReset(err error) bool {
	return strings.Contains(err.Error(), "reset by peer") || strings.Contains(err.Error(), "closed")
}
