package diskpool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// Preflight says in one sentence why Open would fail, as far as can be seen, and makes nothing.
func Preflight(cfg Config) error {
	const op = "check for a disk pool"
	p, err := newPool(cfg)
	if err != nil {
		return err
	}
	if real, err := filepath.EvalSymlinks(p.dir); err == nil {
		p.dir = real
	}
	mode, _, err := p.choose()
	if err != nil {
		return errs.E(op, kindOf(err), "", err)
	}
	if p.mode == Auto && mode == Folder {
		return nil
	}
	p.mode = mode
	switch mode {
	case Loop:
		if _, err = os.Lstat(p.file()); err == nil {
			err = p.checkFile()
		} else if err = canMake(); err == nil {
			_, err = p.newSize(cfg.Bytes)
		}
	case Device:
		_, err = p.probe()
	}
	if err != nil {
		return errs.E(op, kindOf(err), "", err)
	}
	return nil
}

// choose settles what is to be done with the folder, and never for something that hides disks. why
// says for a folder why it is no better.
func (p *Pool) choose() (mode, why string, err error) {
	onFile, err := exists(p.file())
	if err != nil {
		return "", "", err
	}
	is, err := mounts.IsMount(p.dir)
	if err != nil {
		return "", "", err
	}
	disks := false
	if !is {
		if disks, err = holds(p.dir); err != nil {
			return "", "", err
		}
	}
	conflict := func(format string, args ...any) (string, string, error) {
		return "", "", errs.Errorf("", errkind.Conflict, format, args...)
	}
	switch {
	case onFile && (p.mode == Folder || p.mode == Device):
		return conflict("the disks of %s are in %s: use mode loop, or move that file away", p.dir, p.file())
	case onFile && disks:
		return conflict("there are files in %s that mounting %s would hide: move the ones or the other away", p.dir, p.file())
	case is && !onFile && p.mode == Loop:
		return conflict("something is mounted on %s already: unmount it, or use mode folder", p.dir)
	case disks && p.mode != Auto && p.mode != Folder:
		return conflict("there are files in %s that mode %s would hide: move them away, or use mode folder", p.dir, p.mode)
	case p.mode != Auto:
		return p.mode, "", nil
	case onFile:
		return Loop, "", nil
	case is:
		return Folder, "", nil
	case disks:
		return Folder, fmt.Sprintf("%s holds disks already and stays a plain folder: empty it to get a pool that clones", p.dir), nil
	}
	return p.chooseFresh()
}

// chooseFresh is for an empty folder that may yet be anything.
func (p *Pool) chooseFresh() (mode, why string, err error) {
	if dir := existing(p.dir); dir == p.dir && extents.Usable(dir) == nil {
		return Folder, "", nil
	}
	if err := canMake(); err != nil {
		return Folder, "no pool file can be made here: " + err.Error(), nil
	}
	if _, err := p.newSize(0); err != nil {
		return Folder, "no pool file can be made here: " + err.Error(), nil
	}
	return Loop, "", nil
}

// canMake returns nil if a pool file can be made and mounted on this host.
func canMake() error {
	bad := func(why string) error { return errs.E("", errkind.Unavailable, "", why) }
	if os.Geteuid() != 0 {
		return bad("mounting needs root")
	}
	if _, err := exec.LookPath("mkfs.xfs"); err != nil {
		return bad("mkfs.xfs is missing: install the package xfsprogs")
	}
	if !kernelHas("xfs") {
		return bad("this kernel has no XFS")
	}
	ctl, err := os.OpenFile(loopdev.Control, os.O_RDWR, 0)
	if err != nil {
		return bad("no loop devices here: " + loopdev.Control + " cannot be opened")
	}
	return ctl.Close()
}

// kernelHas reports whether a file system is there, or a module of it.
func kernelHas(name string) bool {
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil || strings.Contains(string(b), "\t"+name+"\n") {
		return true // unknown: mounting will tell
	}
	return exec.Command("modprobe", "-n", "-q", name).Run() == nil
}

// newSize is the size of a new pool file.
func (p *Pool) newSize(want uint64) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(existing(filepath.Dir(p.dir)), &st); err != nil {
		return 0, fmt.Errorf("measure the file system of %s: %w", p.dir, err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < MinBytes {
		return 0, errs.Errorf("", errkind.NoCapacity, "%d MiB are free beside %s, a pool needs %d at least", free>>20, p.dir, MinBytes>>20)
	}
	if want == 0 {
		want = max(min(st.Blocks*uint64(st.Bsize), maxBytes), MinBytes)
	}
	return want / unit * unit, nil
}

func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// existing is the nearest folder at or above dir that is already there.
func existing(dir string) string {
	for dir != "/" && dir != "." {
		if _, err := os.Stat(dir); err == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return dir
}
