package disk

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// Preflight says in one sentence why disks cannot be kept in dir, before anything is made there.
func Preflight(dir string, reserve uint64) error {
	bad := func(cause any) error { return errs.E("check for disks", errkind.Unavailable, "", cause) }
	if os.Geteuid() != 0 {
		return bad("berth must run as root to attach disks")
	}
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		return bad("mkfs.ext4 is missing: install the package e2fsprogs")
	}
	ctl, err := os.OpenFile(loopdev.Control, os.O_RDWR, 0)
	if err != nil {
		return bad("no loop devices here: " + loopdev.Control + " cannot be opened")
	}
	_ = ctl.Close()
	if b, err := os.ReadFile("/proc/filesystems"); err == nil && !strings.Contains(string(b), "\text4\n") {
		return bad("this kernel has no ext4")
	}
	if _, err := unix.Openat2(unix.AT_FDCWD, ".", &unix.OpenHow{Flags: 1 << 62}); err == unix.ENOSYS {
		return bad("this kernel is too old: openat2 is missing, 5.19 or newer is needed")
	}
	free, err := freeBytes(existing(dir))
	if err != nil {
		return bad(err)
	}
	if free < reserve+MinSize {
		return errs.Errorf("check for disks", errkind.NoCapacity, "no space for disks: %s are free in %s, at least %s are needed",
			fmtBytes(free), existing(dir), fmtBytes(reserve+MinSize))
	}
	return nil
}

// existing is the nearest folder above dir that is already there.
func existing(dir string) string {
	for dir != "/" && dir != "." {
		if _, err := os.Stat(dir); err == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return dir
}
