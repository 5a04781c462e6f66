package drivertest

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// quiet is how long a frozen sandbox is listened to.
const quiet = 300 * time.Millisecond

func (s *suite) freezer(t *testing.T) (driver.Driver, driver.Freezer) {
	t.Helper()
	d := s.open(t)
	return d, optional[driver.Freezer](t, d, "Freezer")
}

// frozenOne freezes the first of the pair until the check's end.
func (s *suite) frozenOne(t *testing.T) (driver.Driver, driver.Freezer, driver.Sandbox, *Talk) {
	t.Helper()
	f := optional[driver.Freezer](t, s.pair.d, "Freezer")
	t.Cleanup(func() { _ = f.Thaw(ctx(t), s.pair.a.ID) })
	freeze(t, f, s.pair.a)
	return s.pair.d, f, s.pair.a, s.pair.ka
}

func freeze(t *testing.T, f driver.Freezer, sb driver.Sandbox) {
	t.Helper()
	err := f.Freeze(ctx(t), sb.ID)
	unless(t, err)
	if err != nil {
		t.Fatalf("freeze: %v", err)
	}
}

func thaw(t *testing.T, f driver.Freezer, sb driver.Sandbox) {
	t.Helper()
	if err := f.Thaw(ctx(t), sb.ID); err != nil {
		t.Fatalf("thaw: %v", err)
	}
}

// frozenRunsNot: a frozen session that goes on working, while its disk is copied or its host has no right
// to it any more.
func (s *suite) frozenRunsNot(t *testing.T) {
	d, f, sb, k := s.frozenOne(t)
	before := s.cpuOf(t, d, sb)
	n, err := k.Send("echo", "from the ice")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := k.Await(n, quiet); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("frozen, it says %q, %v", got, err)
	}
	if used := s.cpuOf(t, d, sb) - before; used > 20*time.Millisecond {
		t.Errorf("frozen, it used %s of cpu", used)
	}
	thaw(t, f, sb)
	if got, err := k.Await(n, answerTime); err != nil || got != "from the ice" {
		t.Errorf("thawed, it says %q, %v", got, err)
	}
}

func (s *suite) cpuOf(t *testing.T, d driver.Driver, sb driver.Sandbox) time.Duration {
	t.Helper()
	m, ok := d.(driver.Meter)
	if !ok {
		return 0
	}
	st, err := m.Stats(ctx(t), sb.ID)
	if err != nil {
		t.Fatalf("stats: %v", err)
	}
	return st.CPU
}

// frozenTwice: a repeated freeze or thaw that fails, or that one thaw does not end.
func (s *suite) frozenTwice(t *testing.T) {
	_, f, sb, k := s.frozenOne(t)
	freeze(t, f, sb)
	for range 2 {
		thaw(t, f, sb)
	}
	k.must(t, "echo", "thawed")
}

// frozenOften: a session that is frozen again and again, for each of its snapshots, and that dies of it
// when it next asks its kernel for something.
func (s *suite) frozenOften(t *testing.T) {
	d, f := s.freezer(t)
	sb, k := s.start(t, d, 1, 1)
	for range 6 {
		freeze(t, f, sb)
		thaw(t, f, sb)
	}
	if s.caps.Memory {
		k.must(t, "keep", "32")
	}
	k.must(t, "echo", "it lives")
}

// frozenStops: a frozen session that cannot be deleted.
func (s *suite) frozenStops(t *testing.T) {
	d, f := s.freezer(t)
	before := s.host.Left(t)
	sb, _ := s.start(t, d, 1, 1)
	freeze(t, f, sb)
	s.stop(t, d, sb)
	s.nothing(t, d, before)
}

// frozenListed: a frozen session that is taken for one that ended.
func (s *suite) frozenListed(t *testing.T) {
	d, f, sb, k := s.frozenOne(t)
	for _, got := range list(t, d) {
		if got.State != driver.Running {
			t.Errorf("frozen, it is shown as %+v", got)
		}
	}
	if again := s.create(t, d, s.pair.one); again.ID != sb.ID || again.PID != sb.PID {
		t.Errorf("created again while it is frozen: %+v", again)
	}
	thaw(t, f, sb)
	k.must(t, "echo", "the same as before")
}

// frozenAlone: a freeze that stops a neighbour as well.
func (s *suite) frozenAlone(t *testing.T) {
	_, f, sb, _ := s.frozenOne(t)
	s.pair.kb.must(t, "echo", "the neighbour works")
	thaw(t, f, sb)
}

// frozenNothing: a freeze of what is not there that says that it was done.
func (s *suite) frozenNothing(t *testing.T) {
	d, f := s.freezer(t)
	sb, _ := s.start(t, d, 1, 1)
	freeze(t, f, sb)
	s.stop(t, d, sb)
	if err := f.Freeze(ctx(t), sb.ID); !errs.Is(err, errkind.NotFound) {
		t.Errorf("freeze of nothing: %v", err)
	}
	if err := f.Thaw(ctx(t), sb.ID); !errs.Is(err, errkind.NotFound) {
		t.Errorf("thaw of nothing: %v", err)
	}
}

// frozenAdopted: an agent that dies after a freeze, and a session that nobody thaws any more.
func (s *suite) frozenAdopted(t *testing.T) {
	first := s.host.Open(t)
	f, ok := first.(driver.Freezer)
	if !ok {
		_ = first.Close()
		t.Skip("skipped by capability: it is no Freezer")
	}
	sb, k := s.start(t, first, 1, 1)
	err := f.Freeze(ctx(t), sb.ID)
	if cerr := first.Close(); cerr != nil {
		t.Fatal(cerr)
	}
	d := s.open(t)
	unless(t, err)
	if err != nil {
		t.Fatal(err)
	}
	if got := only(t, d); got.State != driver.Running {
		t.Errorf("after a restart it is shown as %+v", got)
	}
	thaw(t, d.(driver.Freezer), sb)
	k.must(t, "echo", "thawed by another")
}
