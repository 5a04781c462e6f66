package mounts

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestShareIsFoundAndTakenBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	dir := filepath.Join(t.TempDir(), "with space")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Share(dir); err != nil {
			t.Fatal(err)
		}
	}
	if is, err := IsMount(dir); err != nil || !is {
		t.Errorf("got %v, %v", is, err)
	}
	if got, err := Below(filepath.Dir(dir)); err != nil || !slices.Equal(got, []string{dir}) {
		t.Errorf("got %v, %v", got, err)
	}
	for range 2 {
		if err := Unshare(dir); err != nil {
			t.Fatal(err)
		}
	}
	if is, err := IsMount(dir); err != nil || is {
		t.Errorf("got %v, %v", is, err)
	}
	if is, err := IsMount(filepath.Join(dir, "missing")); err != nil || is {
		t.Errorf("got %v, %v", is, err)
	}
}

// Go makes every mount of a process with a mount table of its own private: our unmount does not
// arrive there, and the device below stays busy.
func TestReclaimReachesPrivateTables(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	point := t.TempDir()
	if err := unix.Mount("tmpfs", point, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	err := cmd.Start()
	if uerr := unix.Unmount(point, 0); uerr != nil {
		t.Error(uerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if got := Holders(point); !slices.Equal(got, []int{cmd.Process.Pid}) {
		t.Fatalf("holders are %v, not %d", got, cmd.Process.Pid)
	}
	Reclaim(point)
	if got := Holders(point); len(got) != 0 {
		t.Errorf("still held by %v", got)
	}
}
