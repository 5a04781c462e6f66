package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// noRoom is a Snapshotter that meets a full store in the middle of its work.
type noRoom struct{ Snapshotter }

func (n *noRoom) Snapshot(ctx context.Context, rec Record, image *os.File) (Manifest, error) {
	if n.Snapshotter == nil {
		return Manifest{ID: "half"}, fmt.Errorf("write chunk: %w", unix.ENOSPC)
	}
	return n.Snapshotter.Snapshot(ctx, rec, image)
}

// TestASnapshotThatMetNoSpaceIsNotOk: neither a sleep nor a checkpoint is
// acknowledged, the disk is as it was, and it goes well once there is room.
func TestASnapshotThatMetNoSpaceIsNotOk(t *testing.T) {
	needRoot(t)
	ctx := t.Context()
	s := openTest(t, t.TempDir(), nil)
	snap := &noRoom{}
	s.snap = snap
	a := attach(t, s, fresh(1, 1))
	if err := s.Activate(key(1), ep(1)); err != nil {
		t.Fatal(err)
	}
	put(t, a, "f", "precious")
	if m, err := s.Checkpoint(ctx, key(1), ep(1)); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("the checkpoint is %+v, %v", m, err)
	}
	put(t, a, "g", "written after the checkpoint") // it does not stay frozen
	for range 2 {
		if m, err := s.Seal(ctx, key(1), ep(1)); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("the seal is %+v, %v", m, err)
		}
	}
	inv, err := s.List()
	if err != nil || len(inv.Disks) != 1 || inv.Disks[0].State != Dirty || inv.Disks[0].Base != "" {
		t.Fatalf("the record is %+v, %v", inv.Disks, err)
	}
	// The session goes on in another epoch with its newest files.
	again := attach(t, s, Want{Key: key(1), Epoch: ep(2), LastActive: ep(1)})
	if got := get(t, again, "f"); got != "precious" {
		t.Errorf("the file says %q", got)
	}
	if err := s.Activate(key(1), ep(2)); err != nil {
		t.Fatal(err)
	}
	snap.Snapshotter = Local{}
	m, err := s.Seal(ctx, key(1), ep(2))
	if err != nil || m.ID == "" {
		t.Fatalf("with room again: %+v, %v", m, err)
	}
	if err := s.Commit(m); err != nil {
		t.Fatal(err)
	}
}
