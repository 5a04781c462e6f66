package drivertest

import (
	"context"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// lists: a sandbox that runs and is not shown, or is shown as another.
func (s *suite) lists(t *testing.T) {
	want := map[string]driver.Sandbox{string(s.pair.a.ID): s.pair.a, string(s.pair.b.ID): s.pair.b}
	found := list(t, s.pair.d)
	if len(found) != len(want) {
		t.Errorf("list shows %d of %d", len(found), len(want))
	}
	for _, f := range found {
		w := want[string(f.ID)]
		if f.State != driver.Running || f.Session != w.Session || f.Generation != w.Generation || f.Epoch != w.Epoch ||
			f.Tier != w.Tier || f.Channel != w.Channel || f.PID != w.PID || f.Cgroup != w.Cgroup || len(f.Parts) == 0 {
			t.Errorf("made %+v, shown %+v", w, f)
		}
	}
}

// listEmpty: a sweep that takes 'I could not look' for 'there is nothing'.
func (s *suite) listEmpty(t *testing.T) {
	c, cancel := context.WithCancel(ctx(t))
	cancel()
	if found, err := s.pair.d.List(c); err == nil && len(found) != 2 {
		t.Errorf("a list that was given up shows %d sandboxes and no error", len(found))
	}
}

// listPartial: what a crash left half-made is taken for a sandbox that serves.
func (s *suite) listPartial(t *testing.T) {
	dead := s.host.Open(t)
	if !s.host.Crash(dead, s.tier, 0, true) {
		t.Fatal("the host has no point of crash")
	}
	spec := s.spec(t, 1, 1)
	if _, err := dead.Create(ctx(t), spec); err == nil {
		t.Error("no crash")
	}
	_ = dead.Close()
	d := s.open(t)
	f := only(t, d)
	if !s.named(f.ID, spec) || f.State != driver.Partial || len(f.Parts) == 0 {
		t.Errorf("after a crash at the first step it is shown as %+v", f)
	}
	s.stop(t, d, f.Sandbox)
	s.nothing(t, d, nil)
}

// listLitter: a part of a sandbox that no record tells of, which no sweep ever sees.
func (s *suite) listLitter(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	h, ok := s.host.(Litterer)
	id := s.spec(t, 1, 1).ID()
	if !ok || !h.Litter(t, s.tier, id) {
		t.Skip("skipped: this test's host knows no part that can be left without a record")
	}
	f := only(t, d)
	if f.ID != id || f.State != driver.Partial || f.Session != "" || len(f.Parts) == 0 {
		t.Errorf("it is shown as %+v", f)
	}
	s.stop(t, d, f.Sandbox)
	s.nothing(t, d, before)
	if !h.Litter(t, s.tier, id) {
		t.Fatal("only once")
	}
	_, k := s.start(t, d, 1, 1) // nor does it stand in the way
	k.must(t, "echo", "made")
}

// listWhile: a list during a start that fails, or shows what is being made as something else.
func (s *suite) listWhile(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	done := make(chan error, 1)
	go func() { _, err := d.Create(ctx(t), spec); done <- err }()
	running := false
	for {
		for _, f := range list(t, d) {
			if !s.named(f.ID, spec) || f.State == driver.Exited {
				t.Errorf("while it is made, list shows %+v", f)
			}
			if running && f.State != driver.Running {
				t.Errorf("it ran, and now it is %s", f.State)
			}
			running = f.State == driver.Running
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			if f := only(t, d); f.State != driver.Running {
				t.Errorf("made, and shown as %s", f.State)
			}
			return
		default:
		}
	}
}

// adoptsRunning: a restart of the agent that ends sessions, or forgets whose they are.
func (s *suite) adoptsRunning(t *testing.T) {
	first := s.host.Open(t)
	sb, k := s.start(t, first, 1, 1)
	k.must(t, "echo", "before")
	k.Close()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	d := s.open(t)
	f := only(t, d)
	if f.State != driver.Running || f.ID != sb.ID || f.Session != sb.Session || f.Generation != sb.Generation || f.Epoch != sb.Epoch ||
		f.Tier != sb.Tier || f.Channel != sb.Channel || f.PID != sb.PID {
		t.Fatalf("after a restart %+v, before %+v", f, sb)
	}
	s.talk(t, f.Sandbox).must(t, "echo", "after")
	if again := s.create(t, d, s.spec(t, 1, 1)); again.ID != sb.ID || again.PID != sb.PID {
		t.Errorf("created again after a restart: %+v, first %+v", again, sb)
	}
}

// adoptsBusy: a restart after which a second epoch of a session gets compute beside the first.
func (s *suite) adoptsBusy(t *testing.T) {
	first := s.host.Open(t)
	s.start(t, first, 1, 1)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	d := s.open(t)
	next := s.spec(t, 1, 2)
	if _, err := d.Create(ctx(t), next); err == nil {
		t.Error("two epochs of one session run after a restart")
	}
	if f := only(t, d); f.Epoch == next.Epoch {
		t.Errorf("list shows %+v", f)
	}
}

// adoptsExited: a sandbox that ended while no agent was there, whose end nobody ever hears of.
func (s *suite) adoptsExited(t *testing.T) {
	first := s.host.Open(t)
	sb, k := s.start(t, first, 1, 1)
	s.exit(t, first, k, "7")
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	d := s.open(t)
	if f := only(t, d); f.State == driver.Running || f.ID != sb.ID || f.Epoch != sb.Epoch {
		t.Errorf("it ended, and is shown as %+v", f)
	}
	if w, ok := d.(driver.Watcher); ok {
		events, cancel := watch(t, w)
		defer cancel()
		if e := expect(t, events, sb.ID); e.ExitStatus == 0 {
			t.Error("an end with status 7 is told as 0")
		}
	}
	_, k = s.start(t, d, 1, 1)
	k.must(t, "echo", "awake again")
}

// adoptsHalf: a writer that died in the middle of a message, after which the channel of the adopted
// sandbox is deaf.
func (s *suite) adoptsHalf(t *testing.T) {
	first := s.host.Open(t)
	_, k := s.start(t, first, 1, 1)
	if err := k.Raw(`{"op":"echo","ar`); err != nil {
		t.Fatal(err)
	}
	k.Close()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	d := s.open(t)
	k, err := s.dial(t, only(t, d).Sandbox)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if err := k.Raw("\n"); err != nil {
		t.Fatal(err)
	}
	k.must(t, "echo", "heard")
}

// adoptsStop: a sandbox that only the agent that made it can remove.
func (s *suite) adoptsStop(t *testing.T) {
	first := s.host.Open(t)
	before := s.host.Left(t)
	sb, k := s.start(t, first, 1, 1)
	k.Close()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	d := s.open(t)
	s.stop(t, d, sb)
	s.nothing(t, d, before)
}
