// Package drivertest is the conformance suite of package driver: every driver passes it, and a bug
// found in one becomes a check for all. It guarantees that a check is skipped only because of what
// the driver declares (its Capabilities, and the optional interfaces that it implements), that each
// skip is printed with its reason, and that nothing here looks at the name of a driver or of a tier.
//
// Every check is a row of the table in checks.go; what it guards against is the comment of its
// function, from which docs/drivers.md is made.
package drivertest

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// Host is a place where drivers of one kind can be opened, again and again on the same state.
type Host interface {
	// Open returns a new driver on the host's state.
	Open(t testing.TB) driver.Driver
	// Spec returns a valid spec for the session with this number in this epoch, with its disk
	// attached; the first process is a probe (package answer). The same test and numbers give the same
	// spec. Limits are at least 1000 thousandths of a core and 64 processes.
	Spec(t testing.TB, session int, epoch uint64) driver.Spec
	// Left lists what is on the host now of all that a driver can make.
	Left(t testing.TB) []string
	// Crash makes every Create of the driver for this tier fail at point number n, without any undo
	// if hard is true; -1 ends that. It returns false when there is no such point.
	Crash(d driver.Driver, tier driver.Tier, n int, hard bool) bool
}

// Talker is a Host whose channel is opened in a way of its own: one that speaks to the probe through
// something else than the bare stream. Without it Open is used.
type Talker interface {
	Talk(t testing.TB, sb driver.Sandbox) (*Talk, error)
}

// Killer is a Host that kills the first process from outside in a way of its own. Without it the
// sandbox's PID gets a SIGKILL.
type Killer interface {
	Kill(t testing.TB, sb driver.Sandbox)
}

// Litterer is a Host that can leave a part of a sandbox that no record tells of, as an earlier version
// or a kill may: false if it has none for this tier. List must show it and Stop remove it.
type Litterer interface {
	Litter(t testing.TB, tier driver.Tier, id ids.SandboxID) bool
}

// Releaser is a Host whose disks are many: the test is over, and its sessions' disks may go.
type Releaser interface {
	Release(t testing.TB)
}

// suite is one run for one tier.
type suite struct {
	host Host
	tier driver.Tier
	caps driver.Capabilities
	all  map[driver.Tier]driver.Capabilities
	pair *pair // for checks that share sandboxes
	// linked are those of the shared checks of links.
	linked *linked
}

// pair is two sandboxes of two sessions that many checks look at.
type pair struct {
	d            driver.Driver
	one, two     driver.Spec
	a, b         driver.Sandbox
	ka, kb       *Talk
	secret, file string // words that only the first one knows
	took         time.Duration
}

// Run runs every check that the driver's capabilities allow, for each of its tiers. A run on claimed
// sandboxes (Claimed) is for tiers that have them, and leaves out the checks of warm ones.
func Run(t *testing.T, h Host) { run(t, h, false) }

// RunShared runs those checks alone that look at the two sandboxes which they share: walls, privacy,
// channels and what else a sandbox is from inside. It is for runs on claimed sandboxes in tiers where a
// whole one takes long.
func RunShared(t *testing.T, h Host) { run(t, h, true) }

func run(t *testing.T, h Host, shared bool) {
	d := h.Open(t)
	all := d.Capabilities()
	if err := d.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	for _, tier := range slices.Sorted(maps.Keys(all)) {
		caps := all[tier]
		for _, m := range caps.Missing {
			t.Logf("not on this host: %s", m)
		}
		s := &suite{host: h, tier: tier, caps: caps, all: all}
		t.Run(string(tier), func(t *testing.T) {
			if caps.Absent != "" {
				t.Skipf("this host cannot run tier %s: %s", tier, caps.Absent)
			}
			if s.claimed() && !caps.Warm {
				t.Skipf("skipped by capability: %s", warm.why)
			}
			s.run(t, shared)
		})
	}
}

// run runs the checks that look at one pair of sandboxes, then, unless these are all that is asked for,
// those that make their own.
func (s *suite) run(t *testing.T, shared bool) {
	t.Run("looking at two sandboxes", func(t *testing.T) {
		s.pair = s.openPair(t)
		for _, c := range checks {
			if c.shared && c.theme != linkTheme {
				s.check(t, c)
			}
		}
	})
	s.pair = nil
	t.Run("looking at two sandboxes with links", func(t *testing.T) {
		if !links.has(s.caps) {
			t.Skipf("skipped by capability: %s", links.why)
		}
		s.linked = s.openLinked(t)
		for _, c := range checks {
			if c.shared && c.theme == linkTheme {
				s.check(t, c)
			}
		}
	})
	s.linked = nil
	for _, c := range checks {
		if !shared && !c.shared && !(s.claimed() && c.theme == warmTheme) {
			s.check(t, c)
		}
	}
}

func (s *suite) check(t *testing.T, c check) {
	t.Run(c.name, func(t *testing.T) {
		for _, n := range c.needs {
			if !n.has(s.caps) {
				t.Skipf("skipped by capability: %s", n.why)
			}
		}
		c.run(s, t)
	})
}

// optional returns the driver as one of the optional interfaces, or skips.
func optional[T any](t *testing.T, d driver.Driver, what string) T {
	t.Helper()
	o, ok := d.(T)
	if !ok {
		t.Skipf("skipped by capability: it is no %s", what)
	}
	return o
}

// unless skips when the driver says that this tier cannot do it: several drivers behind one have every
// interface, and say so only when they are asked.
func unless(t *testing.T, err error) {
	t.Helper()
	if errs.Is(err, errkind.Unimplemented) {
		t.Skipf("skipped by capability: %v", err)
	}
}

func (s *suite) openPair(t *testing.T) *pair {
	t.Helper()
	p := &pair{d: s.open(t), secret: "MARK=4711-of-the-first", file: "mine-of-the-first"}
	p.one, p.two = s.spec(t, 1, 1), s.spec(t, 2, 1)
	p.one.Env = append(slices.Clone(p.one.Env), p.secret)
	p.two.Env = append(slices.Clone(p.two.Env), "OWN=1")
	began := time.Now()
	p.a = s.create(t, p.d, p.one)
	p.took = time.Since(began)
	p.b = s.create(t, p.d, p.two)
	if s.claimed() && !(p.a.ID.IsWarm() && p.b.ID.IsWarm()) {
		t.Fatalf("they were started cold: %s and %s", p.a.ID, p.b.ID)
	}
	p.ka, p.kb = s.talk(t, p.a), s.talk(t, p.b)
	return p
}

// open returns a driver that is closed, with all its sandboxes stopped and nothing left, when the
// test ends.
func (s *suite) open(t *testing.T) driver.Driver {
	t.Helper()
	d := s.host.Open(t)
	t.Cleanup(func() {
		s.clean(t, d)
		if r, ok := s.host.(Releaser); ok {
			r.Release(t)
		}
	})
	return d
}

func (s *suite) clean(t *testing.T, d driver.Driver) {
	t.Helper()
	found, err := d.List(ctx(t))
	if err != nil {
		t.Errorf("list: %v", err)
	}
	for _, f := range found {
		if err := d.Stop(ctx(t), f.ID); err != nil {
			t.Errorf("stop %s: %v", f.ID, err)
		}
	}
	if err := d.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if left := s.host.Left(t); len(left) > 0 {
		t.Errorf("left on the host: %v", left)
	}
}

func (s *suite) spec(t *testing.T, session int, epoch uint64) driver.Spec {
	t.Helper()
	spec := s.host.Spec(t, session, epoch)
	spec.Tier = s.tier
	return spec
}

func (s *suite) create(t *testing.T, d driver.Driver, spec driver.Spec) driver.Sandbox {
	t.Helper()
	sb, err := d.Create(ctx(t), spec)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	return sb
}

func (s *suite) stop(t *testing.T, d driver.Driver, sb driver.Sandbox) {
	t.Helper()
	if err := d.Stop(ctx(t), sb.ID); err != nil {
		t.Fatalf("stop: %v", err)
	}
}

// start makes a sandbox and opens its channel.
func (s *suite) start(t *testing.T, d driver.Driver, session int, epoch uint64) (driver.Sandbox, *Talk) {
	t.Helper()
	sb := s.create(t, d, s.spec(t, session, epoch))
	return sb, s.talk(t, sb)
}

func (s *suite) talk(t *testing.T, sb driver.Sandbox) *Talk {
	t.Helper()
	k, err := s.dial(t, sb)
	if err != nil {
		t.Fatalf("channel: %v", err)
	}
	t.Cleanup(k.Close)
	if got := k.must(t, "echo", "hello"); got != "hello" {
		t.Fatalf("the channel says %q", got)
	}
	return k
}

func (s *suite) dial(t *testing.T, sb driver.Sandbox) (*Talk, error) {
	t.Helper()
	return dial(t, s.host, sb)
}

func dial(t testing.TB, h Host, sb driver.Sandbox) (*Talk, error) {
	t.Helper()
	if own, ok := h.(Talker); ok {
		return own.Talk(t, sb)
	}
	return Open(sb.Channel)
}

// named reports whether a sandbox bears the name that one of the spec has: of Create, or a warm one's.
func (s *suite) named(id ids.SandboxID, spec driver.Spec) bool {
	return id == spec.ID() || s.claimed() && id.IsWarm()
}

// claimed reports whether this run is one on claimed sandboxes.
func (s *suite) claimed() bool { _, ok := s.host.(*claimed); return ok }

// list is what the driver shows; an error ends the test.
func list(t *testing.T, d driver.Driver) []driver.Found {
	t.Helper()
	found, err := d.List(ctx(t))
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	return found
}

// only is the one sandbox that the driver shows.
func only(t *testing.T, d driver.Driver) driver.Found {
	t.Helper()
	found := list(t, d)
	if len(found) != 1 {
		t.Fatalf("list shows %d sandboxes: %+v", len(found), found)
	}
	return found[0]
}

// nothing is shown and nothing is left.
func (s *suite) nothing(t *testing.T, d driver.Driver, before []string) {
	t.Helper()
	if found := list(t, d); len(found) != 0 {
		t.Errorf("list shows %+v", found)
	}
	if left := s.host.Left(t); len(left) > len(before) {
		t.Errorf("left on the host: %v, before %v", left, before)
	}
}

// WhileBusy repeats for twenty seconds what takes a disk off and finds it busy: a process elsewhere on
// this machine that copied the table of mounts a moment ago, as every one with a mount namespace of its
// own does, has a copy of the disk's.
func WhileBusy(takeOff func() error) error {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		err := takeOff()
		if err == nil || !errs.Is(err, errkind.Busy) || time.Now().After(end) {
			return err
		}
	}
}

// eventually asks again and again, for five seconds, what becomes true without a sign.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within five seconds: %s", what)
		}
	}
}

func ctx(t testing.TB) context.Context {
	t.Helper()
	c, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return c
}
