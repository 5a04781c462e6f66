// Package wire is a network of network namespaces on one machine whose links tests can cut, delay,
// lose, duplicate and reorder: one TUN device in each namespace, and an IPv4 switch in this process
// between them. It guarantees that a packet goes only to the namespace that has its destination
// address, and only with the source address of the namespace that it came from; that what happens to
// the n-th packet of a link follows from the seed and the link's rule alone; and that devices and
// namespaces are gone when this process is and nothing runs in them: no name is left in /run/netns.
//
// Ordering: packets of a link stay in order unless its rule reorders. Backpressure: a link that
// delays keeps at most maxQueued bytes and drops what comes beyond, as a real one would.
package wire

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is one network namespace and a thread that is in it. What runs on that thread is in the
// namespace, and so is every process that it starts; such a process may be told to die with its
// parent, because the thread lives until Close.
type Namespace struct {
	work  chan func()
	once  sync.Once
	fd    *os.File // keeps the namespace; nil for this process's own
	inode uint64
}

// NewNamespace makes a namespace with a loopback device that is up, and without IPv6.
func NewNamespace() (*Namespace, error) { return begin(enter) }

// Own is this process's own namespace, with a thread of its own.
func Own() (*Namespace, error) { return begin(func(*Namespace) error { return nil }) }

func begin(prepare func(*Namespace) error) (*Namespace, error) {
	n := &Namespace{work: make(chan func())}
	ready := make(chan error)
	go n.serve(prepare, ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	return n, nil
}

// serve runs work on one thread, which ends with it: no other goroutine gets a thread that is in
// another namespace. The main thread cannot end and stands for the whole process in /proc, so another
// one is taken while it is kept busy.
func (n *Namespace) serve(prepare func(*Namespace) error, ready chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		passed := make(chan error)
		go n.serve(prepare, passed)
		err := <-passed
		runtime.UnlockOSThread()
		ready <- err
		return
	}
	err := prepare(n)
	if err == nil {
		var st unix.Stat_t
		err = unix.Stat("/proc/thread-self/ns/net", &st)
		n.inode = st.Ino
	}
	ready <- err
	if err != nil {
		return
	}
	for f := range n.work {
		f()
	}
}

// enter moves the thread into a new namespace and makes that fit for use.
func enter(n *Namespace) (err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	for _, of := range []string{"all", "default"} {
		if err := noIPv6(of); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	if n.fd, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return fmt.Errorf("keep the network namespace: %w", err)
	}
	return nil
}

// noIPv6 turns IPv6 off for a device of the thread's namespace; a kernel without it is fine.
func noIPv6(device string) error {
	err := os.WriteFile("/proc/sys/net/ipv6/conf/"+device+"/disable_ipv6", []byte("1"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("turn IPv6 off: %w", err)
	}
	return nil
}

// Do runs f on the namespace's thread, one at a time, and returns when it did. It must not be called
// after Close.
func (n *Namespace) Do(f func() error) error {
	done := make(chan error, 1)
	n.work <- func() { done <- f() }
	return <-done
}

// Inode is the number of the namespace, as in the link /proc/PID/ns/net.
func (n *Namespace) Inode() uint64 { return n.inode }

// Close ends the thread, and with it every child that was told to die with its parent. The namespace
// goes when no process is left in it.
func (n *Namespace) Close() {
	n.once.Do(func() {
		close(n.work)
		if n.fd != nil {
			n.fd.Close()
		}
	})
}

// device makes a TUN device with an address in the namespace; it goes when the file is closed.
func (n *Namespace) device(name string, at netip.Prefix) (f *os.File, err error) {
	err = n.Do(func() error {
		if f, err = openTUN(name); err != nil {
			return err
		}
		if err := n.raise(name, at); err != nil {
			f.Close()
			return err
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("make the network device %s: %w", name, err)
	}
	return f, nil
}

func (n *Namespace) raise(name string, at netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(at.String())
	if err != nil {
		return err
	}
	if err := noIPv6(name); err != nil {
		return err
	}
	return errors.Join(
		netlink.LinkSetMTU(link, MTU), netlink.LinkSetTxQLen(link, queueLen),
		netlink.AddrAdd(link, addr), netlink.LinkSetUp(link))
}
