package saver

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// inMachine mounts the session's image as a machine would, and ends that.
func (w *world) inMachine(do func(upper string)) {
	w.t.Helper()
	image := filepath.Join(w.dir, "sessions", session(0).Key.String(), "disk.img")
	dev, err := loopdev.Attach(image, false)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = dev.Close() }()
	point := w.t.TempDir()
	if err := unix.Mount(dev.Name(), point, "ext4", 0, "noinit_itable,discard"); err != nil {
		w.t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(point, 0); err != nil {
			w.t.Error(err)
		}
		if loopdev.WaitFree(image, time.Second) != nil { // another process copied the mount table meanwhile
			mounts.Reclaim(point)
		}
	}()
	do(filepath.Join(point, disk.Upper))
}

// TestWhatAMachineWroteSaysSoWhereverItComesFrom: its snapshots, the one of its sleep, the image that
// another host makes from the store, and what brings back a snapshot of the time before.
func TestWhatAMachineWroteSaysSoWhereverItComesFrom(t *testing.T) {
	w := newWorld(t)
	w.mustWake(1)
	w.write(1)
	w.mustSeal(1)
	before := w.sched.head
	w.raw = true
	w.mustWake(2)
	w.inMachine(func(upper string) {
		if err := os.WriteFile(filepath.Join(upper, "file"), content(2), 0o644); err != nil {
			t.Fatal(err)
		}
	})
	r, err := w.saver.Save(t.Context(), session(2))
	if err != nil || r.Same || !r.VMWritten || !r.CrashConsistent || r.Parent != before {
		t.Fatalf("a snapshot of a machine that nobody can stop: %+v, %v", r, err)
	}
	if again, err := w.saver.Save(t.Context(), session(2)); err != nil || !again.Same {
		t.Errorf("nothing was written since: %+v, %v", again, err)
	}
	w.inMachine(func(upper string) {
		if err := os.WriteFile(filepath.Join(upper, "more"), content(3), 0o644); err != nil {
			t.Fatal(err)
		}
	})
	on := session(2)
	on.Unflushed = true
	if r, err = w.saver.Seal(t.Context(), on); err != nil || !r.VMWritten || !r.CrashConsistent {
		t.Fatalf("the sleep of a machine that was killed: %+v, %v", r, err)
	}
	w.forget()
	w.raw = false
	if err := w.wake(3); !errs.Is(err, errkind.Refused) {
		t.Fatalf("another host mounts what the store says that a machine wrote: %v", err)
	}
	w.raw = true
	w.mustWake(4)
	w.inMachine(func(upper string) {
		for name, n := range map[string]int{"file": 2, "more": 3} {
			if b, err := os.ReadFile(filepath.Join(upper, name)); err != nil || string(b) != string(content(n)) {
				t.Errorf("%s: %d bytes, %v", name, len(b), err)
			}
		}
	})
	w.mustSeal(4)
	w.sched.epoch = session(5).Epoch
	if _, err := w.saver.Fetch(t.Context(), session(5), Wanted{Head: w.sched.head, LastActive: w.sched.lastActive, Snapshot: before}); err != nil {
		t.Fatal(err)
	}
	if rec, err := w.disks.Get(session(0).Key); err != nil || !rec.VMWritten {
		t.Errorf("a snapshot of the time before: %+v, %v", rec, err)
	}
}
