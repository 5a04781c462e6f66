package drivertest

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

func (s *suite) stats(t *testing.T, m driver.Meter, sb driver.Sandbox) driver.Stats {
	t.Helper()
	st, err := m.Stats(ctx(t), sb.ID)
	unless(t, err)
	if err != nil {
		t.Fatalf("stats: %v", err)
	}
	return st
}

// usageOfCPU: work that no account shows, or an account that runs backwards.
func (s *suite) usageOfCPU(t *testing.T) {
	m := optional[driver.Meter](t, s.pair.d, "Meter")
	first := s.stats(t, m, s.pair.a)
	last := first
	for range 5 {
		s.pair.ka.must(t, "busy", "40")
		now := s.stats(t, m, s.pair.a)
		if now.CPU < last.CPU {
			t.Errorf("the account runs backwards: %s, then %s", last.CPU, now.CPU)
		}
		last = now
	}
	if used := last.CPU - first.CPU; used < 20*time.Millisecond {
		t.Errorf("200 ms of work are counted as %s", used)
	}
}

// usageOfMemory: memory that is not counted, or counted beyond its limit.
func (s *suite) usageOfMemory(t *testing.T) {
	m := optional[driver.Meter](t, s.pair.d, "Meter")
	before := s.stats(t, m, s.pair.a)
	s.pair.ka.must(t, "keep", "32")
	after := s.stats(t, m, s.pair.a)
	if !s.caps.OwnKernel && after.MemoryBytes < before.MemoryBytes+16<<20 {
		t.Errorf("32 MiB more are counted as %d before and %d after", before.MemoryBytes, after.MemoryBytes)
	}
	const overhead = 256 << 20 // of what stands around a kernel of its own
	if limit := s.pair.one.Limits.MemoryBytes + overhead; after.MemoryBytes == 0 || after.MemoryBytes > limit {
		t.Errorf("it uses %d bytes, its limit is %d", after.MemoryBytes, s.pair.one.Limits.MemoryBytes)
	}
	s.pair.ka.must(t, "keep", "0")
}

// usageOfProcesses: a sandbox full of processes that is counted as empty.
func (s *suite) usageOfProcesses(t *testing.T) {
	m := optional[driver.Meter](t, s.pair.d, "Meter")
	if st := s.stats(t, m, s.pair.a); st.Processes == 0 {
		t.Errorf("it runs, and is counted with no process: %+v", st)
	}
}

// usageOfNothing: numbers of a sandbox that does not exist.
func (s *suite) usageOfNothing(t *testing.T) {
	d := s.open(t)
	m := optional[driver.Meter](t, d, "Meter")
	sb, _ := s.start(t, d, 1, 1)
	s.stats(t, m, sb)
	s.stop(t, d, sb)
	for _, id := range []string{string(sb.ID), "bnone"} {
		if st, err := m.Stats(ctx(t), sandboxID(id)); !errs.Is(err, errkind.NotFound) {
			t.Errorf("usage of nothing: %+v, %v", st, err)
		}
	}
}

// share is what a sandbox gets of a core while it wants all of two.
func (s *suite) share(t *testing.T, m driver.Meter, sb driver.Sandbox, k *Talk, ms int) float64 {
	t.Helper()
	before, began := s.stats(t, m, sb), time.Now()
	if s.caps.Native {
		k.must(t, "spawn", "burn", itoa(ms)) // the guest's own account of its time is not asked
	} else {
		k.must(t, "busy", itoa(ms))
	}
	return float64(s.stats(t, m, sb).CPU-before.CPU) / float64(time.Since(began))
}

// resizes: a greater limit that a running session is promised and does not get, or a smaller one that
// does not hold.
func (s *suite) resizes(t *testing.T) {
	d := s.open(t)
	m, r := optional[driver.Meter](t, d, "Meter"), optional[driver.Resizer](t, d, "Resizer")
	spec := s.spec(t, 1, 1)
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	with := func(millis uint32) float64 {
		t.Helper()
		spec.Limits.CPUMillis = millis
		err := r.Resize(ctx(t), sb.ID, spec.Limits)
		unless(t, err)
		if err != nil {
			t.Fatal(err)
		}
		return s.share(t, m, sb, k, 1000)
	}
	small, large := with(100), with(800)
	for n := 0; n < 4 && large < 1.4*small; n++ { // a machine at work gives it less for a while
		large = max(large, with(800))
	}
	if again := with(100); small > 0.2 || again > 0.2 || large < 1.4*small || large > 1.1 {
		t.Errorf("with 0.1, 0.8 and 0.1 of a core it got %.2f, %.2f and %.2f", small, large, again)
	}
}

// resizeRefused: a change that was refused and was made all the same, in whole or in part.
func (s *suite) resizeRefused(t *testing.T) {
	d := s.open(t)
	r := optional[driver.Resizer](t, d, "Resizer")
	spec := s.spec(t, 1, 1)
	spec.Limits.CPUMillis = 200
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	for _, l := range []driver.Limits{
		{},
		{CPUMillis: 1000, PIDs: 64},
		{CPUMillis: 1000, MemoryBytes: 1 << 62, PIDs: 64},
		{CPUMillis: 1000, MemoryBytes: spec.Limits.MemoryBytes, PIDs: 1},
	} {
		if err := r.Resize(ctx(t), sb.ID, l); !errs.Is(err, errkind.Invalid) && !errs.Is(err, errkind.Unimplemented) {
			t.Errorf("limits %+v: %v", l, err)
		}
	}
	k.must(t, "echo", "untouched")
	if m, ok := d.(driver.Meter); ok && s.caps.CPU {
		if got := s.share(t, m, sb, k, 700); got > 0.35 {
			t.Errorf("after refused changes it gets %.2f of a core; its limit is 0.20", got)
		}
	}
}

// resizeNothing: a change of what is not there that says that it was made.
func (s *suite) resizeNothing(t *testing.T) {
	d := s.open(t)
	r := optional[driver.Resizer](t, d, "Resizer")
	spec := s.spec(t, 1, 1)
	if err := r.Resize(ctx(t), spec.ID(), spec.Limits); !errs.Is(err, errkind.NotFound) {
		t.Errorf("resize of nothing: %v", err)
	}
}

// resizesDisk: a disk that grew and that the session inside does not see grow.
func (s *suite) resizesDisk(t *testing.T) {
	d := s.open(t)
	r := optional[driver.DiskResizer](t, d, "DiskResizer")
	spec := s.spec(t, 1, 1)
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	if err := r.ResizeDisk(ctx(t), s.spec(t, 2, 1).ID(), 1<<30); !errs.Is(err, errkind.NotFound) {
		unless(t, err)
		t.Errorf("resize of nothing: %v", err)
	}
	if !s.caps.RawDisk {
		t.Skip("skipped by capability: its disk is not an image that the driver opens")
	}
	before := k.must(t, "space", "/")
	grown := grow(t, spec.DiskImage)
	err := r.ResizeDisk(ctx(t), sb.ID, grown)
	unless(t, err)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the disk has grown inside", func() bool { return number(t, k.must(t, "space", "/")) > number(t, before)+8<<20 })
}
