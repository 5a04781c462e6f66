// Package diskpool makes the folder in which disks live able to clone files: an XFS file system in a
// file beside it (loop), on a device of its own (device), or the folder as it is (folder). It
// guarantees that a pool that exists is never formatted again and that disks in a folder are never
// hidden below a mount, whatever is wrong: it refuses with a sentence. A kill at any step leaves what
// the next Open completes; a pool that is still mounted is taken over; one pool is mounted once.
package diskpool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// Modes of a pool.
const (
	Auto   = "auto" // folder if it clones files, else loop if that is possible, else folder
	Folder = "folder"
	Loop   = "loop"
	Device = "device"
)

const (
	suffix = ".xfs" // the pool file of a folder is beside it
	making = ".making"

	// MinBytes is the smallest pool that mkfs.xfs makes.
	MinBytes = 300 << 20
	// maxBytes is what a pool file gets at most unless it is asked for: ext4 has no larger files.
	maxBytes = 15 << 40
	unit     = 1 << 20

	freeTime    = 5 * time.Second // for a loop device to go after its mount
	reclaimTime = 300 * time.Millisecond
)

// Config of a pool.
type Config struct {
	// Dir is where disks live.
	Dir string
	// Mode is one of the modes; empty means Auto.
	Mode string
	// Device is the block device of mode Device.
	Device string
	// Bytes is the size of a pool file; zero is that of the file system below it. An existing file
	// grows to it and never shrinks.
	Bytes uint64
	Log   *slog.Logger
}

// Pool is an open pool. Safe for concurrent use.
type Pool struct {
	dir, mode, device string
	outer, missing    string
	reflink           bool
	log               *slog.Logger
	at                func(step string) error

	mu   sync.Mutex
	root *os.File // keeps others from unmounting it
}

// Open makes the pool ready, or takes over one that is. It is idempotent and may run in several
// processes at once. Kinds: Invalid (configuration), Conflict (disks would be hidden, or something
// else is mounted there), Refused (a device or pool file that holds something else), NoCapacity,
// Unavailable (what is needed is missing here).
func Open(ctx context.Context, cfg Config) (*Pool, error) {
	return open(ctx, cfg, func(string) error { return nil })
}

func open(ctx context.Context, cfg Config, at func(string) error) (*Pool, error) {
	const op = "open disk pool"
	p, err := newPool(cfg)
	if err != nil {
		return nil, err
	}
	p.at = at
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return nil, errs.E(op, errkind.Unavailable, p.dir, err)
	}
	if p.dir, err = filepath.EvalSymlinks(p.dir); err != nil {
		return nil, errs.E(op, errkind.Unavailable, p.dir, err)
	}
	unlock, err := lock(ctx, filepath.Dir(p.dir))
	if err != nil {
		return nil, errs.E(op, errs.Kind(err), p.dir, err)
	}
	defer unlock()
	if err := p.open(ctx, cfg.Bytes); err != nil {
		return nil, errs.E(op, kindOf(err), p.dir, err)
	}
	if p.root, err = os.Open(p.dir); err != nil {
		return nil, errs.E(op, errkind.Unavailable, p.dir, err)
	}
	if p.missing != "" {
		p.log.Warn("the disk pool does not clone files", "dir", p.dir, "why", p.missing)
	}
	return p, nil
}

// newPool checks what needs no look at the host.
func newPool(cfg Config) (*Pool, error) {
	bad := func(cause any) (*Pool, error) {
		return nil, errs.E("configure disk pool", errkind.Invalid, cfg.Dir, cause)
	}
	p := &Pool{mode: cfg.Mode, device: cfg.Device, log: cfg.Log}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	switch p.mode {
	case "":
		p.mode = Auto
	case Auto, Folder, Loop, Device:
	default:
		return bad(fmt.Sprintf("mode %q is none of auto, folder, loop, device", cfg.Mode))
	}
	switch {
	case cfg.Dir == "":
		return bad("no folder is given")
	case (p.mode == Device) != (cfg.Device != ""):
		return bad("a device must be given for mode device, and only for it")
	case cfg.Bytes != 0 && cfg.Bytes < MinBytes:
		return bad(fmt.Sprintf("a pool of %d bytes is too small: %d MiB are needed at least", cfg.Bytes, MinBytes>>20))
	}
	var err error
	if p.dir, err = filepath.Abs(cfg.Dir); err != nil {
		return bad(err)
	}
	return p, nil
}

func (p *Pool) open(ctx context.Context, size uint64) error {
	mode, why, err := p.choose()
	if err != nil {
		return err
	}
	auto := p.mode == Auto
	p.mode, p.missing = mode, why
	switch mode {
	case Loop:
		made, err := p.openLoop(ctx, size)
		if err != nil && auto && made && errs.Is(err, errkind.Unavailable) {
			// It was made just now, so it holds nothing, and this host cannot mount it.
			p.mode, p.missing = Folder, "no pool file can be used here: "+err.Error()
			return errors.Join(os.Remove(p.file()), p.try())
		}
		if err != nil {
			return err
		}
		p.outer = filepath.Dir(p.dir)
	case Device:
		if err := p.openDevice(ctx); err != nil {
			return err
		}
	}
	if mode != Folder {
		if err := os.Chmod(p.dir, 0o700); err != nil { // mkfs lets everybody in
			return err
		}
	}
	return p.try()
}

// try finds out whether the pool clones files, and if not why.
func (p *Pool) try() error {
	err := extents.Usable(p.dir)
	p.reflink = err == nil
	switch {
	case err == nil:
		p.missing = ""
	case !errors.Is(err, extents.ErrNotSupported):
		return err
	case p.missing == "" && p.mode == Folder:
		p.missing = fmt.Sprintf("the file system of %s cannot clone files", p.dir)
	case p.missing == "":
		p.missing = fmt.Sprintf("the XFS file system of %s was made without reflink", p.dir)
	}
	return nil
}

// Dir is where disks live.
func (p *Pool) Dir() string { return p.dir }

// Mode is the one that was chosen: Folder, Loop or Device.
func (p *Pool) Mode() string { return p.mode }

// Reflink reports whether files in the pool can be cloned.
func (p *Pool) Reflink() bool { return p.reflink }

// Missing is why files cannot be cloned, in one sentence; empty if they can.
func (p *Pool) Missing() string { return p.missing }

// Outer is a folder whose free space bounds that of the pool as well; empty if there is none.
func (p *Pool) Outer() string { return p.outer }

// Close unmounts the pool unless something uses it; the next Open takes it over then. Idempotent.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.root == nil {
		return nil
	}
	_ = p.root.Close()
	p.root = nil
	if p.mode == Folder {
		return nil
	}
	unlock, err := lock(context.Background(), filepath.Dir(p.dir))
	if err != nil {
		return errs.E("close disk pool", errkind.Internal, p.dir, err)
	}
	defer unlock()
	if err := p.unmount(); err != nil {
		return errs.E("close disk pool", kindOf(err), p.dir, err)
	}
	return nil
}

func (p *Pool) unmount() error {
	mounted, err := p.mounted()
	if err != nil || !mounted {
		return err
	}
	below, err := mounts.Below(p.dir)
	if err != nil {
		return err
	}
	if len(below) > 1 {
		p.log.Info("disks are still mounted: the pool stays", "dir", p.dir)
		return nil
	}
	err = unix.Unmount(p.dir, unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EBUSY) {
		p.log.Info("the pool is in use and stays", "dir", p.dir)
		return nil
	}
	if err != nil {
		return fmt.Errorf("unmount %s: %w", p.dir, err)
	}
	if p.mode != Loop {
		return nil
	}
	if loopdev.WaitFree(p.file(), reclaimTime) != nil {
		mounts.Reclaim(p.dir) // some process took a private copy of the mount table meanwhile
	}
	return loopdev.WaitFree(p.file(), freeTime)
}

func (p *Pool) file() string { return p.dir + suffix }

// mounted reports whether the pool is mounted; Conflict if something else is.
func (p *Pool) mounted() (bool, error) {
	is, err := mounts.IsMount(p.dir)
	if err != nil || !is {
		return false, err
	}
	device := p.device
	if p.mode == Loop {
		bound, ok, err := loopdev.Device(p.file())
		if err != nil {
			return false, err
		}
		if device = bound; !ok {
			return false, errs.Errorf("", errkind.Conflict, "something else than %s is mounted on %s", p.file(), p.dir)
		}
	}
	var on, dev unix.Stat_t
	if err := errors.Join(unix.Stat(p.dir, &on), unix.Stat(device, &dev)); err != nil {
		return false, err
	}
	if on.Dev != dev.Rdev {
		return false, errs.Errorf("", errkind.Conflict, "something else than %s is mounted on %s", device, p.dir)
	}
	return true, nil
}

// lock makes this the only process that works on pools in a folder.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// holds reports whether there is more than empty folders in dir: a file, or a mount.
func holds(dir string) (bool, error) {
	below, err := mounts.Below(dir)
	if err != nil {
		return false, err
	}
	for _, m := range below {
		if m != dir {
			return true, nil
		}
	}
	found := false
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !e.IsDir() {
			found = true
			return fs.SkipAll
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return found, err
}

// kindOf gives the failures of the kernel their kind.
func kindOf(err error) errkind.Kind {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		return errkind.NoCapacity
	case errors.Is(err, unix.EBUSY):
		return errkind.Busy
	}
	return errs.Kind(err)
}
