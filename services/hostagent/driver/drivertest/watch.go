package drivertest

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// noticed is how soon the end of a sandbox must be told.
const noticed = 5 * time.Second

func watch(t *testing.T, w driver.Watcher) (<-chan driver.Event, context.CancelFunc) {
	t.Helper()
	c, cancel := context.WithCancel(context.Background())
	events, err := w.Watch(c)
	if err != nil {
		t.Fatal(err)
	}
	return events, cancel
}

// expect waits for the end of a sandbox.
func expect(t *testing.T, events <-chan driver.Event, id ids.SandboxID) driver.Event {
	t.Helper()
	for late := time.After(noticed); ; {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatal("the watch ended")
			}
			if e.ID == id && e.Kind == driver.EventExited {
				return e
			}
		case <-late:
			t.Fatalf("the exit was not told within %s", noticed)
		}
	}
}

// unknown is the exit status of a process whose own is not known any more: a host that was too busy to ask
// says so and makes nothing up.
const unknown = 255

// own checks that a status is the process's own, or is said to be unknown; true if it is the own one.
func own(t *testing.T, e driver.Event, status uint32) bool {
	t.Helper()
	if e.ExitStatus != status && e.ExitStatus != unknown {
		t.Errorf("exit status %d, its own is %d", e.ExitStatus, status)
	}
	return e.ExitStatus == status
}

// watched starts a sandbox under watch.
func (s *suite) watched(t *testing.T) (driver.Driver, <-chan driver.Event, driver.Sandbox, *Talk) {
	t.Helper()
	d := s.open(t)
	events, cancel := watch(t, optional[driver.Watcher](t, d, "Watcher"))
	t.Cleanup(cancel)
	sb, k := s.start(t, d, 1, 1)
	return d, events, sb, k
}

// kill ends the first process of a sandbox from outside.
func (s *suite) kill(t *testing.T, sb driver.Sandbox) {
	t.Helper()
	kill(t, s.host, sb)
}

func kill(t testing.TB, h Host, sb driver.Sandbox) {
	t.Helper()
	if own, ok := h.(Killer); ok {
		own.Kill(t, sb)
		return
	}
	if sb.PID <= 0 {
		t.Fatal("the sandbox has no process on the host, and the test's host is no Killer")
	}
	if err := syscall.Kill(sb.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// toldStatus: an exit status that is made up: 0 for a failure, or another than the process's own.
func (s *suite) toldStatus(t *testing.T) {
	d, events, sb, k := s.watched(t)
	known := 0
	for i, status := range []uint32{7, 0, 200} {
		if _, err := k.Send("exit", itoa(int(status))); err != nil {
			t.Fatal(err)
		}
		e := expect(t, events, sb.ID)
		if own(t, e, status) {
			known++
		}
		if age := time.Since(e.At); age < -time.Second || age > time.Minute {
			t.Errorf("it ended at %s", e.At)
		}
		s.stop(t, d, sb)
		sb, k = s.start(t, d, 1, uint64(i+2))
	}
	if known == 0 {
		t.Error("none of three statuses is known")
	}
}

// toldLate: an end that happened while nobody watched and that nobody is told of any more.
func (s *suite) toldLate(t *testing.T) {
	d := s.open(t)
	w := optional[driver.Watcher](t, d, "Watcher")
	sb, k := s.start(t, d, 1, 1)
	s.exit(t, d, k, "7")
	for range 2 { // also to a second one
		events, cancel := watch(t, w)
		own(t, expect(t, events, sb.ID), 7)
		cancel()
	}
}

// toldOnce: an end that is told again and again, so that the second life of a session is ended by the
// news of the first.
func (s *suite) toldOnce(t *testing.T) {
	d, events, sb, k := s.watched(t)
	last, kl := s.start(t, d, 2, 1)
	s.exit2(t, d, sb.ID, k)
	expect(t, events, sb.ID)
	s.exit2(t, d, last.ID, kl)
	for late := time.After(noticed); ; {
		select {
		case e := <-events:
			if e.ID == sb.ID && e.Kind == driver.EventExited {
				t.Error("told twice")
			}
			if e.ID == last.ID && e.Kind == driver.EventExited {
				return
			}
		case <-late:
			t.Fatal("the second exit was not told")
		}
	}
}

// exit2 ends one of several sandboxes and waits until that is listed.
func (s *suite) exit2(t *testing.T, d driver.Driver, id ids.SandboxID, k *Talk) {
	t.Helper()
	if _, err := k.Send("exit", "7"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the sandbox has exited", func() bool {
		for _, f := range list(t, d) {
			if f.ID == id {
				return f.State == driver.Exited
			}
		}
		return false
	})
}

// toldKilled: a sandbox that was killed from outside and passes for one that runs, or for one that ended
// well.
func (s *suite) toldKilled(t *testing.T) {
	_, events, sb, _ := s.watched(t)
	s.kill(t, sb)
	if e := expect(t, events, sb.ID); e.ExitStatus == 0 {
		t.Error("it was killed, and its exit status is told as 0")
	}
}

// toldAll: two who watch, of whom only one is told.
func (s *suite) toldAll(t *testing.T) {
	d, events, sb, k := s.watched(t)
	others, cancel := watch(t, optional[driver.Watcher](t, d, "Watcher"))
	defer cancel()
	if _, err := k.Send("exit", "7"); err != nil {
		t.Fatal(err)
	}
	for _, e := range []<-chan driver.Event{events, others} {
		own(t, expect(t, e, sb.ID), 7)
	}
}

// slowWatcher: one who watches and does not read, and keeps everybody else from working, or misses for
// good what happened meanwhile.
func (s *suite) slowWatcher(t *testing.T) {
	d := s.open(t)
	w := optional[driver.Watcher](t, d, "Watcher")
	slow, cancelSlow := watch(t, w)
	defer cancelSlow()
	quick, cancel := watch(t, w)
	defer cancel()
	n := 600 // more than any buffer
	if s.caps.Isolated {
		n = 3
	}
	spec, last := s.spec(t, 1, 1), driver.Sandbox{}
	for i := range n {
		spec.Epoch.Index = uint64(i + 1)
		sb := s.create(t, d, spec)
		k, err := s.dial(t, sb)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := k.Send("exit", "7"); err != nil {
			t.Fatal(err)
		}
		expect(t, quick, sb.ID)
		k.Close()
		if last = sb; i < n-1 {
			s.stop(t, d, sb)
		}
	}
	own(t, expect(t, slow, last.ID), 7)
}

// watchEnds: a watch that never ends, with all that it holds.
func (s *suite) watchEnds(t *testing.T) {
	events, cancel := watch(t, optional[driver.Watcher](t, s.pair.d, "Watcher"))
	cancel()
	for late := time.After(noticed); ; {
		select {
		case _, ok := <-events:
			if !ok {
				return
			}
		case <-late:
			t.Fatal("the watch goes on after its end")
		}
	}
}

// toldMemory: a session that ends for lack of memory, and whose owner is told that it ended, but not why.
func (s *suite) toldMemory(t *testing.T) {
	_, events, sb, k := s.watched(t)
	if !s.hog(t, k, int(s.spec(t, 1, 1).Limits.MemoryBytes>>20)*2) {
		t.Error("it took twice its limit")
	}
	for late := time.After(2 * noticed); ; {
		select {
		case e := <-events:
			if e.ID == sb.ID && e.Kind == driver.EventOOM {
				return
			}
			if e.ID == sb.ID && e.Kind == driver.EventExited {
				t.Error("the end is told before its reason")
			}
		case <-late:
			t.Fatal("running out of memory was not told")
		}
	}
}

// hogTime bounds how long an emulated machine on a busy host needs to touch twice its memory.
const hogTime = 5 * time.Minute

// hog takes memory, in MiB, in a process of its own where there are such; false if it got it all.
func (s *suite) hog(t *testing.T, k *Talk, mib int) bool {
	t.Helper()
	op := []string{"hog"}
	if s.caps.Native {
		op = []string{"spawn", "alloc"}
	}
	n, err := k.Send(op[0], append(op[1:], itoa(mib))...)
	if err != nil {
		return true
	}
	_, err = k.Await(n, hogTime)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the probe did not answer within %s whether it got %d MiB", hogTime, mib)
	}
	return err != nil
}
