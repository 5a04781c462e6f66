package drivertest

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// starts: a Create that is acknowledged while nothing runs, or that tells of another sandbox than the
// one asked for.
func (s *suite) starts(t *testing.T) {
	spec, sb := s.pair.one, s.pair.a
	if !s.named(sb.ID, spec) || sb.Session != spec.Session || sb.Generation != spec.Generation || sb.Epoch != spec.Epoch || sb.Tier != spec.Tier {
		t.Errorf("asked for %+v, got %+v", spec, sb)
	}
	if pipes := sb.Channel.Stdin != "" && sb.Channel.Stdout != ""; pipes == (sb.Channel.Socket != "") {
		t.Errorf("the channel is neither two pipes nor a socket: %+v", sb.Channel)
	}
	s.pair.ka.must(t, "echo", "it runs")
}

// sameAgain: a repeated request, whose first answer was lost, that starts a second sandbox or disturbs
// the first.
func (s *suite) sameAgain(t *testing.T) {
	sb := s.pair.a
	again := s.create(t, s.pair.d, s.pair.one)
	if again.ID != sb.ID || again.Channel != sb.Channel || again.PID != sb.PID {
		t.Errorf("created again: %+v, first %+v", again, sb)
	}
	s.pair.ka.must(t, "echo", "still here")
	if found := list(t, s.pair.d); len(found) != 2 {
		t.Errorf("list shows %+v", found)
	}
}

// stopNothing: a delete that fails for ever because there is nothing to delete.
func (s *suite) stopNothing(t *testing.T) {
	d := s.open(t)
	for range 2 {
		if err := d.Stop(ctx(t), s.spec(t, 1, 1).ID()); err != nil {
			t.Errorf("stop of what never was: %v", err)
		}
	}
}

// stopTwice: a repeated delete that fails, or that leaves a part behind.
func (s *suite) stopTwice(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	sb, _ := s.start(t, d, 1, 1)
	for range 2 {
		s.stop(t, d, sb)
	}
	s.nothing(t, d, before)
}

// stopBadName: a name from outside that becomes a path on the host.
func (s *suite) stopBadName(t *testing.T) {
	d := s.open(t)
	for _, id := range []string{"../../etc", "", "b/c", "b\x00", "B", "."} {
		sb := driver.Sandbox{}
		sb.ID = driver.Sandbox{}.ID + sb.ID
		if err := d.Stop(ctx(t), sandboxID(id)); !errs.Is(err, errkind.Invalid) {
			t.Errorf("stop of %q: %v", id, err)
		}
	}
}

// againAfterStop: a session that cannot wake in the epoch whose compute was taken away.
func (s *suite) againAfterStop(t *testing.T) {
	d := s.open(t)
	sb, _ := s.start(t, d, 1, 1)
	s.stop(t, d, sb)
	again, k := s.start(t, d, 1, 1)
	if !s.named(again.ID, s.spec(t, 1, 1)) {
		t.Errorf("another sandbox: %+v", again)
	}
	k.must(t, "echo", "new")
}

// againAfterExit: a session whose first process ended by itself and that no request wakes again.
func (s *suite) againAfterExit(t *testing.T) {
	d := s.open(t)
	_, k := s.start(t, d, 1, 1)
	s.exit(t, d, k, "3")
	_, k = s.start(t, d, 1, 1)
	k.must(t, "echo", "new")
	if f := only(t, d); f.State != driver.Running {
		t.Errorf("list shows %+v", f)
	}
}

// exit ends the first process of the only sandbox and waits until that is seen.
func (s *suite) exit(t *testing.T, d driver.Driver, k *Talk, status string) {
	t.Helper()
	if _, err := k.Send("exit", status); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the sandbox has exited", func() bool { return only(t, d).State == driver.Exited })
}

// otherEpoch: two sandboxes on one session's disk.
func (s *suite) otherEpoch(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	next := s.spec(t, 1, 1)
	next.Epoch.Index++
	if _, err := d.Create(ctx(t), next); !errs.Is(err, errkind.Busy) {
		t.Errorf("two epochs of one session: %v", err)
	}
	k.must(t, "echo", "untouched")
	s.stop(t, d, sb)
	if sb = s.create(t, d, next); sb.Epoch != next.Epoch {
		t.Errorf("got %+v", sb)
	}
}

// otherGeneration: a session that was deleted and made again while its old compute still runs.
func (s *suite) otherGeneration(t *testing.T) {
	next := s.pair.one
	next.Generation.Index++
	if _, err := s.pair.d.Create(ctx(t), next); !errs.Is(err, errkind.Busy) {
		t.Errorf("two generations of one session: %v", err)
	}
	s.pair.ka.must(t, "echo", "untouched")
	if found := list(t, s.pair.d); len(found) != 2 {
		t.Errorf("list shows %+v", found)
	}
}

// timed: a slow start of which nobody can say what was slow.
func (s *suite) timed(t *testing.T) {
	sb, whole := s.pair.a, s.pair.took
	if len(sb.Steps) == 0 {
		t.Error("no steps")
	}
	for _, st := range sb.Steps {
		if st.Name == "" || st.Start+st.Took > whole {
			t.Errorf("step %+v of a create of %s", st, whole)
		}
		t.Logf("%-20s at %8s took %8s", st.Name, st.Start.Round(10*time.Microsecond), st.Took.Round(10*time.Microsecond))
	}
}

// declares: a driver that declares what contradicts itself, or another thing each time it is asked.
func (s *suite) declares(t *testing.T) {
	d := s.pair.d
	got := d.Capabilities()
	if !slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(s.all))) {
		t.Errorf("tiers %v, before %v", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(s.all)))
	}
	c := got[s.tier]
	switch {
	case c.Absent != "":
		t.Errorf("it runs, and is absent: %s", c.Absent)
	case c.OwnKernel != s.tier.VM():
		t.Errorf("own kernel %v in a tier of which %v is said", c.OwnKernel, s.tier.VM())
	case c.OwnKernel != (c.Accel != ""):
		t.Errorf("own kernel %v, run by %q", c.OwnKernel, c.Accel)
	case c.RawDisk && !c.Disk, c.OwnKernel && !c.Isolated, c.OOMKillsAll && !c.Memory:
		t.Errorf("it contradicts itself: %+v", c)
	}
	if o, ok := d.(driver.Checker); ok {
		if err := o.Preflight(ctx(t)); err != nil {
			t.Errorf("it runs, and says that it cannot: %v", err)
		}
	}
}
