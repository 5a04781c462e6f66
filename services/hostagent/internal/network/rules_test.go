package network

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
)

func addr(n *net.IPNet) netip.Addr {
	a, _ := netip.AddrFromSlice(n.IP)
	return a.Unmap()
}

func TestNothingGetsThroughWithoutBindingOrLease(t *testing.T) {
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	w := s.witness(t, r)
	must(t, w.open())
	must(t, w.nothing(t.Context(), "with neither"))
	must(t, r.Bind(t.Context(), s.link))
	must(t, w.nothing(t.Context(), "with no lease"))
	must(t, r.Unbind(t.Context(), s.link))
	must(t, r.Lease(time.Minute))
	must(t, w.nothing(t.Context(), "with no binding"))
	must(t, r.Bind(t.Context(), s.link))
	must(t, w.talk())
	must(t, r.Unbind(t.Context(), s.link))
	must(t, w.nothing(t.Context(), "after the binding"))
	must(t, r.Bind(t.Context(), s.link))
	must(t, r.Lease(0))
	must(t, w.nothing(t.Context(), "after the lease"))
}

// TestOnlyTheDoorsGetThrough sends every frame of the list, by name, with permission: spoofed sources,
// fragments, headers in between, ICMP, QUIC, neighbours, other ports and other sandboxes among them.
func TestOnlyTheDoorsGetThrough(t *testing.T) {
	r, s, w := permitted(t)
	two := newSandbox(t, r, "two")
	must(t, r.Bind(t.Context(), two.link))
	own, err := s.link.slot()
	must(t, err)
	other, err := two.link.slot()
	must(t, err)
	for _, p := range probes(own, other) {
		t.Run(p.what, func(t *testing.T) {
			past, err := w.send(p, p.through)
			if err != nil || past != p.through {
				t.Fatalf("past the rules: %v, %v; want %v", past, err, p.through)
			}
		})
	}
}

func TestDropsTellWhy(t *testing.T) {
	r, s, w := permitted(t)
	own, err := s.link.slot()
	must(t, err)
	wants := map[string]string{
		"a neighbour's source address": DropSource, "a neighbour's hardware address": DropSource,
		"TCP to another port of the gateway": DropGateway, "QUIC": DropProtocol, "echo request to the gateway": DropGateway,
		"echo request to anywhere": DropProtocol, "IPv4 the first fragment": DropFragment, "IPv4 the last fragment": DropFragment,
		"IPv4 a source route": DropOptions, "hop-by-hop options": DropExtension, "a routing header": DropExtension,
		"a fragment header": DropExtension, "to every hardware address": DropCast, "a link-local source": DropSource,
		"a mapped address": DropMapped,
	}
	for _, p := range probes(own, own+1) {
		for what, reason := range wants {
			if !strings.HasSuffix(p.what, what) {
				continue
			}
			before, err := r.Drops()
			must(t, err)
			_, err = w.send(p, false)
			must(t, err)
			after, err := r.Drops()
			must(t, err)
			// The sandbox's kernel sends multicast of its own whenever it likes: listener reports, solicitations.
			if n := after[reason] - before[reason]; n < 1 || n > 1 && reason != DropCast {
				t.Errorf("%s is not counted as %q: %v, then %v", p.what, reason, before, after)
			}
		}
	}
	must(t, r.Lease(0))
	_, err = w.send(probes(own, own+1)[0], false)
	must(t, err)
	if all, err := r.Drops(); err != nil || all[DropLease] == 0 {
		t.Errorf("no drop for want of a lease: %v, %v", all, err)
	}
}

// TestEveryAddressEndsAtTheTransparentDoor asks for addresses that are somebody's, the host's own among them.
func TestEveryAddressEndsAtTheTransparentDoor(t *testing.T) {
	r, _, w := permitted(t)
	two := newSandbox(t, r, "two")
	all := []string{
		"169.254.169.254:80", "10.0.0.1:22", "198.18.0.9:443", "8.8.8.8:53", "100.64.0.2:4222", "1.1.1.1:853",
		"[fd00:ec2::254]:80", "[fd62:6572:7468:f::9]:443", "[2001:db8::1]:53", "[fec0::1]:1", "[64:ff9b::a00:1]:80",
		at(two.link.Address4.Addr(), 80), at(two.link.Address6.Addr(), 80),
	}
	own, err := net.InterfaceAddrs()
	must(t, err)
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && !n.IP.IsLinkLocalUnicast() {
			host, err := net.Listen("tcp", net.JoinHostPort(n.IP.String(), "0"))
			must(t, err)
			defer host.Close()
			all = append(all, host.Addr().String())
		}
	}
	for _, to := range all {
		if err := w.ask("tcp", to); err != nil {
			t.Error(err)
		}
	}
}

func TestASandboxDoesNotReachAnother(t *testing.T) {
	r, one, _ := permitted(t)
	two := newSandbox(t, r, "two")
	must(t, r.Bind(t.Context(), two.link))
	witness, err := newWitness(r, two.path, two.link)
	must(t, err)
	defer witness.Close()
	before, err := witness.heard()
	must(t, err)
	for _, a := range []netip.Prefix{two.link.Address4, two.link.Address6} {
		l, err := netns.Listen(two.path, "tcp", at(a.Addr(), 80), nil)
		must(t, err)
		defer l.Close()
		if c, err := dial(one.path, "tcp", at(a.Addr(), 80)); err == nil {
			c.Close() // the transparent door
		}
		c, err := dial(one.path, "udp", at(a.Addr(), 80))
		must(t, err)
		defer c.Close()
		_, err = io.WriteString(c, "are you there")
		must(t, err)
	}
	if after, err := witness.heard(); err != nil || after != before {
		t.Errorf("%d frames came to the other sandbox (%v)", after-before, err)
	}
}

// TestTheRouterNeverAsks: a process in the router, the gate, cannot open a way into a sandbox.
func TestTheRouterNeverAsks(t *testing.T) {
	r, s, w := permitted(t)
	before, err := w.heard()
	must(t, err)
	for _, a := range []netip.Prefix{s.link.Address4, s.link.Address6} {
		l, err := netns.Listen(s.path, "tcp", at(a.Addr(), 80), nil)
		must(t, err)
		defer l.Close()
		if c, err := dial(r.path, "tcp", at(a.Addr(), 80)); err == nil {
			c.Close()
			t.Errorf("the router reached %s", a)
		}
		c, err := dial(r.path, "udp", at(a.Addr(), 80))
		must(t, err)
		defer c.Close()
		if _, err = io.WriteString(c, "hello"); !errors.Is(err, unix.EPERM) {
			t.Errorf("the router sends UDP to %s: %v", a, err)
		}
	}
	if after, err := w.heard(); err != nil || after != before {
		t.Errorf("%d frames came to the sandbox (%v)", after-before, err)
	}
}

func TestALeaseThatRanOutStopsAConnectionAndRenewalResumesIt(t *testing.T) {
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	must(t, r.Bind(t.Context(), s.link))
	for _, gateway := range []netip.Addr{Gateway4, Gateway6} {
		t.Run(gateway.String(), func(t *testing.T) {
			must(t, r.Lease(time.Minute))
			c := echoing(t, r, s, gateway)
			if err := shout(c, 5*time.Second); err != nil {
				t.Fatalf("before: %v", err)
			}
			began := time.Now()
			must(t, r.Lease(200*time.Millisecond))
			for {
				err := shout(c, 150*time.Millisecond)
				if errors.Is(err, os.ErrDeadlineExceeded) {
					break
				}
				must(t, err)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("the connection went on for %v", took)
			}
			must(t, r.Lease(time.Minute))
			if err := hear(c, 5*time.Second); err != nil {
				t.Errorf("the connection did not go on: %v", err)
			}
		})
	}
}

// echoing is a connection through a door that says everything back.
func echoing(t testing.TB, r *Router, s sandbox, gateway netip.Addr) net.Conn {
	t.Helper()
	l, err := netns.Listen(r.path, "tcp", at(gateway, SocksPort), nil)
	must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, _ = io.Copy(c, c)
			c.Close()
		}
	}()
	c, err := dial(s.path, "tcp", at(gateway, SocksPort))
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// shout says one byte and hears it.
func shout(c net.Conn, within time.Duration) error {
	if _, err := c.Write([]byte{'x'}); err != nil {
		return err
	}
	return hear(c, within)
}

func hear(c net.Conn, within time.Duration) error {
	if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 1))
	return err
}

// TestAClosedDoorDropsAndAnswersNothing: with no gate there is no way at all.
func TestAClosedDoorDropsAndAnswersNothing(t *testing.T) {
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	must(t, r.Bind(t.Context(), s.link))
	must(t, r.Lease(time.Minute))
	for _, to := range []string{at(example4, 443), at(example6, 443), at(Gateway4, ConnectPort), at(Gateway6, DNSPort)} {
		if c, err := dial(s.path, "tcp", to); err == nil {
			c.Close()
			t.Errorf("somebody answered at %s", to)
		}
	}
	if all, err := r.Drops(); err != nil || all[DropClosed] == 0 {
		t.Errorf("%v, %v", all, err)
	}
}

func TestCanaryPassesTheRightRules(t *testing.T) {
	r, _, w := permitted(t)
	w.Close() // the canary has a watch of its own
	began := time.Now()
	must(t, r.Canary(t.Context()))
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("the canary took %v", took)
	}
	if _, ok := r.links[canaryName]; ok {
		t.Error("the canary's link is left")
	}
}

// TestCanaryLeavesSessionsAlone: it gives nobody a lease, takes nobody's, and cleans up after one that was killed.
func TestCanaryLeavesSessionsAlone(t *testing.T) {
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	must(t, r.Bind(t.Context(), s.link))
	killed, err := Open(t.Context(), Config{Dir: filepath.Join(r.dir, "canary")})
	must(t, err)
	for _, of := range []*Router{r, killed} {
		_, err = of.Make(t.Context(), canaryName, false)
		must(t, err)
		_, err = netns.Pin(filepath.Join(of.dir, "canary-sandbox"))
		must(t, err)
	}
	must(t, killed.Close())
	if all, err := r.Drops(); err != nil || all[DropClosed] != 0 {
		t.Fatal(all, err)
	}
	must(t, r.Canary(t.Context()))
	k, err := r.table.read()
	if err != nil || k.permits.until > sinceBoot() || len(k.permits.bound) != 1 {
		t.Errorf("after the canary: %+v, %v", k.permits, err)
	}
	must(t, r.Lease(time.Minute))
	c := echoing(t, r, s, Gateway6)
	must(t, shout(c, 5*time.Second))
	must(t, r.Canary(t.Context()))
	must(t, shout(c, 5*time.Second))
	left, err := os.ReadDir(r.dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestCanaryNoticesALeak breaks the rules in every way that matters.
func TestCanaryNoticesALeak(t *testing.T) {
	for name, spoil := range map[string]func([]chain) []chain{
		"no rules":                      func(c []chain) []chain { return nil },
		"no guard":                      func(c []chain) []chain { return c[1:] },
		"no doors":                      func(c []chain) []chain { return append(c[:1:1], c[2:]...) },
		"IPv4 needs no lease":           replace(0, 6, rule(proto(unix.NFPROTO_IPV4), bound(4), accept())),
		"IPv6 needs no lease":           replace(0, 7, rule(proto(unix.NFPROTO_IPV6), bound(6), accept())),
		"IPv4 needs no binding":         replace(0, 6, rule(proto(unix.NFPROTO_IPV4), leased(), accept())),
		"IPv6 needs no binding":         replace(0, 7, rule(proto(unix.NFPROTO_IPV6), leased(), accept())),
		"fragments":                     replace(0, 2, rule(proto(0), accept())),
		"options":                       replace(0, 3, rule(proto(0), accept())),
		"extension headers":             replace(0, 4, rule(proto(0), accept())),
		"mapped addresses":              replace(0, 5, rule(proto(0), accept())),
		"other ports of the gateway":    replace(1, 4, rule(to(Gateway4), l4(unix.IPPROTO_TCP), accept())),
		"UDP":                           replace(1, 13, rule(l4(unix.IPPROTO_UDP), accept())),
		"ICMP":                          replace(1, 10, rule(l4(unix.IPPROTO_ICMPV6), accept())),
		"IPv6 not to the transparent":   replace(1, 11, rule(proto(0), accept())),
		"a door is shut":                replace(1, 2, rule(proto(0), accept())),
		"the resolver's door is shut":   replace(1, 6, rule(proto(0), accept())),
		"no answers":                    func(c []chain) []chain { c[3].rules = c[3].rules[3:]; return c },
		"the resolver does not answer":  replace(3, 2, rule(proto(0), accept())),
		"everything from the end, IPv6": replace(0, 7, rule(proto(unix.NFPROTO_IPV6), leased(), endOnly(), accept())),
	} {
		t.Run(name, func(t *testing.T) {
			r := newRouter(t)
			rewrite(t, r, spoil(chains()))
			if err := r.canary(t.Context(), settle); err == nil {
				t.Fatal("the canary saw nothing")
			} else {
				t.Log(err)
			}
		})
	}
}

// replace puts another rule in the place of one.
func replace(in, at int, other []expr.Any) func([]chain) []chain {
	return func(c []chain) []chain { c[in].rules[at] = other; return c }
}

func accept() []expr.Any { return verdict(expr.VerdictAccept) }

// endOnly looks at the interface and at no address.
func endOnly() []expr.Any { return metaIs(expr.MetaKeyIIFTYPE, []byte{unix.ARPHRD_ETHER, 0}) }
