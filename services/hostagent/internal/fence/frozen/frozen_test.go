package frozen

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

const fiFreeze = 0xc0045877

// TestMain plays a hostagent that is killed between freeze and thaw.
func TestMain(m *testing.M) {
	if point := os.Getenv("BERTH_TEST_FREEZE"); point != "" {
		_, err := Mark(os.Getenv("BERTH_TEST_DIR"), "disk", point)
		if err == nil {
			err = ioctl(point, fiFreeze)
		}
		if err == nil {
			err = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func ioctl(point string, req uint) error {
	d, err := os.Open(point)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return unix.IoctlSetInt(int(d.Fd()), req, 0)
}

// mounted is a mounted ext4 that is thawed and unmounted at the end.
func mounted(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	dir := t.TempDir()
	image, point := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 16<<20), os.Mkdir(point, 0o700)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-b", "4096", image).CombinedOutput(); err != nil {
		t.Skipf("skipped: mkfs.ext4: %v: %s", err, out)
	}
	dev, err := loopdev.Attach(image, false)
	if err != nil {
		t.Skip("skipped: ", err)
	}
	defer func() { _ = dev.Close() }()
	if err := unix.Mount(dev.Name(), point, "ext4", unix.MS_NOATIME, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = ioctl(point, fiThaw)
		if err := errors.Join(unix.Unmount(point, 0), loopdev.WaitFree(image, 20*time.Second)); err != nil {
			t.Error(err)
		}
	})
	return point
}

func isFrozen(t *testing.T, point string) bool {
	t.Helper()
	err := ioctl(point, fiFreeze)
	if errors.Is(err, unix.EBUSY) {
		return true
	}
	if err := errors.Join(err, ioctl(point, fiThaw)); err != nil {
		t.Fatal(err)
	}
	return false
}

func freezeAndDie(t *testing.T, dir, point string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "BERTH_TEST_FREEZE="+point, "BERTH_TEST_DIR="+dir)
	if out, _ := cmd.CombinedOutput(); len(out) > 0 {
		t.Fatalf("it was not killed: %s", out)
	}
	if !isFrozen(t, point) {
		t.Fatal("it is not frozen: nothing is tested")
	}
}

func (w *watch) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.busy) == 0
}

// lookAt is one look of a watchdog, to its end.
func lookAt(t *testing.T, dir string, at time.Duration) {
	t.Helper()
	w := &watch{dir: dir, say: func(s string) { t.Log(s) }, busy: map[string]bool{}}
	w.look(at)
	for end := time.Now().Add(10 * time.Second); !w.idle(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a thaw hangs")
		}
	}
}

// A session whose disk stays frozen stands still for ever.
func TestADeathBetweenFreezeAndThaw(t *testing.T) {
	point, dir := mounted(t), Dir(t.TempDir())
	freezeAndDie(t, dir, point)
	lookAt(t, dir, now())
	if !isFrozen(t, point) {
		t.Error("it was thawed at once: a clone would not be of one moment")
	}
	lookAt(t, dir, now()+2*Limit)
	if isFrozen(t, point) {
		t.Error("it stays frozen")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("marks are left: %v, %v", left, err)
	}
	if err := ioctl(point, fiThaw); !errors.Is(err, unix.EINVAL) {
		t.Errorf("the owner does not learn of it: %v", err)
	}
}

func TestWatchThawsByItself(t *testing.T) {
	point, dir := mounted(t), Dir(t.TempDir())
	said := make(chan string, 8)
	go Watch(dir, func(s string) { said <- s })
	if err := ioctl(point, fiFreeze); err != nil {
		t.Fatal(err)
	}
	m, err := newMarker(dir, "disk", point)
	m.at += time.Hour // of a run before this boot
	if err == nil {
		err = m.put(filepath.Join(dir, "disk"))
	}
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-said:
	case <-time.After(30 * time.Second):
		t.Fatal("it stays frozen")
	}
	if isFrozen(t, point) {
		t.Error("it stays frozen")
	}
}

// What somebody else froze, or what lies behind a symlink, is not ours to thaw.
func TestNothingElseIsThawed(t *testing.T) {
	point, dir := mounted(t), Dir(t.TempDir())
	if err := ioctl(point, fiFreeze); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	var st unix.Stat_t
	if err := errors.Join(os.Symlink(point, link), unix.Stat(point, &st), os.MkdirAll(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	for name, m := range map[string]string{
		"link": marker{0, uint64(st.Dev), link}.String(), "device": marker{0, uint64(st.Dev) + 1, point}.String(),
		"gone": marker{0, uint64(st.Dev), point + "-gone"}.String(), "garbage": "garbage",
	} {
		if err := os.Symlink(m, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	lookAt(t, dir, now()+2*Limit)
	if !isFrozen(t, point) {
		t.Error("it was thawed")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("marks that are of no use stay: %v, %v", left, err)
	}
	// The owner may name the mount point by a symlink.
	unmark, err := Mark(dir, "disk", link)
	if err != nil {
		t.Fatal(err)
	}
	lookAt(t, dir, now()+2*Limit)
	if isFrozen(t, point) {
		t.Error("it stays frozen")
	}
	unmark()
	for _, key := range []string{"", ".", "..", "a/b", ".hidden"} {
		if _, err := Mark(dir, key, point); err == nil {
			t.Errorf("key %q was taken", key)
		}
	}
}

// The kernel may take longer to freeze than a freeze may last; who asked for it may be dead by then.
func TestAFreezeThatIsLateIsThawedToo(t *testing.T) {
	point, dir := mounted(t), Dir(t.TempDir())
	unmark, err := Mark(dir, "disk", point)
	if err != nil {
		t.Fatal(err)
	}
	defer unmark()
	lookAt(t, dir, now()+2*Limit)
	if err := ioctl(point, fiFreeze); err != nil {
		t.Fatal(err)
	}
	lookAt(t, dir, now()+2*Limit)
	if isFrozen(t, point) {
		t.Error("it stays frozen")
	}
	if _, err := Mark(dir, "disk", point); err != nil {
		t.Fatal(err)
	}
	lookAt(t, dir, now()+slowest+time.Second)
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("marks are kept for ever: %v, %v", left, err)
	}
}

// Without clones a disk is copied while it is frozen, which may take longer than Limit.
func TestALivingOwnerKeepsItsFreeze(t *testing.T) {
	point, dir := t.TempDir(), Dir(t.TempDir())
	unmark, err := Mark(dir, "disk", point)
	if err != nil {
		t.Fatal(err)
	}
	read := func() time.Duration {
		s, err := os.Readlink(filepath.Join(dir, "disk"))
		if err != nil {
			t.Fatal(err)
		}
		m, err := parse(s)
		if err != nil || m.point != point {
			t.Fatalf("got %v, %v", m, err)
		}
		return m.at
	}
	first := read()
	for end := time.Now().Add(30 * time.Second); read() == first; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the mark is not renewed")
		}
	}
	for range 2 {
		unmark()
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

func TestUnmarkEndsIt(t *testing.T) {
	dir := Dir(t.TempDir())
	for range 2 {
		unmark, err := Mark(dir, "disk", t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		again, err := Mark(dir, "disk", t.TempDir())
		if err != nil {
			t.Fatalf("a mark that a dead one left: %v", err)
		}
		unmark()
		again()
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("left are %v, %v", left, err)
		}
	}
}

func TestMarksAreReadAsWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := marker{time.Duration(rapid.Int64().Draw(t, "at")), rapid.Uint64().Draw(t, "dev"), "/" + rapid.String().Draw(t, "point")}
		if got, err := parse(m.String()); err != nil || got != m {
			t.Fatalf("%v became %v, %v", m, got, err)
		}
	})
}

func FuzzMark(f *testing.F) {
	f.Add("1:2:/mnt")
	f.Add("::")
	f.Fuzz(func(t *testing.T, s string) {
		if m, err := parse(s); err == nil && !filepath.IsAbs(m.point) {
			t.Errorf("%q names %q", s, m.point)
		}
	})
}
