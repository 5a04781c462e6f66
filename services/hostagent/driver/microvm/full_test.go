//go:build linux

package microvm

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
)

// TestAPoolWithoutRoomEndsNoMachine: a machine whose write finds no room on the host stands still, is
// not taken for ended, also by the next host agent, and goes on by itself once there is room, with
// nothing lost.
func TestAPoolWithoutRoomEndsNoMachine(t *testing.T) {
	t.Run("made", func(t *testing.T) { poolWithoutRoom(t, start) })
	t.Run("claimed", func(t *testing.T) { poolWithoutRoom(t, startWarm) })
}

func poolWithoutRoom(t *testing.T, start func(testing.TB, *Driver, driver.Spec) (driver.Sandbox, *drivertest.Talk)) {
	t.Helper()
	h := newHost(t)
	pool := t.TempDir()
	if err := unix.Mount("pool", pool, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(pool, unix.MNT_DETACH) })
	spec := h.Spec(t, 1, 1)
	image := filepath.Join(pool, "disk.ext4")
	run(t, "cp", "--sparse=always", spec.DiskImage, image)
	spec.DiskImage = image
	d := h.Open(t).(*Driver)
	sb, k := start(t, d, spec)
	n, err := k.Send("sync", "/var/much", "30")
	if err != nil {
		t.Fatal(err)
	}
	stands := func(d *Driver, want bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		v := d.vmOf(sb.ID)
		if err := v.await(ctx, func() bool { return v.full == want }); err != nil {
			t.Fatalf("full is not %v: %v", want, err)
		}
		found, err := d.List(ctx)
		if err != nil || len(found) != 1 || found[0].State != driver.Running {
			t.Fatalf("list: %+v, %v", found, err)
		}
	}
	stands(d, true)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = openDriver(t, h)
	stands(d, true)
	if err := unix.Mount("", pool, "", unix.MS_REMOUNT, "size=200m"); err != nil {
		t.Fatal(err)
	}
	stands(d, false)
	if got, err := k.Await(n, 30*time.Second); err != nil || got != "30" {
		t.Errorf("the write that had no room: %q, %v", got, err)
	}
}

// TestAGuestThatDoesNotGrowDelaysNoFreeze: a guest takes as long as it likes to grow its file system;
// who freezes or stops the machine meanwhile does not wait for it.
func TestAGuestThatDoesNotGrowDelaysNoFreeze(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	spec := h.Spec(t, 1, 1)
	sb, _ := start(t, d, spec)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	v := d.vmOf(sb.ID)
	if _, err := v.guest(ctx); err != nil {
		t.Fatal(err)
	}
	v.change(func() { v.control = nil }) // nobody answers any more
	done := make(chan error, 1)
	go func() { done <- d.ResizeDisk(ctx, sb.ID, diskBytes+8<<20) }()
	for deadline := time.Now().Add(30 * time.Second); ; <-time.After(5 * time.Millisecond) {
		st, err := os.Stat(spec.DiskImage)
		if err == nil && st.Size() > diskBytes {
			break // QEMU has grown it, and the guest is asked
		}
		if time.Now().After(deadline) {
			t.Fatalf("the disk does not grow: %v", err)
		}
	}
	began := time.Now()
	if err := d.Freeze(t.Context(), sb.ID); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the freeze took %s", took)
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("nobody answered, and it was taken for done")
	}
}

// TestAClosedDriverTellsOfNoEnd: machines go on when the host agent ends; a watcher that still looks
// then does not take them for ended.
func TestAClosedDriverTellsOfNoEnd(t *testing.T) {
	d := &Driver{closed: true, known: map[ids.SandboxID]record{"b-1": {Ready: true}}, vms: map[ids.SandboxID]*vm{}}
	w := &watcher{d: d, out: make(chan driver.Event, 1), told: map[ids.SandboxID]*toldOf{}}
	w.look(t.Context())
	select {
	case ev := <-w.out:
		t.Errorf("told %+v", ev)
	default:
	}
}
