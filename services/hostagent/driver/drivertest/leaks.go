package drivertest

import (
	"os"
	"runtime"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// failures: a failed start of which something is left, at every step that can fail.
func (s *suite) failures(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	n := 0
	for ; s.host.Crash(d, s.tier, n, false); n++ {
		if _, err := d.Create(ctx(t), s.spec(t, 1, 1)); err == nil {
			t.Fatalf("no failure at point %d", n)
		}
		s.nothing(t, d, before)
	}
	if n == 0 {
		t.Error("the host has no point of failure: nothing was tried")
	}
	s.host.Crash(d, s.tier, -1, false)
	_, k := s.start(t, d, 1, 1)
	k.must(t, "echo", "works after all")
}

// failsAgain: a start that fails and is tried again and again with the same name, each time leaving more.
func (s *suite) failsAgain(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	last := 0
	for s.host.Crash(d, s.tier, last+1, false) {
		last++
	}
	s.host.Crash(d, s.tier, last, false) // most is made by then
	for range 5 {
		if _, err := d.Create(ctx(t), s.spec(t, 1, 1)); err == nil {
			t.Fatal("no failure")
		}
	}
	s.nothing(t, d, before)
	s.host.Crash(d, s.tier, -1, false)
	s.start(t, d, 1, 1)
}

// crashes: an agent that is killed in the middle of a start, at every step, whose remains the next one
// does not find or cannot remove.
func (s *suite) crashes(t *testing.T) {
	n := 0
	for ; ; n++ {
		dead := s.host.Open(t)
		if !s.host.Crash(dead, s.tier, n, true) {
			_ = dead.Close()
			break
		}
		if _, err := dead.Create(ctx(t), s.spec(t, 1, 1)); err == nil {
			t.Errorf("no crash at point %d", n)
		}
		_ = dead.Close()
		d := s.host.Open(t)
		found := list(t, d)
		if len(found) != 1 || !s.named(found[0].ID, s.spec(t, 1, 1)) {
			t.Errorf("point %d: list after the crash %+v", n, found)
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
	if n == 0 {
		t.Error("the host has no point of crash: nothing was tried")
	}
	s.open(t) // and lets go of the disk
}

// crashesAgain: an agent that is killed at the same step of the same start again and again, until the
// remains stand in the way of every later one.
func (s *suite) crashesAgain(t *testing.T) {
	for range 3 {
		dead := s.host.Open(t)
		last := 0
		for s.host.Crash(dead, s.tier, last+1, true) {
			last++
		}
		s.host.Crash(dead, s.tier, last, true)
		_, _ = dead.Create(ctx(t), s.spec(t, 1, 1)) // it ends in the middle, or takes over what runs already
		_ = dead.Close()
	}
	d := s.open(t)
	only(t, d)
	_, k := s.start(t, d, 1, 1)
	k.must(t, "echo", "healed")
	only(t, d)
}

// lives is how many lives of sandboxes a check makes: fewer where a kernel is emulated.
func (s *suite) lives() int {
	if s.caps.OwnKernel && s.caps.Accel != "kvm" {
		return 5
	}
	return 20
}

// twentyLives: a host that fills up with what each sandbox leaves: processes, mounts, cgroups, network
// namespaces, sockets, open files and goroutines.
func (s *suite) twentyLives(t *testing.T) {
	d := s.open(t)
	life := func() {
		sb := s.create(t, d, s.spec(t, 1, 1))
		k, err := s.dial(t, sb)
		if err != nil {
			t.Fatal(err)
		}
		k.must(t, "echo", "alive")
		k.Close()
		s.stop(t, d, sb)
	}
	life() // what stays for good is made by now
	before := s.host.Left(t)
	files, routines := openFiles(t), runtime.NumGoroutine()
	const slack = 4 // connections that come and go
	for range s.lives() {
		life()
	}
	s.nothing(t, d, before)
	eventually(t, "no more open files than before", func() bool { return openFiles(t) <= files+slack })
	eventually(t, "no more goroutines than before", func() bool { return runtime.NumGoroutine() <= routines+slack })
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// reopened: a driver that leaves something of its own each time it is opened and closed.
func (s *suite) reopened(t *testing.T) {
	open := func() {
		if err := s.host.Open(t).Close(); err != nil {
			t.Fatal(err)
		}
	}
	open()
	files, routines := openFiles(t), runtime.NumGoroutine()
	for range 5 {
		open()
	}
	eventually(t, "no more open files than before", func() bool { return openFiles(t) <= files+2 })
	eventually(t, "no more goroutines than before", func() bool { return runtime.NumGoroutine() <= routines+2 })
}

// removedByHand: compute that was removed from outside and still stands in the way of a delete or of
// the next start.
func (s *suite) removedByHand(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	sb, _ := s.start(t, d, 1, 1)
	s.kill(t, sb)
	s.stop(t, d, sb)
	s.nothing(t, d, before)
	sb, k := s.start(t, d, 1, 1)
	s.kill(t, sb)
	eventually(t, "it is not listed as running", func() bool { return only(t, d).State != driver.Running })
	_, k = s.start(t, d, 1, 1)
	k.must(t, "echo", "awake again")
}
