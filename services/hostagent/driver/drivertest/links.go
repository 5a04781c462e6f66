package drivertest

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/netns"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// linkTheme is the theme of the checks of sandboxes with a link. Those that are shared look at two of them.
const linkTheme = "link"

// linked is a router and two sandboxes with links of it, of which only the first is bound.
type linked struct {
	router *network.Router
	*pair
	la, lb network.Link
	doors  map[string]*atomic.Int64 // by address: how many came
}

// openLinked makes the pair. Both have files over those of their roots.
func (s *suite) openLinked(t *testing.T) *linked {
	t.Helper()
	l := &linked{router: s.openRouter(t), doors: map[string]*atomic.Int64{}}
	p := &pair{d: s.open(t)}
	l.pair = p
	p.one, l.la = s.linkedSpec(t, l.router, 1)
	p.two, l.lb = s.linkedSpec(t, l.router, 2)
	for _, a := range []netip.Addr{network.Gateway4, network.Gateway6} {
		l.door(t, netip.AddrPortFrom(a, network.ConnectPort).String())
	}
	p.a, p.b = s.create(t, p.d, p.one), s.create(t, p.d, p.two)
	p.ka, p.kb = s.talk(t, p.a), s.talk(t, p.b)
	if err := l.router.Bind(ctx(t), l.la); err != nil {
		t.Fatal(err)
	}
	return l
}

// openRouter makes a router with a lease, which is gone when the test ends.
func (s *suite) openRouter(t *testing.T) *network.Router {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: network namespaces need root")
	}
	r, err := network.Open(ctx(t), network.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatalf("router: %v", err)
	}
	t.Cleanup(func() {
		if err := r.Destroy(ctx(t)); err != nil {
			t.Errorf("remove the router: %v", err)
		}
	})
	if err := r.Lease(10 * time.Minute); err != nil {
		t.Fatal(err)
	}
	return r
}

// linkedSpec is a spec with a link of the router.
func (s *suite) linkedSpec(t *testing.T, r *network.Router, session int) (driver.Spec, network.Link) {
	t.Helper()
	spec := s.spec(t, session, 1)
	return spec, s.relink(t, r, &spec)
}

// relink gives a spec a link.
func (s *suite) relink(t *testing.T, r *network.Router, spec *driver.Spec) network.Link {
	t.Helper()
	l, err := r.Make(ctx(t), string(spec.ID()), s.caps.Tap)
	if err != nil {
		t.Fatalf("make a link: %v", err)
	}
	spec.Link = &l
	return l
}

// door listens at the gateway, as the gate does.
func (l *linked) door(t *testing.T, addr string) {
	t.Helper()
	d, err := netns.Listen(l.router.Path(), "tcp", addr, nil)
	if err != nil {
		t.Fatalf("listen in the router: %v", err)
	}
	t.Cleanup(func() { _ = d.Close() })
	n := &atomic.Int64{}
	l.doors[addr] = n
	go func() {
		for {
			c, err := d.Accept()
			if err != nil {
				return
			}
			n.Add(1)
			_ = c.Close()
		}
	}()
}

// linkIsAll: a sandbox that has another interface, address or way out than its link's.
func (s *suite) linkIsAll(t *testing.T) {
	for _, c := range []struct {
		k *Talk
		l network.Link
	}{{s.linked.ka, s.linked.la}, {s.linked.kb, s.linked.lb}} {
		s.hasLink(t, c.k, c.l)
	}
}

// hasLink looks at all that a sandbox has of a network.
func (s *suite) hasLink(t *testing.T, k *Talk, l network.Link) {
	t.Helper()
	own := []string{l.Address4.String(), l.Address6.String()}
	slices.Sort(own)
	want := fmt.Sprintf("eth0 up %d %s %s", l.MTU, l.MAC, strings.Join(own, " "))
	routes := map[string]bool{ // that there may be, and whether there must
		"default via " + network.Gateway4.String() + " dev eth0": true, "default via " + network.Gateway6.String() + " dev eth0": true,
		network.Gateway4.String() + "/32 dev eth0": false, network.Gateway6.String() + "/128 dev eth0": false,
		l.Address4.String() + " dev eth0": false, l.Address6.String() + " dev eth0": false,
	}
	got := k.must(t, "netall")
	var names []string
	for line := range strings.Lines(got) {
		line = strings.TrimSpace(line)
		if to, ok := strings.CutPrefix(line, "route "); ok {
			if _, may := routes[to]; !may {
				t.Errorf("it has the route %s", to)
			}
			delete(routes, to)
			continue
		}
		name, _, _ := strings.Cut(line, " ")
		names = append(names, name)
		if name == "eth0" && line != want {
			t.Errorf("it has %s, not %s", line, want)
		}
	}
	slices.Sort(names)
	if !slices.Equal(names, []string{"eth0", "lo"}) {
		t.Errorf("it has the interfaces %v", names)
	}
	for to, must := range routes {
		if must {
			t.Errorf("it has no route %s in %s", to, got)
		}
	}
}

// linkBound: a bound sandbox that does not reach the doors of its host, or one that is not bound and does.
func (s *suite) linkBound(t *testing.T) {
	l := s.linked
	for addr, came := range l.doors {
		if _, err := l.ka.Do("dial", "tcp", addr); err != nil {
			t.Errorf("bound, it does not reach %s: %v", addr, err)
		}
		eventually(t, "it came to "+addr, func() bool { return came.Load() == 1 })
		if _, err := l.kb.Do("dial", "tcp", addr); err == nil || came.Load() != 1 {
			t.Errorf("not bound, it reached %s: %v", addr, err)
		}
	}
	if err := l.router.Unbind(ctx(t), l.la); err != nil {
		t.Fatal(err)
	}
	for addr := range l.doors {
		if _, err := l.ka.Do("dial", "tcp", addr); err == nil {
			t.Errorf("not bound any more, it reached %s", addr)
		}
	}
	if err := l.router.Bind(ctx(t), l.la); err != nil {
		t.Fatal(err)
	}
}

// linkCarries: bytes that are lost or changed on the way to the doors, or names that cannot be asked for.
func (s *suite) linkCarries(t *testing.T) {
	l := s.linked
	for _, a := range []netip.Addr{network.Gateway4, network.Gateway6} {
		echo, err := netns.Listen(l.router.Path(), "tcp", netip.AddrPortFrom(a, network.SocksPort).String(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = echo.Close() }()
		go func() {
			for {
				c, err := echo.Accept()
				if err != nil {
					return
				}
				go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
			}
		}()
		if _, err := l.ka.Do("through", echo.Addr().String(), "8"); err != nil {
			t.Errorf("through %s: %v", echo.Addr(), err)
		}
		names, err := netns.ListenPacket(l.router.Path(), "udp", netip.AddrPortFrom(a, network.DNSPort).String(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = names.Close() }()
		go func() {
			b := make([]byte, 2048)
			for {
				n, from, err := names.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = names.WriteTo(b[:n], from)
			}
		}()
		question := strings.Repeat("name", 300)
		if got, err := l.ka.Do("ask", names.LocalAddr().String(), question); err != nil || got != question {
			t.Errorf("%s answers %.20q, %v", names.LocalAddr(), got, err)
		}
		if _, err := l.kb.Do("ask", names.LocalAddr().String(), question); err == nil {
			t.Errorf("not bound, %s answers it", names.LocalAddr())
		}
	}
}

// linkNoWay: a way around the doors: a service of the host, on any address it has.
func (s *suite) linkNoWay(t *testing.T) {
	host, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = host.Close() }()
	_, port, _ := net.SplitHostPort(host.Addr().String())
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLinkLocalUnicast() {
			if _, err := s.linked.ka.Do("dial", "tcp", net.JoinHostPort(n.IP.String(), port)); err == nil {
				t.Errorf("it reached the host at %s", n.IP)
			}
		}
	}
}

// linkNoForgery: a sandbox that makes packets of its own, or another address, interface or route.
func (s *suite) linkNoForgery(t *testing.T) {
	before := s.linked.ka.must(t, "netall")
	for _, what := range []string{"raw", "packet", "raw4", "raw4any", "raw6", "address", "address6", "mac", "down", "mtu", "interface", "route", "netns"} {
		if _, err := s.linked.ka.Do("try", what); err == nil {
			t.Errorf("%s is not refused", what)
		}
	}
	if after := s.linked.ka.must(t, "netall"); after != before {
		t.Errorf("its network was %s and is %s", before, after)
	}
	for _, a := range []netip.Addr{network.Gateway4, network.Gateway6, s.linked.lb.Address4.Addr(), s.linked.lb.Address6.Addr()} {
		if _, err := s.linked.ka.Do("ping", a.String()); err == nil {
			t.Errorf("%s answers a ping", a)
		}
	}
}

// linksApart: two sandboxes that reach each other through the router.
func (s *suite) linksApart(t *testing.T) {
	l := s.linked
	if err := l.router.Bind(ctx(t), l.lb); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.router.Unbind(ctx(t), l.lb); err != nil {
			t.Error(err)
		}
	}()
	l.kb.must(t, "serve", "7777")
	for _, a := range []netip.Addr{l.lb.Address4.Addr(), l.lb.Address6.Addr()} {
		to := netip.AddrPortFrom(a, 7777).String()
		if _, err := l.kb.Do("dial", "tcp", to); err != nil {
			t.Errorf("it does not reach itself at %s: %v", to, err)
		}
		if _, err := l.ka.Do("dial", "tcp", to); err == nil {
			t.Errorf("it reached the other at %s", to)
		}
	}
}

// noLink: a sandbox without a link that has anything but its loopback.
func (s *suite) noLink(t *testing.T) {
	d := s.open(t)
	_, k := s.start(t, d, 1, 1)
	for line := range strings.Lines(k.must(t, "netall")) {
		line = strings.TrimSpace(line)
		if f := strings.Fields(line); f[0] == "route" || f[0] != "lo" && (f[1] == "up" || len(f) > 4) {
			t.Errorf("it has %s", line)
		}
	}
	addr := k.must(t, "listen")
	if _, err := k.Do("dial", "tcp", addr); err != nil {
		t.Errorf("it does not reach itself: %v", err)
	}
}

// linkEnds: a namespace, or a link, that outlives its sandbox.
func (s *suite) linkEnds(t *testing.T) {
	r, d := s.openRouter(t), s.open(t)
	before := s.host.Left(t)
	for n := range uint64(2) { // each life has a link of its own
		spec := s.spec(t, 1, n+1)
		l := s.relink(t, r, &spec)
		sb := s.create(t, d, spec)
		var ino uint64
		if nw, ok := d.(driver.Networker); ok {
			path, err := nw.Netns(ctx(t), sb.ID)
			if err != nil {
				t.Fatal(err)
			}
			ino = inode(t, path)
		}
		s.hasLink(t, s.talk(t, sb), l)
		s.stop(t, d, sb)
		s.nothing(t, d, before)
		eventually(t, "its network namespace ends", func() bool { return !netnsLives(ino) })
		if err := r.Remove(ctx(t), string(spec.ID())); err != nil {
			t.Errorf("remove its link: %v", err)
		}
	}
}

// netnsLives reports whether a process of the host is in a network namespace, or it is pinned.
func netnsLives(ino uint64) bool {
	name := fmt.Sprintf("net:[%d]", ino)
	all, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, p := range all {
		if to, err := os.Readlink(p); err == nil && to == name {
			return true
		}
	}
	table, _ := os.ReadFile("/proc/self/mountinfo")
	return strings.Contains(string(table), " "+name+" ")
}

// linkRefused: a link that a tier cannot use, and a sandbox that starts all the same.
func (s *suite) linkRefused(t *testing.T) {
	r := s.openRouter(t)
	other, err := r.Make(ctx(t), "another", !s.caps.Tap)
	if err != nil {
		t.Fatal(err)
	}
	s.refused(t, []wrong{
		{"a link of the other kind", func(w *driver.Spec) { w.Link = &other }, errkind.Invalid},
		{"a link of nothing", func(w *driver.Spec) { w.Link = &network.Link{Tap: s.caps.Tap} }, errkind.Invalid},
		{"a path out of the run folder", func(w *driver.Spec) { w.Over = []driver.Over{{From: "../x", To: "/etc/x"}} }, errkind.Invalid},
		{"a file over no path", func(w *driver.Spec) { w.Over = []driver.Over{{From: "x", To: "etc/x"}} }, errkind.Invalid},
		{"a file over a way up", func(w *driver.Spec) { w.Over = []driver.Over{{From: "x", To: "/etc/../x"}} }, errkind.Invalid},
	})
}

// linkImpossible: a tier without a network that starts a sandbox which was to have one.
func (s *suite) linkImpossible(t *testing.T) {
	l := network.Link{Sandbox: "x", Router: "/x", Name: "x", Peer: "y", Address4: netip.MustParsePrefix("100.64.0.16/32"), Address6: netip.MustParsePrefix("fd62:6572:7468:1::10/128")}
	s.refused(t, []wrong{
		{"a link", func(w *driver.Spec) { w.Link = &l }, errkind.Unimplemented},
		{"a tap", func(w *driver.Spec) { tap := l; tap.Tap = true; w.Link = &tap }, errkind.Unimplemented},
	})
}

// linkWarm: a warm sandbox that is claimed with another link than it was prepared with, or loses its own.
func (s *suite) linkWarm(t *testing.T) {
	r := s.openRouter(t)
	_, p := s.preparer(t)
	spec, l := s.linkedSpec(t, r, 1)
	w := warmOf(spec)
	prepare(t, p, w)
	other, err := r.Make(ctx(t), "another", s.caps.Tap)
	if err != nil {
		t.Fatal(err)
	}
	for name, link := range map[string]*network.Link{"none": nil, "another": &other} {
		wrong := spec
		wrong.Link = link
		if _, err := p.Claim(ctx(t), w.ID, wrong); !errs.Is(err, errkind.Unimplemented) {
			t.Errorf("claimed with link %s: %v", name, err)
		}
	}
	_, k := s.claim(t, p, w.ID, spec)
	s.hasLink(t, k, l)
	if err := r.Bind(ctx(t), l); err != nil {
		t.Fatal(err)
	}
	li := &linked{router: r, doors: map[string]*atomic.Int64{}}
	for _, a := range []netip.Addr{network.Gateway4, network.Gateway6} {
		addr := netip.AddrPortFrom(a, network.ConnectPort).String()
		li.door(t, addr)
		if _, err := k.Do("dial", "tcp", addr); err != nil {
			t.Errorf("it does not reach %s: %v", addr, err)
		}
	}
}

// hostMounts lists the host's mounts that name a file.
func hostMounts(t *testing.T, of string) (out []string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, of) {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

func isReadOnly(err error) bool {
	return err != nil && strings.Contains(err.Error(), unix.EROFS.Error())
}
