package hostagent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

const soonEnough = 10 * time.Second

// TestAWakeIsBoundToItsEpoch: gate and kernel know whose the link is before the wake is answered, with who
// had it woken; the next epoch has another link, and nothing is left of the one before.
func TestAWakeIsBoundToItsEpoch(t *testing.T) {
	r, _, l, g := netRig(t)
	g.start()
	r.start()
	eventually(t, soonEnough, "the gate has heard of the host", r.run.h.net.answers)
	one, two := ref("ann", 5, 6), ref("ann", 5, 7)
	reply := r.mustWake(one, withActor)
	id := driverID(one)
	b := g.of(id)
	if !leaves(l, g, id, one) || b.GetActor().GetSubject() != "u1" || b.GetPlan() != "free" || b.GetTemplate() != "default" || b.GetSessionName() != "default" {
		t.Fatalf("bound: %v", b)
	}
	if link := l.all[string(id)]; b.GetAddress4() != link.Address4.Addr().String() || b.GetAddress6() != link.Address6.Addr().String() {
		t.Errorf("%v is not %v", b, link)
	}
	var steps []string
	for _, s := range reply.GetTiming().GetSteps() {
		steps = append(steps, s.GetName())
	}
	if !slices.Contains(steps, "host.network") || !slices.Contains(steps, "host.bind") {
		t.Errorf("steps: %v", steps)
	}
	if got := r.inRun(id, "egress.json"); got != `{"rules":[]}` {
		t.Errorf("egress.json: %s", got)
	}
	if got := r.inRun(id, "resolv.conf"); !strings.Contains(got, "nameserver 100.64.0.1\n") {
		t.Errorf("resolv.conf: %s", got)
	}
	if o := r.client(one).exec("x1", "sh", "-c", "echo $SSL_CERT_FILE $NODE_EXTRA_CA_CERTS"); string(o.stdout) != "/run/berth/trust.pem /run/berth/trust.pem\n" {
		t.Errorf("an exec trusts %q", o.stdout)
	}
	again := resume(r, one)
	r.mustWake(two, func(w *hostv1.WakeRequest) { again(w); withActor(w) })
	if !leaves(l, g, driverID(two), two) || l.count() != 1 {
		t.Errorf("the next epoch: %v, %d links", g.of(driverID(two)), l.count())
	}
	eventually(t, soonEnough, "the gate forgets the one before", func() bool { return g.count() == 1 })
	must(t, g.notice(r, two, driverID(two), `{"a":1}`))
	for what, err := range map[string]error{
		"an earlier epoch": g.notice(r, one, driverID(two), `{"a":2}`), "its sandbox": g.notice(r, one, id, `{"a":2}`),
		"another session": g.notice(r, ref("bob", 5, 7), driverID(two), `{"a":2}`), "a later epoch": g.notice(r, ref("ann", 5, 8), driverID(two), `{"a":2}`),
	} {
		if !errs.Is(err, errkind.StaleEpoch) || !r.noted.have("fenced", "notice") {
			t.Errorf("a notice for %s: %v", what, err)
		}
	}
	if err := g.notice(r, two, driverID(two), "no json"); !errs.Is(err, errkind.Invalid) {
		t.Errorf("a notice that is none: %v", err)
	}
	if err := g.notice(r, two, driverID(two), `"`+strings.Repeat("x", maxNotice)+`"`); !errs.Is(err, errkind.TooLarge) {
		t.Errorf("a notice that is too large: %v", err)
	}
	if got := r.inRun(driverID(two), "egress.json"); got != `{"a":1}` {
		t.Errorf("egress.json: %s", got)
	}
}

// TestNothingOfANetworkIsLeft: after a sleep, a delete, an end by itself; and a stopped sandbox was closed
// first (netProcs.Stop looks).
func TestNothingOfANetworkIsLeft(t *testing.T) {
	r, drv, l, g := netRig(t)
	g.start()
	r.start()
	for how, end := range map[string]func(){
		"sleep":  func() { _, err := r.sleep(ref("ann", 5, 6), time.Time{}, true); must(t, err) },
		"delete": func() { must(t, r.delete(ref("bob", 5, 6))) },
		"exit":   func() { drv.murder(driverID(ref("cat", 5, 6))) },
		"disown": func() {
			r.sched.disown(ref("dan", 5, 6))
			r.sched.set(ref("eve", 1, 1), 0)
			r.run.h.askRejoin()
		},
	} {
		user := map[string]string{"sleep": "ann", "delete": "bob", "exit": "cat", "disown": "dan"}[how]
		one := ref(user, 5, 6)
		r.mustWake(one, nil)
		eventually(t, soonEnough, how+": it is bound", func() bool { return leaves(l, g, driverID(one), one) })
		end()
		eventually(t, soonEnough, how+": nothing is left", func() bool { return l.count() == 0 && len(l.names()) == 0 && g.count() == 0 })
		if err := g.notice(r, one, driverID(one), `{}`); !errs.Is(err, errkind.StaleEpoch) {
			t.Errorf("%s: a notice afterwards: %v", how, err)
		}
	}
}

// TestAFailedWakeLeavesNoLink, whatever step fails; and the same epoch goes well next time.
func TestAFailedWakeLeavesNoLink(t *testing.T) {
	r, _, l, g := netRig(t)
	g.start()
	r.start()
	h := r.run.h
	for i, name := range []string{"host.disk.attach", "host.place", "host.network", "host.driver.create", "host.guest.hello", "host.bind"} {
		h.steps.Fault = func(step string) error {
			if step == name {
				return errors.New("it was asked to fail")
			}
			return nil
		}
		one := ref(fmt.Sprint("u", i), 5, 6)
		if _, err := r.wake(one, nil); err == nil {
			t.Errorf("%s: the wake went well", name)
		}
		if l.count() != 0 || len(l.names()) != 0 {
			t.Errorf("%s: %d links are left, %v are bound", name, l.count(), l.names())
		}
		h.steps.Fault = nil
		r.mustWake(one, nil)
		eventually(t, soonEnough, "it is bound", func() bool { return leaves(l, g, driverID(one), one) })
		must(t, r.delete(one))
	}
	l.with(func() { l.fails["Make"] = 1 })
	if _, err := r.wake(ref("bob", 5, 6), nil); !errs.Is(err, errkind.Unavailable) || l.count() != 0 {
		t.Errorf("without a link: %v", err)
	}
	l.with(func() { l.fails["Bind"] = 1000 })
	one := ref("cat", 5, 6)
	r.mustWake(one, nil)
	if l.through(driverID(one)) {
		t.Error("it is bound though the kernel refused")
	}
	l.with(func() { clear(l.fails) })
	eventually(t, soonEnough, "it is bound with the next grant", func() bool { return leaves(l, g, driverID(one), one) })
}

// TestWithoutAGateNothingLeaves: a session wakes, quickly, and has a way out as soon as the gate is there,
// without another wake; likewise when a gate comes back that forgot everything.
func TestWithoutAGateNothingLeaves(t *testing.T) {
	r, _, l, g := netRig(t)
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 5, 6)
	began := time.Now()
	r.mustWake(one, nil)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the wake took %s", took)
	}
	id := driverID(one)
	if l.through(id) {
		t.Fatal("something leaves")
	}
	if got := r.inRun(id, "egress.json"); !strings.Contains(got, `"closed"`) {
		t.Errorf("egress.json: %s", got)
	}
	g.start()
	eventually(t, soonEnough, "it has a way out", func() bool { return leaves(l, g, id, one) })
	g.stop()
	r.mustWake(two, nil)
	if leaves(l, g, driverID(two), two) {
		t.Error("something leaves without a gate")
	}
	g.start()
	eventually(t, soonEnough, "both have a way out", func() bool { return leaves(l, g, id, one) && leaves(l, g, driverID(two), two) })
}

// TestAHangingGateHoldsUpAWakeForAMomentOnly.
func TestAHangingGateHoldsUpAWakeForAMomentOnly(t *testing.T) {
	r, _, l, g := netRig(t)
	r.cfg.Network.GateTimeout = 300 * time.Millisecond
	g.start()
	r.start()
	eventually(t, soonEnough, "the gate has heard of the host", r.run.h.net.answers)
	slow := make(chan struct{})
	g.with(func() { g.slow = slow })
	one := ref("ann", 5, 6)
	began := time.Now()
	r.mustWake(one, nil)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the wake took %s", took)
	}
	close(slow)
	eventually(t, soonEnough, "it has a way out", func() bool { return leaves(l, g, driverID(one), one) })
}

// TestARestartKeepsLinksAndBindsThemAgain: the link is the same, what was let through is, and the gate hears
// again whose it is and who had it woken.
func TestARestartKeepsLinksAndBindsThemAgain(t *testing.T) {
	r, drv, l, g := netRig(t)
	g.start()
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 5, 6)
	r.mustWake(one, withActor)
	id := driverID(one)
	eventually(t, soonEnough, "it is bound", func() bool { return leaves(l, g, id, one) })
	g.stop()
	r.mustWake(two, nil) // not bound when the process ends
	before := l.all[string(id)]
	stray, err := l.Make(t.Context(), "stray", false)
	must(t, err)
	must(t, l.Bind(t.Context(), stray))
	r.nextLife(drv.readyProcs)
	if after := l.all[string(id)]; after != before || !slices.Contains(l.names(), string(id)) {
		t.Errorf("%v is %v now", before, after)
	}
	g.start()
	eventually(t, soonEnough, "both are bound", func() bool { return leaves(l, g, id, one) && leaves(l, g, driverID(two), two) })
	r.halt()
	l.with(func() { l.fails["List"] = 2 }) // as it takes over
	r.nextLife(drv.readyProcs)
	r.run.h.askRejoin()
	eventually(t, soonEnough, "what was missed is taken over", func() bool { return leaves(l, g, id, one) && leaves(l, g, driverID(two), two) })
	if a := g.of(id).GetActor(); !proto.Equal(a, func() proto.Message { w := &hostv1.WakeRequest{}; withActor(w); return w.Actor }()) {
		t.Errorf("the actor is %v", a)
	}
	eventually(t, soonEnough, "a link of nothing is removed", func() bool { return l.count() == 2 && len(l.names()) == 2 })
	must(t, r.delete(one))
	must(t, r.delete(two))
	if l.count() != 0 {
		t.Errorf("%d links", l.count())
	}
}

// TestAWarmClaimKeepsItsLink, which was nobody's until then and let nothing through.
func TestAWarmClaimKeepsItsLink(t *testing.T) {
	r, _, l, g := netRig(t)
	g.start()
	r.start()
	eventually(t, soonEnough, "the gate has heard of the host", r.run.h.net.answers)
	p := newPool(r)
	names := p.must(2)
	if l.count() != 2 || len(l.names()) != 0 {
		t.Fatalf("%d links, %v bound", l.count(), l.names())
	}
	if got := r.inRun(names[0], "egress.json"); !strings.Contains(got, `"closed"`) {
		t.Errorf("egress.json: %s", got)
	}
	before := map[string]network.Link{}
	all, err := l.List(t.Context())
	must(t, err)
	for _, f := range all {
		before[f.Link.Sandbox] = f.Link
	}
	one := ref("ann", 5, 6)
	reply := r.mustWake(one, withActor)
	id := ids.SandboxID(reply.GetWarm())
	if !slices.Contains(names, id) {
		t.Fatalf("%v", reply)
	}
	if !leaves(l, g, id, one) || l.all[string(id)] != before[string(id)] {
		t.Errorf("%v, the link is %v", g.of(id), l.all[string(id)])
	}
	if l.made != 2 {
		t.Errorf("%d links were made", l.made)
	}
	l.with(func() { // the other's link is lost
		for name := range l.all {
			if name != string(id) {
				delete(l.all, name)
			}
		}
	})
	two := ref("bob", 5, 6)
	if reply := r.mustWake(two, nil); reply.GetWarm() != "" || !strings.Contains(reply.GetColdReason(), "no such link") || !leaves(l, g, driverID(two), two) {
		t.Errorf("%v", reply)
	}
	_, err = r.sleep(one, time.Time{}, true)
	must(t, err)
	must(t, r.delete(two))
	eventually(t, soonEnough, "nothing is left", func() bool { return l.count() == 0 && g.count() == 0 })
}

// TestAFailedClaimLeavesNoLink: the session starts cold with a link of its own, and the warm one's is gone.
func TestAFailedClaimLeavesNoLink(t *testing.T) {
	r, drv, l, g := netRig(t)
	g.start()
	r.start()
	eventually(t, soonEnough, "the gate has heard of the host", r.run.h.net.answers)
	p := newPool(r)
	for i, fault := range []string{claimRefused, claimHalf, claimEnter, claimDead} {
		warm := p.must(1)[0]
		drv.set(func() { drv.fault = fault })
		one := ref(fmt.Sprint("u", i), 5, 6)
		if reply := r.mustWake(one, nil); reply.GetWarm() != "" || reply.GetColdReason() == "" {
			t.Errorf("%s: %v", fault, reply)
		}
		drv.set(func() { drv.fault = "" })
		if !leaves(l, g, driverID(one), one) {
			t.Errorf("%s: the session has no way out", fault)
		}
		eventually(t, soonEnough, fault+": the link of the warm one is gone", func() bool { return l.count() == 1 && !l.through(warm) && g.count() == 1 })
		must(t, r.delete(one))
	}
}

// TestALostLeaseEndsWhatLeaves: at once when scheduler says that it does not know it; and while nothing is
// heard, by the kernel's own clock; it goes on when the host knows what it owns.
func TestALostLeaseEndsWhatLeaves(t *testing.T) {
	r, _, l, g := netRig(t)
	r.sched.lease = 1500 * time.Millisecond
	r.cfg.Margin = 100 * time.Millisecond
	g.start()
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	id := driverID(one)
	out := func() bool { return leaves(l, g, id, one) }
	eventually(t, soonEnough, "it leaves", out)
	r.sched.with(func() { r.sched.mute = true })
	eventually(t, soonEnough, "nothing leaves", func() bool { return !l.through(id) && g.of(id) == nil })
	if r.run.h.lease.check() == nil {
		t.Error("the kernel ended it before the host did")
	}
	r.sched.with(func() { r.sched.mute = false })
	eventually(t, soonEnough, "it leaves again", out)
	r.sched.with(func() { r.sched.lease = time.Hour })
	eventually(t, soonEnough, "a long lease", func() bool { return r.run.h.lease.left() > time.Minute })
	r.run.h.lease.lost()
	eventually(t, soonEnough, "nothing leaves at once", func() bool { return !l.through(id) })
}

// TestWhatIsLentRunsOutByItself: the loop that renews stands still, as when the process is stopped; what
// leaves ends with the lease, and a lending that was under way when the process stood still ends nothing late.
func TestWhatIsLentRunsOutByItself(t *testing.T) {
	r, _, l, g := netRig(t)
	r.sched.lease = 900 * time.Millisecond
	r.cfg.Margin = 100 * time.Millisecond
	g.start()
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	id := driverID(one)
	eventually(t, soonEnough, "it leaves", func() bool { return leaves(l, g, id, one) })
	slow := make(chan struct{})
	r.sched.with(func() { r.sched.slow = slow })
	eventually(t, soonEnough, "nothing leaves", func() bool { return !l.through(id) && g.of(id) == nil })
	close(slow)
	r.sched.with(func() { r.sched.slow = nil })
	eventually(t, soonEnough, "it leaves again", func() bool { return leaves(l, g, id, one) })

	now := 100 * time.Second
	held := &pausedLinks{memLinks: newMemLinks(), pause: func() { now += time.Hour }}
	h := &host{lease: heldLease(&now), log: testLog()}
	n := newNets(h)
	n.links = held
	n.lend(t.Context())
	if len(held.lends) != 2 || held.lends[0] <= 0 || held.lends[1] != 0 {
		t.Errorf("lent %v", held.lends)
	}
}

// pausedLinks stand still before the kernel takes a lease.
type pausedLinks struct {
	*memLinks
	pause func()
	lends []time.Duration
}

func (p *pausedLinks) Lease(left time.Duration) error {
	p.lends = append(p.lends, left)
	p.pause()
	return nil
}

// TestASlowGateDelaysNoRenewal of the lease, nor what the kernel hears of it.
func TestASlowGateDelaysNoRenewal(t *testing.T) {
	r, _, l, _ := netRig(t)
	r.sched.lease = 900 * time.Millisecond
	r.cfg.Margin = 100 * time.Millisecond
	r.start() // nobody serves: each call waits for a gate
	lent := func() (n int) { l.with(func() { n = l.lent }); return n }
	from := lent()
	eventually(t, 3*time.Second, "the kernel hears of five grants", func() bool { return lent() >= from+5 })
	if err := r.run.h.lease.check(); err != nil {
		t.Error(err)
	}
}

// TestRulesThatWereTakenAwayAreRestored, and what is bound is again.
func TestRulesThatWereTakenAwayAreRestored(t *testing.T) {
	r, _, l, g := netRig(t)
	r.cfg.Poll = 50 * time.Millisecond
	g.start()
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	id := driverID(one)
	eventually(t, soonEnough, "it leaves", func() bool { return leaves(l, g, id, one) })
	l.with(func() { l.flushed = true; l.drops = map[string]uint64{"source": 4} })
	eventually(t, soonEnough, "it was noticed", func() bool { flushed := true; l.with(func() { flushed = l.flushed }); return !flushed })
	eventually(t, soonEnough, "it leaves again", func() bool { return leaves(l, g, id, one) })
	l.with(func() { l.fails["Check"] = 1000 })
	eventually(t, soonEnough, "scheduler hears of it", func() bool { return strings.Contains(r.run.h.unhealthy(), "network") })
	l.with(func() { clear(l.fails) })
	eventually(t, soonEnough, "it is well", func() bool { return r.run.h.unhealthy() == "" })
}

// TestAStrayLinkIsTold, and removed by the next sweep.
func TestAStrayLinkIsTold(t *testing.T) {
	r, _, l, _ := netRig(t)
	r.start()
	op, err := r.bus.Connect(r.context(), operator())
	must(t, err)
	t.Cleanup(op.Close)
	eventually(t, soonEnough, "it is told", func() bool { // the first sweep may take it away at once
		_, err := l.Make(t.Context(), "stray", false)
		must(t, err)
		inv, err := invokeInventory(r, op)
		must(t, err)
		return slices.ContainsFunc(inv.GetStrays(), func(s string) bool { return strings.HasPrefix(s, "stray: link ") })
	})
	r.run.h.askRejoin()
	eventually(t, soonEnough, "it is removed", func() bool { return l.count() == 0 })
}

// TestAFailedCanaryOffersNoTierWithANetwork: no link is made, and the host says why.
func TestAFailedCanaryOffersNoTierWithANetwork(t *testing.T) {
	caps := map[driver.Tier]driver.Capabilities{driver.Container: {Native: true, Network: true}, driver.WASM: {}}
	drv := newProcs(t)
	drv.caps = caps
	h := &host{cfg: NewConfig(), lease: newLease(0, false), log: testLog(), drv: drv, caps: map[driver.Tier]driver.Capabilities{}}
	for tier, c := range caps {
		h.caps[tier] = c
	}
	h.cfg.Dir, h.cfg.Tiers = t.TempDir(), []string{"container", "wasm"}
	h.proof = func(context.Context, []driver.Tier) map[driver.Tier]error { return nil }
	h.net = newNets(h)
	h.net.opens = func(context.Context, string) (links, error) { return nil, errors.New("something got through") }
	h.net.begin(t.Context())
	must(t, h.net.open())
	must(t, h.proveTiers(t.Context()))
	h.proveLater(t.Context())
	if got := h.tiers.offered(); len(got) != 1 || got[0] != driver.WASM {
		t.Errorf("offered are %v", got)
	}
	if why := strings.Join(h.missing(), "; "); !strings.Contains(why, "network: ") || !strings.Contains(why, "something got through") {
		t.Errorf("missing: %s", why)
	}
	if l, err := h.net.make(t.Context(), "x", driver.Container); l != nil || err != nil {
		t.Errorf("%v %v", l, err)
	}
}
