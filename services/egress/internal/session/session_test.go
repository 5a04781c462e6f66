package session

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

func TestNothingLeavesBeforeThePoliciesAreKnown(t *testing.T) {
	w := newWorld(t, pypi)
	w.known.Store(false)
	_, _, err := open(t, w.bind(1, 1), "pypi.org")
	refusedAs(t, err, policy.NoPolicy)
	if w.Closed() == "" {
		t.Error("the table does not say that it is closed")
	}
}

func TestEmptyPolicyLetsNothingOut(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	for _, doc := range []string{"rules: []", "contact: x@y.example"} {
		w.allow(doc, 2)
		w.Refresh()
		if _, _, err := open(t, s, "pypi.org"); err == nil {
			t.Errorf("%q lets something out", doc)
		}
	}
	w.pol.Store(policy.Merge(nil))
	w.Refresh()
	_, _, err := open(t, s, "pypi.org")
	refusedAs(t, err, policy.NoPolicy)
}

func TestRevokedPolicyResetsWhatIsOpen(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	l, reset, err := open(t, s, "pypi.org")
	must(t, err)
	other, stays, err := open(t, s, "files.pythonhosted.org")
	must(t, err)
	defer other.Close()
	old := s.Policy().Judge(ask("pypi.org"))
	w.allow(`rules: [{name: files, allow: {hosts: ["*.pythonhosted.org"], ports: [443], protocol: https}}]`, 2)
	w.Refresh()
	closed(t, reset)
	refusedAs(t, l.Bytes(1, 1), policy.Revoked)
	l.Close()
	must(t, other.Bytes(1, 1))
	select {
	case <-stays:
		t.Error("what is still allowed was reset")
	default:
	}
	// Judged before the change, opened after it.
	if _, err = s.Open(ask("pypi.org"), old, func() {}); err == nil {
		t.Error("what was judged by the earlier policy is opened")
	}
}

// TestAPolicyReadBeforeAChangeIsNotKept: a refresh that read the old policy does not store it over the new one.
func TestAPolicyReadBeforeAChangeIsNotKept(t *testing.T) {
	w := newWorld(t, "rules: []")
	s := w.bind(1, 1)
	w.allow(pypi, 2)
	refreshed := make(chan struct{})
	change := func() {
		w.allow("rules: []", 3)
		go func() { defer close(refreshed); w.Refresh() }()
		select {
		case <-refreshed: // it came in between
		case <-time.After(100 * time.Millisecond): // it waits for this one
		}
	}
	w.read.Store(&change)
	w.Refresh()
	closed(t, refreshed)
	if g := s.Policy().Generation(); g != 3 {
		t.Errorf("policy %d is kept, 3 is in force", g)
	}
}

// A rule that now puts a secret in, or refuses credentials, is not what the connection was opened by.
func TestChangedGrantResetsWhatIsOpen(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	l, reset, err := open(t, s, "pypi.org")
	must(t, err)
	defer l.Close()
	w.allow(`rules: [{name: pypi, allow: {hosts: [pypi.org], ports: [443], protocol: https}, refuse_credentials: true}]`, 2)
	w.Refresh()
	closed(t, reset)
}

func TestEndedLeaseResetsAndRefuses(t *testing.T) {
	w := newWorld(t, pypi)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	defer func() { cancel(); <-done }()
	s := w.bind(1, 1)
	l, reset, err := open(t, s, "pypi.org")
	must(t, err)
	defer l.Close()
	w.boot.Store(int64(time.Hour))
	closed(t, reset)
	refusedAs(t, l.Bytes(1, 0), policy.NoLease)
	_, _, err = open(t, s, "pypi.org")
	refusedAs(t, err, policy.NoLease)
	w.Lease(2 * time.Hour)
	again, _, err := open(t, s, "pypi.org")
	must(t, err)
	again.Close()
}

func TestWhatCannotBeRecordedIsRefused(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	w.fill(errors.New("full"))
	_, _, err := open(t, s, "pypi.org")
	refusedAs(t, err, policy.AuditAway)
	refusedAs(t, s.Note(&egressv1.Record{Authority: "pypi.org", Verdict: egressv1.Verdict_VERDICT_ALLOWED}), policy.AuditAway)
	w.fill(nil)
	l, _, err := open(t, s, "pypi.org")
	must(t, err)
	l.Close()
}

func TestLaterEpochReplacesAndEarlierIsRefused(t *testing.T) {
	w := newWorld(t, pypi)
	old := w.bind(1, 4)
	_, reset, err := open(t, old, "pypi.org")
	must(t, err)
	fresh := w.bind(1, 5)
	closed(t, reset)
	if _, _, err := open(t, old, "pypi.org"); err == nil {
		t.Error("the earlier epoch goes on")
	}
	if _, err := w.Bind(binding(1, 4)); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("an earlier epoch: %v", err)
	}
	if again := w.bind(1, 5); again != fresh {
		t.Error("the same binding again is another one")
	}
	s, ok := w.ByAddress(netip.MustParseAddr("::ffff:100.64.0.1"))
	if !ok || s != Session(fresh) {
		t.Error("the address does not lead to the later epoch")
	}
	w.Unbind(binding(1, 4).Session, "b1-5") // another epoch's word
	if _, ok := w.ByAddress(netip.MustParseAddr("100.64.0.1")); !ok {
		t.Error("an unbind of an earlier epoch ended it")
	}
	w.Unbind(binding(1, 5).Session, "b1-5")
	if _, ok := w.ByAddress(netip.MustParseAddr("fd62:6572:7468:1::1")); ok {
		t.Error("it is bound after its unbind")
	}
}

func TestSyncEndsWhatItDoesNotName(t *testing.T) {
	w := newWorld(t, pypi)
	must(t, w.Sync("boot1", []*egressv1.Binding{binding(1, 1), binding(2, 1)}))
	must(t, w.Sync("boot1", []*egressv1.Binding{binding(2, 1)}))
	if n := w.Figures().Sessions; n != 2 {
		t.Errorf("%d sessions: a list that may be older than a binding ended it", n)
	}
	w.boot.Store(int64(freshTime) + 1)
	must(t, w.Sync("boot1", []*egressv1.Binding{binding(2, 1)}))
	if n := w.Figures().Sessions; n != 1 {
		t.Errorf("%d sessions after a list of one", n)
	}
	must(t, w.Sync("boot2", nil))
	if n := w.Figures().Sessions; n != 0 {
		t.Errorf("%d sessions after another boot", n)
	}
}

func TestLimitsOfARule(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	var list []Live
	for range 20 {
		l, _, err := open(t, s, "pypi.org")
		must(t, err)
		list = append(list, l)
	}
	_, _, err := open(t, s, "pypi.org")
	refusedAs(t, err, policy.Rate) // a second
	w.now.Add(int64(time.Second))
	for range 10 {
		l, _, err := open(t, s, "pypi.org")
		must(t, err)
		list = append(list, l)
	}
	w.now.Add(int64(time.Second))
	_, _, err = open(t, s, "pypi.org")
	refusedAs(t, err, policy.Rate) // at once
	must(t, list[0].Bytes(1<<19, 1<<19))
	refusedAs(t, list[1].Bytes(1, 0), policy.Bytes)
	for _, l := range list {
		l.Close()
		l.Close()
	}
	_, _, err = open(t, s, "pypi.org")
	refusedAs(t, err, policy.Bytes)
	_, _, err = open(t, w.bind(1, 2), "pypi.org")
	refusedAs(t, err, policy.Bytes) // also after the session slept
	if f := w.Figures(); f.Open != 0 || f.BytesOut != 1<<19+1 {
		t.Errorf("%+v", f)
	}
	w.now.Add(int64(24 * time.Hour))
	l, _, err := open(t, w.bind(1, 2), "pypi.org")
	must(t, err)
	must(t, l.Bytes(1, 1))
	l.Close()
}

// A gate that restarts knows what a session has used of the day.
func TestBytesOfTheDayOutliveARestart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bytes.json")
	first := newWorld(t, pypi)
	first.cfg.Kept = file
	l, _, err := open(t, first.bind(1, 1), "pypi.org")
	must(t, err)
	must(t, l.Bytes(1<<19, 1<<19))
	l.Close()
	first.keep()
	second := newWorld(t, pypi)
	second.uses.load(file)
	_, _, err = open(t, second.bind(1, 1), "pypi.org")
	refusedAs(t, err, policy.Bytes)
	second.now.Add(int64(24 * time.Hour))
	l, _, err = open(t, second.bind(1, 1), "pypi.org")
	must(t, err)
	l.Close()
	must(t, os.WriteFile(file, []byte("{torn"), 0o600))
	newWorld(t, pypi).uses.load(file)
}

func TestConnectionsAreBounded(t *testing.T) {
	w := newWorld(t, `rules: [{name: x, allow: {hosts: [x.example.com], ports: [443], protocol: https}}]`)
	a, b := w.bind(1, 1), w.bind(2, 1)
	n := 0
	for ; n < 100; n++ {
		if _, _, err := open(t, a, "x.example.com"); err != nil {
			refusedAs(t, err, policy.Rate)
			break
		}
	}
	if n != 50 {
		t.Errorf("one session has %d open, 50 are allowed", n)
	}
	for n = 0; n < 100; n++ {
		if _, _, err := open(t, b, "x.example.com"); err != nil {
			break
		}
	}
	if n != 10 {
		t.Errorf("the second has %d open, 10 are left", n)
	}
}

// Each name below an allowed one tells something to whoever serves it: their number is bounded.
func TestNewHostsAreBounded(t *testing.T) {
	w := newWorld(t, `rules: [{name: x, allow: {hosts: ["*.example.com"], ports: [443], protocol: https}}]`)
	s := w.bind(1, 1)
	n := 0
	for ; n < 2*newHosts; n++ {
		l, _, err := open(t, s, fmt.Sprintf("h%d.example.com", n))
		if err != nil {
			refusedAs(t, err, policy.Rate)
			break
		}
		l.Close()
	}
	if n != newHosts {
		t.Errorf("%d new hosts were reached, %d are allowed", n, newHosts)
	}
	l, _, err := open(t, s, "h1.example.com")
	must(t, err)
	l.Close()
}

func TestNamesStandForOneNameEach(t *testing.T) {
	w := newWorld(t, pypi)
	a, b := w.bind(1, 1), w.bind(2, 1)
	four, six, ok := a.Assign("pypi.org")
	if !ok || !Names4.Contains(four) || !Names6.Contains(six) {
		t.Fatalf("%s %s", four, six)
	}
	for _, x := range []netip.Addr{four, six, netip.AddrFrom16(four.As16())} {
		if n, ok := a.NameOf(x); !ok || n != "pypi.org" {
			t.Errorf("%s is %q", x, n)
		}
		if _, ok := b.NameOf(x); ok {
			t.Errorf("%s stands for a name in another session", x)
		}
	}
	if _, ok := a.NameOf(netip.MustParseAddr("1.1.1.1")); ok {
		t.Error("a literal stands for a name")
	}
	// After a restart of the gate a name has the address that it had.
	c := newWorld(t, pypi).bind(1, 9)
	if again, _, _ := c.Assign("pypi.org"); again != four {
		t.Errorf("%s, then %s", four, again)
	}
}

func TestNamesInUseOutliveAFlood(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	four, _, _ := s.Assign("pypi.org")
	l, _, err := open(t, s, "pypi.org")
	must(t, err)
	seen := map[netip.Addr]authority.Name{}
	for i := range 3 * maxNames {
		n := authority.Name(fmt.Sprintf("x%d.pythonhosted.org", i))
		a, _, ok := s.Assign(n)
		if !ok || a == four {
			t.Fatalf("%s: %s %v", n, a, ok)
		}
		seen[a] = n
	}
	if n, ok := s.NameOf(four); !ok || n != "pypi.org" {
		t.Error("a name with a connection was forgotten")
	}
	if len(s.names.byName) > maxNames {
		t.Errorf("%d names are kept", len(s.names.byName))
	}
	l.Close()
}

// Open, Close, changes of the policy and of the binding at once: nothing stays open that is not allowed.
func TestManyThingsAtOnce(t *testing.T) {
	w := newWorld(t, pypi)
	deny := policy.Merge(nil)
	yes := w.pol.Load()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 200 {
				s := w.bind(i, uint64(n/50+1))
				if l, _, err := open(t, s, "pypi.org"); err == nil {
					_ = l.Bytes(1, 1)
					l.Close()
				}
				_ = s.Note(denial("evil.test"))
			}
		})
	}
	wg.Go(func() {
		for i := range 200 {
			w.pol.Store([]*policy.Policy{yes, deny}[i%2])
			w.Refresh()
			w.now.Add(int64(time.Second))
			for _, s := range w.Sessions() {
				s.flush(false)
			}
		}
	})
	wg.Wait()
	if f := w.Figures(); f.Open != 0 || f.Sessions != 4 || w.begun.Load() != 0 {
		t.Errorf("%+v", f)
	}
}

func TestMemoryOfAnIdleSession(t *testing.T) {
	w := newWorld(t, pypi)
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	list := make([]*egressv1.Binding, 200)
	for i := range list {
		list[i] = binding(i+1, 1)
	}
	before := heap()
	must(t, w.Sync("b", list))
	per := int64(heap()-before) / 200
	t.Logf("%d bytes for each idle session", per)
	if per > 8<<10 {
		t.Errorf("an idle session takes %d bytes", per)
	}
	runtime.KeepAlive(w)
}

// Events and the notice say why in the words that the gate's answer has.
func TestASentenceIsThePolicysOwn(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	r := denial("a.test")
	r.Rule, r.Layer, r.Reason = "no-a", egressv1.Layer_LAYER_TENANT, string(policy.DeniedRule)
	if got, want := s.sentence(r), "https://a.test was not let out: rule no-a of the tenant policy denies it. If it is needed, ask it@acme.example."; got != want {
		t.Errorf("it says %q", got)
	}
	r.Authority, r.Port, r.Rule, r.Layer, r.Reason = "", 0, "", 0, string(policy.NoRule)
	if got, want := s.sentence(r), "a host was not let out: no rule allows this host. If it is needed, ask it@acme.example."; got != want {
		t.Errorf("of many it says %q", got)
	}
}
