// Package netns keeps network namespaces at paths and runs code in them. It guarantees that a namespace which
// was pinned stays until Remove, also without a process in it and across a restart of the process that made
// it; that a function which was run in a namespace leaves no goroutine of the process there, whatever became
// of it; and that a socket opened with Listen or ListenPacket stays in the namespace it was opened in.
//
// A pin is a bind mount of the namespace's file, so everything in one table of mounts finds it.
package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrNotPinned says that a path is no network namespace.
var ErrNotPinned = errors.New("no network namespace is pinned there")

const own = "/proc/thread-self/ns/net"

// Pin makes a network namespace and pins it at path, where none is yet; made says whether it did. The folder
// of path must be there. A file which an earlier start of the machine left there is replaced.
func Pin(path string) (made bool, err error) {
	switch ns, err := Open(path); {
	case err == nil:
		return false, ns.Close()
	case !errors.Is(err, ErrNotPinned):
		return false, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW, 0o400)
	if err != nil {
		return false, fmt.Errorf("make the file of a network namespace: %w", err)
	}
	if err := f.Close(); err != nil {
		return false, err
	}
	err = elsewhere(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("pin the network namespace: %w", err)
		}
		return nil
	})
	if err != nil {
		_ = os.Remove(path)
		return false, err
	}
	return true, nil
}

// Open opens the namespace at path; it stays while the file is open. ErrNotPinned: there is none.
func Open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s", ErrNotPinned, filepath.Base(path))
	}
	if err != nil {
		return nil, fmt.Errorf("open a network namespace: %w", err)
	}
	if !isNetwork(int(f.Fd())) {
		f.Close()
		return nil, fmt.Errorf("%w: %s", ErrNotPinned, filepath.Base(path))
	}
	return f, nil
}

func isNetwork(fd int) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(fd, &st) != nil || st.Type != unix.NSFS_MAGIC {
		return false
	}
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	return err == nil && kind == unix.CLONE_NEWNET
}

// Remove takes the pin away, and the file. The namespace ends when nothing else holds it. What is not there
// is no error.
func Remove(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		if err != nil {
			return fmt.Errorf("unpin a network namespace: %w", err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the file of a network namespace: %w", err)
	}
	return nil
}

// Do runs f in the namespace at path and returns its error. f must not hand work to other goroutines: only
// the thread that it runs on is in the namespace.
func Do(path string, f func() error) error {
	ns, err := Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return In(ns, f)
}

// In is Do for a namespace that is open.
func In(ns *os.File, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- enter(ns, f) }()
	return <-done
}

// enter runs f in the namespace, on a thread that goes on only if it came back to where it was. Else the
// goroutine ends locked to it, which ends the thread, also if f panics or ends the goroutine.
func enter(ns *os.File, f func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() { // the first thread cannot be thrown away
		defer runtime.UnlockOSThread()
		return In(ns, f)
	}
	back, err := os.Open(own)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("keep the way back from a network namespace: %w", err)
	}
	defer back.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter a network namespace: %w", err)
	}
	err = f()
	if unix.Setns(int(back.Fd()), unix.CLONE_NEWNET) == nil {
		runtime.UnlockOSThread()
	}
	return err
}

// elsewhere runs f on a thread that ends with it.
func elsewhere(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- elsewhere(f)
			runtime.UnlockOSThread()
			return
		}
		done <- f()
	}()
	return <-done
}

// Control is what a socket is told before it is bound, as in net.ListenConfig.
type Control func(network, address string, c syscall.RawConn) error

// Listen opens a stream listener in the namespace at path. The address must be a literal one. The listener
// and what it accepts are of that namespace and are used from anywhere. It is plain TCP, never multipath.
func Listen(path, network, address string, control Control) (net.Listener, error) {
	if err := literal(network, address); err != nil {
		return nil, err
	}
	var l net.Listener
	err := Do(path, func() (err error) {
		c := config(control)
		l, err = c.Listen(context.Background(), network, address)
		return err
	})
	return l, err
}

// ListenPacket opens a packet socket in the namespace at path, as Listen.
func ListenPacket(path, network, address string, control Control) (net.PacketConn, error) {
	if err := literal(network, address); err != nil {
		return nil, err
	}
	var l net.PacketConn
	err := Do(path, func() (err error) {
		c := config(control)
		l, err = c.ListenPacket(context.Background(), network, address)
		return err
	})
	return l, err
}

func config(control Control) *net.ListenConfig {
	c := &net.ListenConfig{Control: control}
	c.SetMultipathTCP(false)
	return c
}

// literal refuses a name: looking it up would be the work of other goroutines, in another namespace.
func literal(network, address string) error {
	if strings.HasPrefix(network, "unix") {
		return nil
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	if zone := strings.IndexByte(host, '%'); zone >= 0 {
		host = host[:zone]
	}
	if host != "" && net.ParseIP(host) == nil {
		return fmt.Errorf("listen at %q: not a literal address", address)
	}
	return nil
}

// Transparent is a Control for a listener that takes connections to any address (IP_TRANSPARENT), as a rule
// with tproxy hands them to it. Their local address is the one that the client asked for.
func Transparent(network, _ string, c syscall.RawConn) error {
	level, option := unix.SOL_IP, unix.IP_TRANSPARENT
	if strings.HasSuffix(network, "6") {
		level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	var set error
	if err := c.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, 1) }); err != nil {
		return err
	}
	return os.NewSyscallError("set a socket transparent", set)
}
