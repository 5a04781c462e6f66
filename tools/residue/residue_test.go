package residue

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// A pool of disks that stays mounted after a host ended keeps its space and its file for ever.
func TestAPoolOfDisksCounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	if _, err := exec.LookPath("mkfs.xfs"); err != nil {
		t.Skip("skipped: ", err)
	}
	state := t.TempDir()
	pool, point := filepath.Join(state, "disks.xfs"), filepath.Join(state, "disks")
	before := Take()
	if err := errors.Join(os.WriteFile(pool, nil, 0o600), os.Truncate(pool, 320<<20), os.Mkdir(point, 0o700)); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	run("mkfs.xfs", "-q", "-K", pool)
	run("mount", "-o", "loop", pool, point)
	got := Take().Since(before).About(state)
	run("umount", point)
	if len(got.Mounts) != 1 || len(got.Loops) != 1 {
		t.Errorf("got %s", got)
	}
	if left := Take().Since(before).About(state); !left.Empty() {
		t.Errorf("left are %s", left)
	}
}
