package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
)

func TestMakeAgainIsTheSameLink(t *testing.T) {
	r := newRouter(t)
	for _, tap := range []bool{false, true} {
		name := fmt.Sprint("one-", tap)
		l, err := r.Make(t.Context(), name, tap)
		must(t, err)
		again, err := r.Make(t.Context(), name, tap)
		if err != nil || again != l {
			t.Errorf("%v, then %v, %v", l, again, err)
		}
		found, err := r.List(t.Context())
		must(t, err)
		if len(found) == 0 || found[0].Bound {
			t.Errorf("%v", found)
		}
		b, err := json.Marshal(l)
		must(t, err)
		var read Link
		if err := json.Unmarshal(b, &read); err != nil || read != l {
			t.Errorf("read back: %v, %v", read, err)
		}
	}
	if _, err := r.Make(t.Context(), "", false); err == nil {
		t.Error("a link of nobody")
	}
}

// TestASlotComesAgainLate: what is on its way to an address must not meet the next sandbox.
func TestASlotComesAgainLate(t *testing.T) {
	r := newRouter(t)
	seen := map[netip.Prefix]bool{}
	for i := range 5 {
		l, err := r.Make(t.Context(), fmt.Sprint(i), false)
		must(t, err)
		if seen[l.Address4] || seen[l.Address6] {
			t.Errorf("%s was another's a moment ago", l.Address4)
		}
		seen[l.Address4], seen[l.Address6] = true, true
		must(t, r.Remove(t.Context(), l.Sandbox))
	}
	r.last = lastSlot - 1
	for _, want := range []slot{lastSlot, firstSlot} {
		l, err := r.Make(t.Context(), fmt.Sprint("end-", want), false)
		if s, _ := l.slot(); err != nil || s != want {
			t.Errorf("slot %d, %v; want %d", s, err, want)
		}
		if !Sandboxes4.Contains(l.Address4.Addr()) || !Sandboxes6.Contains(l.Address6.Addr()) {
			t.Errorf("%v", l)
		}
	}
}

func TestPlugTwiceAndAfterACrashInBetween(t *testing.T) {
	r, s, w := permitted(t)
	must(t, s.link.Plug(s.path))
	must(t, w.talk())
	two, err := r.Make(t.Context(), "two", false)
	must(t, err)
	path := newNamespace(t)
	peer, err := r.kernel.LinkByName(two.Peer)
	must(t, err)
	ns, err := netns.Open(path)
	must(t, err)
	defer ns.Close()
	must(t, r.kernel.LinkSetNsFd(peer, int(ns.Fd()))) // and no more
	must(t, two.Plug(path))
	inNamespace(t, path, func(h *netlink.Handle) error { return dressed(h, two) })
	if err := two.Plug(s.path); err == nil {
		t.Error("a second eth0 in one namespace")
	}
	if err := s.link.Plug(path); err == nil {
		t.Error("another's eth0 was taken for its own")
	}
}

// dressed looks at what a sandbox has: its two addresses, no other, one way out.
func dressed(h *netlink.Handle, l Link) error {
	end, err := h.LinkByName(inside)
	if err != nil {
		return err
	}
	addresses, err := h.AddrList(end, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	if len(addresses) != 2 {
		return fmt.Errorf("addresses: %v", addresses)
	}
	for _, a := range addresses {
		got, _ := netip.ParsePrefix(a.IPNet.String())
		if got != l.Address4 && got != l.Address6 {
			return fmt.Errorf("address %s", got)
		}
		if a.Flags&unix.IFA_F_TENTATIVE != 0 {
			return fmt.Errorf("%s is not used yet", got)
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		neighbours, err := h.NeighList(end.Attrs().Index, family)
		if err != nil {
			return err
		}
		permanent := 0
		for _, n := range neighbours {
			if n.State == netlink.NUD_PERMANENT && n.HardwareAddr.String() == l.HostMAC {
				permanent++
			}
		}
		if permanent != 1 {
			return fmt.Errorf("neighbours: %v", neighbours)
		}
	}
	return nil
}

func TestALinkWhoseNamespaceEndedIsMadeAnew(t *testing.T) {
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	must(t, r.Bind(t.Context(), s.link))
	must(t, netns.Remove(s.path))
	gone(t, r, s.link.Name)
	l, err := r.Make(t.Context(), "one", false)
	must(t, err)
	if l == s.link {
		t.Error("the dead link was given again")
	}
	if err := r.Bind(t.Context(), s.link); !errors.Is(err, ErrNoLink) {
		t.Errorf("the dead link was bound: %v", err)
	}
	k, err := r.table.read()
	if err != nil || len(k.permits.bound) != 0 {
		t.Errorf("the dead link's permission is left: %v, %v", k.permits, err)
	}
	must(t, r.Bind(t.Context(), l))
}

// gone waits until the kernel took an interface away.
func gone(t testing.TB, r *Router, name string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		if _, err := r.kernel.LinkByName(name); errors.As(err, new(netlink.LinkNotFoundError)) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s did not go", name)
		}
	}
}

func TestRemovalLeavesNothing(t *testing.T) {
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	tap, err := r.Make(t.Context(), "two", true)
	must(t, err)
	must(t, r.Bind(t.Context(), s.link))
	must(t, r.Bind(t.Context(), tap))
	for range 2 {
		must(t, r.Remove(t.Context(), "one"))
		must(t, r.Remove(t.Context(), "two"))
	}
	must(t, rest(r))
	must(t, r.Unbind(t.Context(), s.link))
	if err := r.Bind(t.Context(), s.link); !errors.Is(err, ErrNoLink) {
		t.Errorf("a link that is gone was bound: %v", err)
	}
	inNamespace(t, s.path, func(h *netlink.Handle) error {
		if _, err := h.LinkByName(inside); err == nil {
			return errors.New("the sandbox's end is left")
		}
		return nil
	})
}

func TestDestroyLeavesNothing(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	r, err := Open(t.Context(), Config{Dir: dir})
	must(t, err)
	s := newSandbox(t, r, "one")
	must(t, r.Destroy(t.Context()))
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	inNamespace(t, s.path, func(h *netlink.Handle) error {
		if _, err := h.LinkByName(inside); err == nil {
			return errors.New("the sandbox's end is left")
		}
		return nil
	})
}

func TestManyLinksAtOnce(t *testing.T) {
	const n = 200
	r := newRouter(t)
	links := make([]Link, n)
	began := time.Now()
	all(t, n, func(i int) (err error) {
		if links[i], err = r.Make(context.Background(), fmt.Sprint("s", i), i%4 == 0); err != nil {
			return err
		}
		return r.Bind(context.Background(), links[i])
	})
	made := time.Since(began)
	seen := map[netip.Prefix]bool{}
	for _, l := range links {
		if seen[l.Address4] {
			t.Fatalf("%s twice", l.Address4)
		}
		seen[l.Address4] = true
	}
	if restored, err := r.Check(t.Context()); restored || err != nil {
		t.Errorf("the table is not what was written: %v", err)
	}
	began = time.Now()
	all(t, n, func(i int) error { return r.Remove(context.Background(), links[i].Sandbox) })
	must(t, rest(r))
	t.Logf("made and bound in %v each, removed in %v each", made/n, time.Since(began)/n)
	if made/n > 10*time.Millisecond {
		t.Errorf("a link takes %v", made/n)
	}
}

func all(t testing.TB, n int, f func(i int) error) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if err := f(i); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestARestartAdoptsWhatIsThere(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	first, err := Open(t.Context(), Config{Dir: dir})
	must(t, err)
	closed := false
	t.Cleanup(func() {
		if !closed {
			must(t, first.Destroy(context.Background()))
		}
	})
	s := newSandbox(t, first, "one")
	tap, err := first.Make(t.Context(), "two", true)
	must(t, err)
	must(t, first.Bind(t.Context(), s.link))
	must(t, first.Lease(time.Minute))
	c := echoing(t, first, s, Gateway4)
	must(t, shout(c, 5*time.Second))
	// A half-made link, of which nobody knows whose it is.
	attrs := netlink.NewLinkAttrs()
	attrs.Name = slot(77).name()
	must(t, first.kernel.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: slot(77).peer()}))
	before, err := first.table.read()
	must(t, err)
	must(t, first.Close())
	closed = true

	second, err := Open(t.Context(), Config{Dir: dir})
	must(t, err)
	t.Cleanup(func() { must(t, second.Destroy(context.Background())) })
	must(t, shout(c, 5*time.Second))
	found, err := second.List(t.Context())
	must(t, err)
	bound := map[Link]bool{}
	for _, f := range found {
		bound[f.Link] = f.Bound
	}
	if len(found) != 2 || !bound[s.link] || bound[tap] {
		t.Errorf("found %v", found)
	}
	if d := second.table.have.until - before.permits.until; d.Abs() > clockSlack {
		t.Errorf("the lease changed by %v", d)
	}
	gone(t, second, slot(77).name())
	if l, err := second.Make(t.Context(), "one", false); err != nil || l != s.link {
		t.Errorf("%v, %v", l, err)
	}
}

// TestAnOlderTableIsReplacedAndKeepsItsPermits: an update of the program changes rules under live sandboxes.
func TestAnOlderTableIsReplacedAndKeepsItsPermits(t *testing.T) {
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	must(t, r.Bind(t.Context(), s.link))
	must(t, r.Lease(time.Minute))
	c := echoing(t, r, s, Gateway6)
	must(t, shout(c, 5*time.Second))
	older := chains()
	older[1].rules = append(older[1].rules, accept())
	rewrite(t, r, older)
	again, err := Open(t.Context(), Config{Dir: r.dir})
	must(t, err)
	defer again.Close()
	if len(again.table.have.bound) != 1 || again.table.have.until < sinceBoot()+50*time.Second {
		t.Errorf("permits are lost: %+v", again.table.have)
	}
	k, err := again.table.read()
	if err != nil || !k.whole {
		t.Errorf("the rules are older still: %v", err)
	}
	must(t, shout(c, 5*time.Second))
}

func TestATableThatSomebodyChangedIsNoticedAndRestored(t *testing.T) {
	r := newRouter(t)
	s := newSandbox(t, r, "one")
	must(t, r.Bind(t.Context(), s.link))
	must(t, r.Lease(time.Minute))
	c := echoing(t, r, s, Gateway4)
	guard := &nftables.Chain{Name: "guard", Table: inet()}
	bound4, _, leaseSet := sets()
	for name, change := range map[string]func(*nftables.Conn){
		"flushed":         func(c *nftables.Conn) { c.FlushRuleset() },
		"deleted":         func(c *nftables.Conn) { c.DelTable(inet()) },
		"rules flushed":   func(c *nftables.Conn) { c.FlushChain(guard) },
		"a rule too many": func(c *nftables.Conn) { c.InsertRule(&nftables.Rule{Table: inet(), Chain: guard, Exprs: accept()}) },
		"bound flushed":   func(c *nftables.Conn) { c.FlushSet(bound4) },
		"lease flushed":   func(c *nftables.Conn) { c.FlushSet(leaseSet) },
		"a policy": func(c *nftables.Conn) {
			policy := nftables.ChainPolicyAccept
			chain := chains()[1]
			c.AddChain(&nftables.Chain{Name: chain.name, Table: inet(), Hooknum: chain.hook, Priority: &chain.priority,
				Type: nftables.ChainTypeFilter, Policy: &policy})
		},
		"a stranger bound": func(c *nftables.Conn) {
			must(t, elements(c, c.SetAddElements, []slot{4711}))
		},
		"a lease without end": func(c *nftables.Conn) {
			c.FlushSet(leaseSet)
			must(t, c.SetAddElements(leaseSet, []nftables.SetElement{{Key: []byte{unix.NFPROTO_IPV4}}, {Key: []byte{unix.NFPROTO_IPV6}}}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			must(t, r.table.transact(func(c *nftables.Conn) error { change(c); return nil }))
			if restored, err := r.Check(t.Context()); !restored || err != nil {
				t.Fatalf("not noticed: %v", err)
			}
			if restored, err := r.Check(t.Context()); restored || err != nil {
				t.Fatalf("not restored: %v", err)
			}
			must(t, shout(c, 5*time.Second))
		})
	}
}

// TestAChangeAfterAFlushRestoresTheWhole: a bind that the kernel cannot do as a difference is done anew.
func TestAChangeAfterAFlushRestoresTheWhole(t *testing.T) {
	r := newRouter(t)
	one, err := r.Make(t.Context(), "one", false)
	must(t, err)
	two, err := r.Make(t.Context(), "two", false)
	must(t, err)
	must(t, r.Bind(t.Context(), one))
	must(t, r.table.transact(func(c *nftables.Conn) error { c.FlushRuleset(); return nil }))
	must(t, r.Bind(t.Context(), two))
	if restored, err := r.Check(t.Context()); restored || err != nil {
		t.Errorf("something was missing: %v", err)
	}
}

// TestATapCarries speaks as a machine does: frames with a virtio-net header through the tap's descriptor.
func TestATapCarries(t *testing.T) {
	r := newRouter(t)
	l, err := r.Make(t.Context(), "one", true)
	must(t, err)
	f, err := l.OpenTap()
	must(t, err)
	defer f.Close()
	if again, err := l.OpenTap(); err == nil {
		again.Close()
		t.Error("a tap has two machines")
	}
	must(t, r.table.transact((&witness{router: r, link: l}).watch))
	w := &witness{router: r, link: l, raw: -1}
	defer w.Close()
	s, err := l.slot()
	must(t, err)
	for _, permit := range []bool{false, true} {
		if permit {
			must(t, r.Bind(t.Context(), l))
			must(t, r.Lease(time.Minute))
			must(t, w.open())
		}
		for _, p := range probes(s, s+1) {
			came, before, err := w.counts()
			must(t, err)
			_, err = f.Write(append(make([]byte, 10), p.frame...))
			must(t, err)
			n, after, err := w.counts()
			must(t, err)
			if p.seen && n == came {
				t.Errorf("%s did not come", p.what)
			}
			if past := after > before; past != (permit && p.through) {
				t.Errorf("%s with permission %v: past the rules %v", p.what, permit, past)
			}
		}
	}
}

// TestAClosedRouterDoesNothing, in its namespace or in the process's own.
func TestAClosedRouterDoesNothing(t *testing.T) {
	r := newRouter(t)
	l, err := r.Make(t.Context(), "one", false)
	must(t, err)
	other, err := Open(t.Context(), Config{Dir: r.dir})
	must(t, err)
	must(t, other.Close())
	must(t, other.Close())
	_, made := other.Make(t.Context(), "two", false)
	_, listed := other.List(t.Context())
	_, checked := other.Check(t.Context())
	_, counted := other.Drops()
	for what, err := range map[string]error{
		"make": made, "list": listed, "check": checked, "drops": counted, "remove": other.Remove(t.Context(), "one"),
		"bind": other.Bind(t.Context(), l), "unbind": other.Unbind(t.Context(), l), "lease": other.Lease(time.Minute),
		"destroy": other.Destroy(t.Context()),
	} {
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if again, err := r.Make(t.Context(), "one", false); err != nil || again != l {
		t.Errorf("%v, %v", again, err)
	}
}

func TestALinkFromARecordIsJudged(t *testing.T) {
	good := slot(99).link("/r", "one", false)
	if _, err := good.slot(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Link){
		"name": func(l *Link) { l.Name = "be0099" }, "small": func(l *Link) { l.Name = "be1" }, "lo": func(l *Link) { l.Name = "lo" },
		"peer": func(l *Link) { l.Peer = "eth1" }, "address": func(l *Link) { l.Address4 = netip.PrefixFrom(Gateway4, 32) },
		"mac": func(l *Link) { l.MAC = l.HostMAC }, "tap": func(l *Link) { l.Tap = true },
	} {
		l := good
		change(&l)
		if _, err := l.slot(); err == nil {
			t.Errorf("%s: %+v was believed", name, l)
		}
	}
}

func FuzzParseSlot(f *testing.F) {
	for _, s := range []string{"be16", "be15", "be4194302", "be4194303", "be016", "be+16", "be", "lo", "bp16", "be99999999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, ok := parseSlot(s)
		if !ok {
			return
		}
		if n.name() != s || !Sandboxes4.Contains(n.address4()) || !Sandboxes6.Contains(n.address6()) || n.address4() == Gateway4 {
			t.Errorf("%q is slot %d", s, n)
		}
		if back, ok := slotOfKey(n.key(n.address6().AsSlice())); !ok || back != n {
			t.Errorf("the key of %d is of %d", n, back)
		}
	})
}
