package hostagent

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/netns"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// door is one of the gate's, in the router: it says from where it was reached.
func door(t *testing.T, r *rig) {
	t.Helper()
	path := filepath.Join(r.cfg.Dir, "net", "router")
	for _, gateway := range []string{network.Gateway4.String(), network.Gateway6.String()} {
		l, err := netns.Listen(path, "tcp", net.JoinHostPort(gateway, fmt.Sprint(network.ConnectPort)), nil)
		must(t, err)
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
				_, _ = io.WriteString(c, host+"\n")
				_ = c.Close()
			}
		}()
	}
}

// reaches is what a sandbox hears at both doors of the gate.
func reaches(c *client, name string) (four, six string) {
	o := c.exec(name, "sh", "-c", fmt.Sprintf("nc -w 2 %s %d </dev/null; echo; nc -w 2 %s %d </dev/null", network.Gateway4, network.ConnectPort, network.Gateway6, network.ConnectPort))
	four, six, _ = strings.Cut(string(o.stdout), "\n\n")
	return strings.TrimSpace(four), strings.TrimSpace(six)
}

// TestRealSandboxesReachTheGateAlone: cold and claimed ones, in each tier, before and after a restart; with
// what they read of it; and nothing of it is left.
func TestRealSandboxesReachTheGateAlone(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	for _, tier := range []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR} {
		t.Run(tierName(tier), func(t *testing.T) {
			r := realRig(t)
			r.sched.lease = busyLease
			r.start()
			if !r.run.h.offers(tier) {
				t.Skipf("skipped: this host has no tier %s: %v", tierName(tier), r.run.h.missing())
			}
			networkLifeOf(t, r, tier)
		})
	}
}

// busyLease is that of the product. Beside emulated VMs a host may miss every renewal of the short one of other tests.
const busyLease = 9 * time.Second

// TestRealMachinesReachTheGateAlone: likewise machines, whose links are taps. To boot one may take long.
func TestRealMachinesReachTheGateAlone(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	r := realRig(t)
	r.sched.lease = busyLease
	r.cfg.Tiers, r.cfg.Hello = []string{"container", "microvm"}, slowHello
	r.start()
	eventually(t, proveTime+time.Minute, "machines are proved", func() bool { return len(r.run.h.tiers.toProve()) == 0 })
	if !r.run.h.offers(corev1.Tier_TIER_MICROVM) || !r.run.h.net.has(driver.MicroVM) {
		t.Skipf("skipped: machines have no network here: %v", r.run.h.missing())
	}
	networkLifeOf(t, r, corev1.Tier_TIER_MICROVM)
}

func networkLifeOf(t *testing.T, r *rig, tier corev1.Tier) {
	g := newGate(r)
	g.roots = testRoot(t, "cell")
	g.start()
	door(t, r)
	eventually(t, soonEnough, "the gate has heard of the host", r.run.h.net.answers)
	p := newPool(r)
	_, err := p.prepare(prepareIn(tier))
	must(t, err)
	warm, cold := ref("ann", 5, 6), ref("bob", 5, 6)
	for _, one := range []*corev1.SessionRef{warm, cold} {
		began := time.Now()
		reply := r.mustWake(one, func(w *hostv1.WakeRequest) { tierTerms(tier)(w); withActor(w) })
		t.Logf("wake %s, warm %q %s", time.Since(began), reply.GetWarm(), reply.GetColdReason())
		for _, s := range reply.GetTiming().GetSteps() {
			if n := s.GetName(); strings.Contains(n, "network") || strings.HasSuffix(n, "host.bind") {
				t.Logf("  %-30s %8.2f ms", n, ms(s.GetTook().AsDuration()))
			}
		}
		if (reply.GetWarm() != "") != (one == warm) {
			t.Errorf("%v", reply)
		}
		id := driverID(one)
		if one == warm {
			id = ids.SandboxID(reply.GetWarm())
		}
		b := g.of(id)
		c := r.client(one)
		if four, six := reaches(c, "n1"); four == "" || four != b.GetAddress4() || six != b.GetAddress6() {
			t.Errorf("at the doors it is %q and %q: %v", four, six, b)
		}
		readsOf(t, c)
	}
	r.halt()
	r.start()
	eventually(t, soonEnough, "the gate has heard of the next process", func() bool { return r.run.h.net.answers() && g.count() == 2 })
	if four, six := reaches(r.client(warm), "n2"); four == "" || six == "" {
		t.Errorf("after a restart at the doors it is %q and %q", four, six)
	}
	g.stop()
	_, err = r.sleep(cold, time.Time{}, true)
	must(t, err)
	must(t, r.delete(warm))
	if all, err := r.run.h.net.list(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("left are %v %v", all, err)
	}
	r.halt()
	if _, err := netns.Open(filepath.Join(r.cfg.Dir, "net", "router")); err == nil {
		t.Error("the router of a host without links is left")
	}
}

// readsOf looks at what a sandbox with a network finds.
func readsOf(t *testing.T, c *client) {
	o := c.exec("r1", "sh", "-c", `cat /etc/resolv.conf /run/berth/egress.json /run/berth/session.json; echo $SSL_CERT_FILE; tail -n 3 $SSL_CERT_FILE; ls -l /run/berth; echo x > /run/berth/trust.pem; echo x > /etc/resolv.conf; ip addr; ip route`)
	out := string(o.stdout)
	for _, want := range []string{"nameserver 100.64.0.1", `{"rules":[]}`, `"network": "named"`, "/run/berth/trust.pem", "-----END CERTIFICATE-----", "trust.jks", "eth0", "default via 100.64.0.1"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in %s", want, out)
		}
	}
	if n := strings.Count(string(o.stderr), "ead-only"); n != 2 {
		t.Errorf("it could write: %q", o.stderr)
	}
}

// TestTheKernelEndsWhatLeavesWithTheLease: the agent stands still, or is dead; by the kernel's own clock
// nothing gets to the gate's doors when the host's lease is over, and it does again when the agent is back.
func TestTheKernelEndsWhatLeavesWithTheLease(t *testing.T) {
	r, drv, _, g := netRig(t)
	dir := filepath.Join(r.cfg.Dir, "net")
	r.tune = func(h *host) {
		l, err := openLinks(t.Context(), dir, testLog())
		if err != nil {
			t.Skipf("skipped: %v", err)
		}
		must(t, h.net.use(l, dir))
	}
	r.sched.lease = 1500 * time.Millisecond
	r.cfg.Margin = 100 * time.Millisecond
	t.Cleanup(func() { clearNetwork(t, r) })
	g.start()
	r.start()
	door(t, r)
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	f, ok, err := r.run.h.net.lookUp(t.Context(), driverID(one))
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	inside := filepath.Join(t.TempDir(), "sandbox")
	_, err = netns.Pin(inside)
	must(t, err)
	t.Cleanup(func() { must(t, netns.Remove(inside)) })
	must(t, f.Link.Plug(inside))
	reach := func(gateway netip.Addr) bool {
		return netns.Do(inside, func() error {
			c, err := (&net.Dialer{Timeout: 200 * time.Millisecond}).Dial("tcp", netip.AddrPortFrom(gateway, network.ConnectPort).String())
			if err == nil {
				_ = c.Close()
			}
			return err
		}) == nil
	}
	both := func() bool { return reach(network.Gateway4) && reach(network.Gateway6) }
	none := func() bool { return !reach(network.Gateway4) && !reach(network.Gateway6) }
	eventually(t, soonEnough, "it reaches the doors", both)
	slow := make(chan struct{})
	r.sched.with(func() { r.sched.slow = slow })
	eventually(t, soonEnough, "it reaches nothing while the agent stands still", none)
	r.sched.with(func() { r.sched.slow = nil })
	close(slow)
	eventually(t, soonEnough, "it reaches the doors again", both)
	r.halt()
	eventually(t, soonEnough, "it reaches nothing without an agent", none)
	r.nextLife(drv.readyProcs)
	eventually(t, soonEnough, "it reaches the doors with the next agent", both)
	_, err = r.sleep(one, time.Time{}, true)
	must(t, err)
	if !none() {
		t.Error("it reaches a door though its session sleeps")
	}
}
