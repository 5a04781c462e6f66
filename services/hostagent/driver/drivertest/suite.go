// Package drivertest is the conformance suite of package driver: every driver passes it, and a bug
// found in one becomes a check for all. It guarantees that a check is skipped only because of what
// the driver's Capabilities say, and that each skip is printed with its reason.
package drivertest

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// Host is a place where drivers of one kind can be opened, again and again on the same state.
type Host interface {
	// Open returns a new driver on the host's state.
	Open(t testing.TB) driver.Driver
	// Spec returns a valid spec for the session with this number in this epoch, with its disk
	// attached; the first process is a probe. The same numbers give the same spec.
	Spec(t testing.TB, session int, epoch uint64) driver.Spec
	// Left lists what is on the host now of all that a driver can make.
	Left(t testing.TB) []string
	// Crash makes every Create of the driver for this tier fail at point number n, without any undo
	// if hard is true; -1 ends that. It returns false when there is no such point.
	Crash(d driver.Driver, tier driver.Tier, n int, hard bool) bool
}

// suite is one run for one tier.
type suite struct {
	host Host
	tier driver.Tier
	caps driver.Capabilities
	all  map[driver.Tier]driver.Capabilities
}

// Run runs every check that the driver's capabilities allow, for each of its tiers.
func Run(t *testing.T, h Host) {
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
			s.run(t)
		})
	}
}

func (s *suite) run(t *testing.T) {
	isolated, disk := s.caps.Isolated, s.caps.Disk
	for _, c := range []struct {
		name string
		need bool
		why  string
		run  func(*testing.T)
	}{
		{"create, stop and list are idempotent", true, "", s.idempotent},
		{"bad specs are refused and make nothing", true, "", s.badSpecs},
		{"another epoch of a session is busy", true, "", s.otherEpoch},
		{"many at once", true, "", s.many},
		{"steps are timed", true, "", s.timed},
		{"the end of a sandbox is told", true, "", s.told},
		{"usage and freezing", true, "", s.meters},
		{"a new driver adopts what runs", s.caps.Adopts, "it does not adopt", s.adopts},
		{"a failed create leaves nothing", isolated, "it makes nothing on the host", s.failures},
		{"a crash is swept", isolated && s.caps.Adopts, "it makes nothing on the host", s.crashes},
		{"the channel outlives its writer", s.caps.Holds, "it does not hold the channel", s.holds},
		{"namespaces are its own", isolated, "it does not isolate", s.namespaces},
		{"privileges are dropped", isolated, "it does not isolate", s.privileges},
		{"host paths are read-only", isolated, "it does not isolate", s.hostPaths},
		{"there is no network", isolated, "it does not isolate", s.network},
		{"neighbours are invisible", isolated, "it does not isolate", s.neighbours},
		{"nothing of the host leaks in", isolated, "it does not isolate", s.leaks},
		{"the disk persists", disk, "it has no disk", s.persists},
		{"owners on disk are the container's", disk, "it has no disk", s.owners},
		{"set-user-id programs give nothing", isolated, "it does not isolate", s.setuid},
		{"memory is limited", s.caps.Memory, "it does not limit memory", s.memory},
		{"processes are limited", s.caps.PIDs, "it does not limit processes", s.processes},
		{"cpu is limited", s.caps.CPU, "it does not limit cpu", s.cpu},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !c.need {
				t.Skipf("skipped by capability: %s", c.why)
			}
			c.run(t)
		})
	}
}

// open returns a driver that is closed, with all its sandboxes stopped and nothing left, when the
// test ends.
func (s *suite) open(t *testing.T) driver.Driver {
	t.Helper()
	d := s.host.Open(t)
	t.Cleanup(func() { s.clean(t, d) })
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
	k, err := Open(sb.Channel)
	if err != nil {
		t.Fatalf("channel: %v", err)
	}
	t.Cleanup(k.Close)
	if got := k.must(t, "echo", "hello"); got != "hello" {
		t.Fatalf("the channel says %q", got)
	}
	return k
}

func ctx(t testing.TB) context.Context {
	t.Helper()
	c, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return c
}
