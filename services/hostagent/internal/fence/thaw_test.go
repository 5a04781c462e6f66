package fence

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/fence/frozen"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// The watchdog thaws what a killed hostagent left frozen, also while its lease is not over yet.
func TestAFrozenDiskOutlivesNoHostagentForLong(t *testing.T) {
	p := newPlace(t)
	agent := p.hostagent()
	if err := agent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	root := frozenDisk(t, frozen.Dir(p.dir))
	if err := unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("it is not frozen, nothing is tested: %v", err)
	}
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0)
		if err == nil {
			return // it was thawed
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			t.Fatalf("it stays frozen: %v", err)
		}
	}
}

// frozenDisk mounts an ext4 and has a process freeze it and die.
func frozenDisk(t *testing.T, marks string) *os.File {
	t.Helper()
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
	root, err := os.Open(point)
	t.Cleanup(func() {
		_ = unix.IoctlSetInt(int(root.Fd()), fiThaw, 0)
		if err := errors.Join(root.Close(), unix.Unmount(point, 0), loopdev.WaitFree(image, 20*time.Second)); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "BERTH_TEST_FREEZE="+point, "BERTH_TEST_DIR="+marks)
	if out, _ := cmd.CombinedOutput(); len(out) > 0 {
		t.Fatalf("it was not killed: %s", out)
	}
	return root
}

func freezeAndDie(marks, point string) error {
	if _, err := frozen.Mark(marks, "disk", point); err != nil {
		return err
	}
	root, err := os.Open(point)
	if err != nil {
		return err
	}
	if err := unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0); err != nil {
		return err
	}
	return unix.Kill(os.Getpid(), unix.SIGKILL)
}
