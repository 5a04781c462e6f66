package network

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/berth-dev/berth/internal/netns"
)

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes network namespaces, so it needs root")
	}
}

// newRouter makes a router that is gone after the test.
func newRouter(t testing.TB) *Router {
	t.Helper()
	needRoot(t)
	r, err := Open(t.Context(), Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Destroy(context.Background()); err != nil {
			t.Errorf("destroy the router: %v", err)
		}
	})
	return r
}

// newNamespace pins a namespace that is gone after the test.
func newNamespace(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sandbox")
	if _, err := netns.Pin(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Remove(path); err != nil {
			t.Error(err)
		}
	})
	return path
}

// sandbox is a link with a namespace it is plugged into.
type sandbox struct {
	link Link
	path string
}

func newSandbox(t testing.TB, r *Router, name string) sandbox {
	t.Helper()
	l, err := r.Make(t.Context(), name, false)
	if err != nil {
		t.Fatal(err)
	}
	s := sandbox{l, newNamespace(t)}
	if err := l.Plug(s.path); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s sandbox) witness(t testing.TB, r *Router) *witness {
	t.Helper()
	w, err := newWitness(r, s.path, s.link)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	w.patience = patience
	return w
}

// permitted is a router with open doors and one sandbox that may use them.
func permitted(t testing.TB) (*Router, sandbox, *witness) {
	t.Helper()
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	w := s.witness(t, r)
	must(t, w.open())
	must(t, r.Bind(t.Context(), s.link))
	must(t, r.Lease(time.Minute))
	return r, s, w
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// rewrite puts other chains in the place of the right ones, with the same permits.
func rewrite(t testing.TB, r *Router, other []chain) {
	t.Helper()
	must(t, r.table.transact(func(c *nftables.Conn) error { return build(c, r.table.have, other) }))
}

// dial speaks from a namespace; the connection is of that namespace.
func dial(path, network, to string) (c net.Conn, err error) {
	err = netns.Do(path, func() error {
		d := net.Dialer{Timeout: settle}
		d.SetMultipathTCP(false)
		c, err = d.Dial(network, to)
		return err
	})
	return c, err
}

// inNamespace runs f with a netlink handle of the namespace.
func inNamespace(t testing.TB, path string, f func(h *netlink.Handle) error) {
	t.Helper()
	ns, err := netns.Open(path)
	must(t, err)
	defer ns.Close()
	h, err := handle(ns)
	must(t, err)
	defer h.Close()
	must(t, f(h))
}

// rest says what of a router is still in its namespace, but for loopback.
func rest(r *Router) error {
	list, err := r.kernel.LinkList()
	if err != nil {
		return err
	}
	for _, l := range list {
		if l.Attrs().Name != "lo" {
			return fmt.Errorf("%s is left", l.Attrs().Name)
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := r.kernel.RouteList(nil, family)
		if err != nil {
			return err
		}
		for _, route := range routes {
			if route.Dst != nil && (Sandboxes4.Contains(addr(route.Dst)) && addr(route.Dst) != Gateway4 || Sandboxes6.Contains(addr(route.Dst))) {
				return fmt.Errorf("the route %s is left", route)
			}
		}
		neighbours, err := r.kernel.NeighList(0, family)
		if err != nil {
			return err
		}
		for _, n := range neighbours {
			if n.State == netlink.NUD_PERMANENT {
				return fmt.Errorf("the neighbour %s is left", n.String())
			}
		}
	}
	k, err := r.table.read()
	if err == nil && len(k.permits.bound) > 0 {
		err = fmt.Errorf("%d elements are left", len(k.permits.bound))
	}
	return err
}
