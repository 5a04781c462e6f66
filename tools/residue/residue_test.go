package residue

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/berth-dev/berth/internal/netns"
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

// A router that stays pinned after its host ended keeps a namespace and its links for ever, and no process
// is in it by which it could be found.
func TestAPinnedNamespaceAndItsLinksCount(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: namespaces need root")
	}
	state := t.TempDir()
	path := filepath.Join(state, "router")
	before := Take()
	if _, err := netns.Pin(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netns.Remove(path) })
	err := netns.Do(path, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"})
	})
	if err != nil {
		t.Fatal(err)
	}
	got := Take().Since(before).About(state)
	if len(got.Mounts) != 1 || len(got.Links) != 2 {
		t.Errorf("got %s", got)
	}
	if err := netns.Remove(path); err != nil {
		t.Fatal(err)
	}
	if left := Take().Since(before).About(state); !left.Empty() {
		t.Errorf("left are %s", left)
	}
}
