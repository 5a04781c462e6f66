package disk

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// TestASnapshotThatMetNoSpaceIsNotOk: neither a sleep nor a snapshot is acknowledged, the disk is as
// it was, and it goes well once there is room.
func TestASnapshotThatMetNoSpaceIsNotOk(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := awake(t, s, 1, 1)
		put(t, a, "f", "precious")
		noRoom := func(step string) error {
			if step == "propose.index" || step == "shot.cloned" || step == "clone.made" {
				return fmt.Errorf("write %s: %w", step, unix.ENOSPC)
			}
			return nil
		}
		s.fault = noRoom
		if sh, err := s.Shoot(t.Context(), key(1), ep(1)); kindOf(err) != kindOf(unix.ENOSPC) {
			t.Errorf("the shot is %+v, %v", sh, err)
		}
		put(t, a, "g", "written after the shot") // it does not stay frozen
		for range 2 {
			sh, _, err := s.SealShot(t.Context(), key(1), ep(1))
			if err == nil {
				err = s.Propose(sh, manifestOf(sh, "m1"), nil)
			}
			if kindOf(err) != kindOf(unix.ENOSPC) {
				t.Errorf("the seal is %+v, %v", sh, err)
			}
		}
		s.fault = nil
		if r := record(t, s, 1); r.State != Dirty || r.Base != "" || r.Pending.ID != "" {
			t.Fatalf("the record is %+v", r)
		}
		// The session goes on in another epoch with its newest files.
		if again := wake(t, s, 1, 2, "", 1); get(t, again, "f") != "precious" {
			t.Error("the file is gone")
		}
		slept2(t, s, 1, 2, "m2")
		if got := names(t, s, 1); got[shotImageName] || got[shotIndexName] || got[shotImageName+making] {
			t.Errorf("left: %v", got)
		}
	})
}
