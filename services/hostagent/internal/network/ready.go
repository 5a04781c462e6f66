package network

import (
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The kernel does some things a moment after it said that they are done. Until then it drops packets, and the
// first one of a session would come again only a second later; so Plug and Open wait.

// readyWithin bounds such a wait, which is a matter of less than a millisecond on an idle host. What took
// longer goes on, and a packet is lost.
const readyWithin = time.Second

// ready asks until done says so, or time is up.
func ready(done func() (bool, error)) error {
	for end := time.Now().Add(readyWithin); ; time.Sleep(200 * time.Microsecond) {
		if ok, err := done(); ok || err != nil || time.Now().After(end) {
			return err
		}
	}
}

// up waits until an interface sends: that the other end is there is noticed late.
func up(h *netlink.Handle, name string) error {
	return ready(func() (bool, error) {
		l, err := h.LinkByName(name)
		return err == nil && l.Attrs().OperState == netlink.OperUp, err
	})
}

// local waits until packets to an IPv6 address are taken: its route is made after the address.
func local(h *netlink.Handle, a netip.Addr) error {
	return ready(func() (bool, error) {
		routes, err := h.RouteGet(a.AsSlice())
		return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL, nil
	})
}
