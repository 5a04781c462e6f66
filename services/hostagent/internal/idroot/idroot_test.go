package idroot

import (
	"context"
	_ "net" // links these tests with shared libraries, which must not hold mounts either
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

type place struct{ lower, disk, point string }

func makePlace(t testing.TB) place {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	dir := t.TempDir()
	p := place{dir + "/lower", dir + "/disk", dir + "/root"}
	for _, d := range []string{p.lower, p.disk + "/upper", p.disk + "/work", p.point} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, owner := range map[string]int{"kept": 0, "gone": 33} {
		if err := os.WriteFile(filepath.Join(p.lower, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(filepath.Join(p.lower, name), owner, owner); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func owner(t testing.TB, path string) uint32 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Uid
}

const first = 1 << 20

// A disk that was written in a user namespace and is then mounted without one shows the same
// owners, and what was deleted stays deleted.
func TestOneDiskInBothKindsOfRoot(t *testing.T) {
	p := makePlace(t)
	s, err := NewSpace(first)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	t.Cleanup(func() { _ = unix.Unmount(p.point, unix.MNT_DETACH) })
	if err := s.Mount(context.Background(), p.lower, p.disk, p.point); err != nil {
		t.Fatal(err)
	}
	if got := owner(t, p.point+"/gone"); got != first+33 {
		t.Errorf("an image's file belongs to %d", got)
	}
	if err := os.Remove(p.point + "/gone"); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(p.point+"/new", nil, 0o644); err == nil {
		t.Error("root of the host has an owner inside")
	}
	if err := os.Chown(p.point+"/kept", first+7, first+7); err != nil {
		t.Error(err)
	}
	s.Close()
	if err := unix.Unmount(p.point, 0); err != nil {
		t.Fatal(err)
	}
	if got := owner(t, p.disk+"/upper/kept"); got != 7 {
		t.Errorf("the owner on disk is %d, not as the container saw it", got)
	}
	if err := MountPlain(p.lower, p.disk, p.point); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(p.point + "/gone"); err == nil {
		t.Error("a deleted file is back")
	}
	if got := owner(t, p.point+"/kept"); got != 7 {
		t.Errorf("the owner is %d", got)
	}
	if err := unix.Unmount(p.point, 0); err != nil {
		t.Fatal(err)
	}
}

func TestAHelperThatIsNotNeededEnds(t *testing.T) {
	makePlace(t)
	s, err := NewSpace(first)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	s.Close()
	if _, err := os.Stat(s.Path()); err == nil {
		t.Error("the namespace is still open")
	}
}

func BenchmarkSpace(b *testing.B) {
	p := makePlace(b)
	for range b.N {
		s, err := NewSpace(first)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		_ = p
		s.Close()
		b.StartTimer()
	}
}

// A helper waits for hours beside disks that come and go: one that holds a copy of the host's mounts keeps
// every disk that was mounted when it was made.
func TestAHelperThatWaitsHoldsNoMount(t *testing.T) {
	p := makePlace(t)
	image := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(image, make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-b", "4096", image).CombinedOutput(); err != nil {
		t.Skipf("skipped: no file system can be made: %v %s", err, out)
	}
	dev, err := loopdev.Attach(image, false)
	if err != nil {
		t.Skipf("skipped: no loop device: %v", err)
	}
	err = unix.Mount(dev.Name(), p.point, "ext4", 0, "")
	_ = dev.Close()
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewSpace(first)
	if uerr := unix.Unmount(p.point, 0); uerr != nil {
		t.Fatal(uerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := loopdev.WaitFree(image, 20*time.Second); err != nil {
		t.Error(err)
	}
}
