// Package testport reserves TCP ports for tests that name a port before a server
// listens on it, or start the server again. It guarantees that a reserved port
// stays free for its test: it is none that the kernel gives to outgoing
// connections, and no other test process reserves it until the test ends.
package testport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

const lowest = 12000 // below it are the ports of known services

// Reserve returns n ports of 127.0.0.1, all different.
func Reserve(t testing.TB, n int) (ports []int) {
	t.Helper()
	dir := filepath.Join(os.TempDir(), "berth-test-ports")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	end := ephemeral()
	for range 1000 {
		if len(ports) == n {
			return ports
		}
		port := lowest + rand.IntN(end-lowest)
		lock, err := os.OpenFile(filepath.Join(dir, fmt.Sprint(port)), os.O_RDWR|os.O_CREATE, 0o666)
		if err != nil {
			t.Fatal(err)
		}
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil || !free(port) {
			_ = lock.Close()
			continue
		}
		t.Cleanup(func() { _ = lock.Close() })
		ports = append(ports, port)
	}
	t.Fatalf("%d of %d ports are free", len(ports), n)
	return nil
}

// Addr reserves one port and returns its address.
func Addr(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", Reserve(t, 1)[0])
}

// ephemeral is the first port that the kernel gives to outgoing connections.
func ephemeral() int {
	raw, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	var first int
	if _, serr := fmt.Sscan(string(raw), &first); err != nil || serr != nil || first < lowest+1000 {
		return 32768
	}
	return first
}

func free(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return false
	}
	return l.Close() == nil
}
