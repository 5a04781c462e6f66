package drivertest

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

func (s *suite) idempotent(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	for range 2 {
		if err := d.Stop(ctx(t), spec.ID()); err != nil {
			t.Errorf("stop of nothing: %v", err)
		}
	}
	sb, k := s.start(t, d, 1, 1)
	again := s.create(t, d, spec)
	if again.ID != sb.ID || again.Channel != sb.Channel || again.PID != sb.PID || sb.ID != spec.ID() {
		t.Errorf("created again: %+v, first %+v", again, sb)
	}
	k.must(t, "echo", "still here")
	found, err := d.List(ctx(t))
	if err != nil || len(found) != 1 || found[0].State != driver.Running || found[0].Epoch != spec.Epoch || found[0].Session != spec.Session {
		t.Errorf("list: %+v, %v", found, err)
	}
	for range 2 {
		s.stop(t, d, sb)
	}
	if found, err := d.List(ctx(t)); err != nil || len(found) != 0 {
		t.Errorf("list after stop: %+v, %v", found, err)
	}
	_, k = s.start(t, d, 1, 1) // the same epoch, after its compute was removed from outside
	k.must(t, "echo", "new")
}

func (s *suite) badSpecs(t *testing.T) {
	d := s.open(t)
	for name, c := range map[string]struct {
		change func(*driver.Spec)
		kind   errkind.Kind
	}{
		"no session": {func(x *driver.Spec) { x.Session = "" }, errkind.Invalid},
		"path":       {func(x *driver.Spec) { x.Session = "../../../etc" }, errkind.Invalid},
		"no epoch":   {func(x *driver.Spec) { x.Epoch = ids.Epoch{} }, errkind.Invalid},
		"no memory":  {func(x *driver.Spec) { x.Limits.MemoryBytes = 0 }, errkind.Invalid},
		"no pids":    {func(x *driver.Spec) { x.Limits.PIDs = 0 }, errkind.Invalid},
		"no cpu":     {func(x *driver.Spec) { x.Limits.CPUMillis = 0 }, errkind.Invalid},
		"hostname":   {func(x *driver.Spec) { x.Hostname = "a b/c" }, errkind.Invalid},
		"env":        {func(x *driver.Spec) { x.Env = []string{"no equals sign"} }, errkind.Invalid},
		"tier":       {func(x *driver.Spec) { x.Tier = "strongest" }, errkind.Unimplemented},
	} {
		spec := s.spec(t, 1, 1)
		c.change(&spec)
		if _, err := d.Create(ctx(t), spec); !errs.Is(err, c.kind) {
			t.Errorf("%s: got %v (%v)", name, err, errs.Kind(err))
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: not one sentence: %v", name, err)
		}
	}
	if found, err := d.List(ctx(t)); err != nil || len(found) != 0 {
		t.Errorf("something was made: %+v, %v", found, err)
	}
	if err := d.Stop(ctx(t), "../../etc"); !errs.Is(err, errkind.Invalid) {
		t.Errorf("stop of a path: %v", err)
	}
}

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
	sb = s.create(t, d, next)
	if sb.Epoch != next.Epoch {
		t.Errorf("got %+v", sb)
	}
}

func (s *suite) many(t *testing.T) {
	d := s.open(t)
	const n = 4
	var wg sync.WaitGroup
	specs := make([]driver.Spec, n)
	for i := range specs {
		specs[i] = s.spec(t, i+1, 1)
	}
	for _, spec := range specs {
		for range 2 { // each twice at the same time
			wg.Go(func() {
				if _, err := d.Create(ctx(t), spec); err != nil {
					t.Errorf("create: %v", err)
				}
			})
		}
	}
	wg.Wait()
	found, err := d.List(ctx(t))
	if err != nil || len(found) != n {
		t.Fatalf("list: %+v, %v", found, err)
	}
	for _, f := range found {
		wg.Go(func() {
			if err := d.Stop(ctx(t), f.ID); err != nil {
				t.Errorf("stop: %v", err)
			}
		})
	}
	wg.Wait()
}

func (s *suite) timed(t *testing.T) {
	d := s.open(t)
	sb := s.create(t, d, s.spec(t, 1, 1))
	if len(sb.Steps) == 0 {
		t.Error("no steps")
	}
	for _, st := range sb.Steps {
		t.Logf("%-20s at %8s took %8s", st.Name, st.Start.Round(10*time.Microsecond), st.Took.Round(10*time.Microsecond))
	}
}

func (s *suite) adopts(t *testing.T) {
	first := s.host.Open(t)
	sb, k := s.start(t, first, 1, 1)
	k.must(t, "echo", "before")
	k.Close()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	d := s.open(t)
	found, err := d.List(ctx(t))
	if err != nil || len(found) != 1 || found[0].State != driver.Running || found[0].ID != sb.ID || found[0].Epoch != sb.Epoch {
		t.Fatalf("list after a restart: %+v, %v", found, err)
	}
	s.talk(t, found[0].Sandbox).must(t, "echo", "after")
	if again := s.create(t, d, s.spec(t, 1, 1)); again.ID != sb.ID || again.PID != sb.PID {
		t.Errorf("created again after a restart: %+v, first %+v", again, sb)
	}
}

// told checks that a death by itself is told within five seconds, also to one who watches later.
func (s *suite) told(t *testing.T) {
	d := s.open(t)
	w, ok := d.(driver.Watcher)
	if !ok {
		t.Skip("skipped by capability: it is no Watcher")
	}
	sb, k := s.start(t, d, 1, 1)
	early, cancel := watch(t, w)
	defer cancel()
	_, _ = sb, k.Raw(`{"n":1,"op":"exit","args":["7"]}`+"\n")
	expect(t, early, sb.ID)
	late, cancel2 := watch(t, w)
	defer cancel2()
	expect(t, late, sb.ID)
	found, err := d.List(ctx(t))
	if err != nil || len(found) != 1 || found[0].State != driver.Exited {
		t.Errorf("list: %+v, %v", found, err)
	}
}

func watch(t *testing.T, w driver.Watcher) (<-chan driver.Event, context.CancelFunc) {
	t.Helper()
	c, cancel := context.WithCancel(context.Background())
	events, err := w.Watch(c)
	if err != nil {
		t.Fatal(err)
	}
	return events, cancel
}

func expect(t *testing.T, events <-chan driver.Event, id ids.SandboxID) {
	t.Helper()
	for late := time.After(5 * time.Second); ; {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatal("the watch ended")
			}
			if e.ID == id && e.Kind == driver.EventExited {
				if e.ExitStatus != 7 {
					t.Errorf("exit status %d", e.ExitStatus)
				}
				return
			}
		case <-late:
			t.Fatal("the exit was not told within five seconds")
		}
	}
}

func (s *suite) meters(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	if m, ok := d.(driver.Meter); ok {
		if st, err := m.Stats(ctx(t), sb.ID); err != nil || s.caps.Memory && (st.MemoryBytes == 0 || st.Processes == 0) {
			t.Errorf("stats: %+v, %v", st, err)
		}
		if _, err := m.Stats(ctx(t), "bnone"); !errs.Is(err, errkind.NotFound) {
			t.Errorf("stats of nothing: %v", err)
		}
	}
	f, ok := d.(driver.Freezer)
	if !ok {
		t.Skip("skipped by capability: it is no Freezer")
	}
	for range 2 {
		if err := f.Freeze(ctx(t), sb.ID); err != nil {
			t.Errorf("freeze: %v", err)
		}
	}
	for range 2 {
		if err := f.Thaw(ctx(t), sb.ID); err != nil {
			t.Errorf("thaw: %v", err)
		}
	}
	k.must(t, "echo", "thawed")
	if err := f.Freeze(ctx(t), sb.ID); err != nil {
		t.Error(err)
	}
	s.stop(t, d, sb) // a frozen sandbox can be stopped
}

func (s *suite) failures(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	for n := 0; s.host.Crash(d, s.tier, n, false); n++ {
		if _, err := d.Create(ctx(t), s.spec(t, 1, 1)); err == nil {
			t.Fatalf("no failure at point %d", n)
		}
		if found, err := d.List(ctx(t)); err != nil || len(found) != 0 {
			t.Errorf("point %d: list %+v, %v", n, found, err)
		}
		if left := s.host.Left(t); len(left) > len(before) {
			t.Errorf("point %d: left %v, before %v", n, left, before)
		}
	}
	s.host.Crash(d, s.tier, -1, false)
	_, k := s.start(t, d, 1, 1)
	k.must(t, "echo", "works after all")
}

func (s *suite) crashes(t *testing.T) {
	for n := 0; ; n++ {
		dead := s.host.Open(t)
		if !s.host.Crash(dead, s.tier, n, true) {
			_ = dead.Close()
			return
		}
		if _, err := dead.Create(ctx(t), s.spec(t, 1, 1)); err == nil {
			t.Errorf("no crash at point %d", n)
		}
		_ = dead.Close()
		d := s.host.Open(t)
		found, err := d.List(ctx(t))
		if err != nil || len(found) != 1 {
			t.Errorf("point %d: list after the crash %+v, %v", n, found, err)
		}
		if n%2 == 0 { // the sweep of the next start, or the same wake again
			for _, f := range found {
				s.stop(t, d, f.Sandbox)
			}
		}
		_, k := s.start(t, d, 1, 1)
		k.must(t, "echo", "healed")
		k.Close()
		s.clean(t, d)
	}
}

func (s *suite) holds(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	for range 5 {
		if err := k.Raw(`{"op":"echo","ar`); err != nil { // dies in the middle of a line
			t.Fatal(err)
		}
		k.Close()
		var err error
		if k, err = Open(sb.Channel); err != nil {
			t.Fatal(err)
		}
		if err := k.Raw("\n"); err != nil {
			t.Fatal(err)
		}
		k.must(t, "echo", "heard")
	}
	k.Close()
}
