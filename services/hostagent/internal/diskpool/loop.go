package diskpool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// mountTries is how often a loop device may come or go while it is looked at.
const mountTries = 16

// openLoop mounts the pool file, which it makes if there is none. made is true then.
func (p *Pool) openLoop(ctx context.Context, size uint64) (made bool, err error) {
	if made, err = p.ensureFile(ctx, size); err != nil {
		return made, err
	}
	mounted, err := p.mounted()
	if err != nil {
		return made, err
	}
	if !mounted {
		if err := p.mountFile(); err != nil {
			return made, err
		}
	}
	if err := p.at("mounted"); err != nil {
		return made, err
	}
	return made, p.grow(size)
}

// ensureFile makes the pool file under another name first: what has the right name is complete.
func (p *Pool) ensureFile(ctx context.Context, size uint64) (made bool, err error) {
	there, err := exists(p.file())
	if err != nil {
		return false, err
	}
	if there {
		return false, p.checkFile()
	}
	if err := canMake(); err != nil {
		return false, err
	}
	if size, err = p.newSize(size); err != nil {
		return false, err
	}
	half := p.file() + making
	if err := os.Remove(half); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if err := p.makeFile(ctx, half, size); err != nil {
		_ = os.Remove(half)
		return false, err
	}
	if err := p.at("made"); err != nil {
		return false, err
	}
	if err := os.Rename(half, p.file()); err != nil {
		return false, err
	}
	if err := p.at("renamed"); err != nil {
		return true, err
	}
	return true, syncDir(filepath.Dir(p.dir))
}

func (p *Pool) makeFile(ctx context.Context, path string, size uint64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(int64(size)); err != nil {
		return err
	}
	if err := p.at("sized"); err != nil {
		return err
	}
	if err := mkfs(ctx, path, false); err != nil {
		return err
	}
	if err := p.at("formatted"); err != nil {
		return err
	}
	return f.Sync()
}

// checkFile refuses a pool file that is none, and says that it is left alone.
func (p *Pool) checkFile() error {
	refuse := func(why any) error {
		return errs.Errorf("", errkind.Refused, "%s is left as it is, and it is no usable pool: %v", p.file(), why)
	}
	st, err := os.Lstat(p.file())
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return refuse("it is no file")
	}
	sb, err := readSuperblock(p.file())
	if err != nil {
		return refuse(err)
	}
	if !sb.xfs {
		return refuse("it does not begin like an XFS file system")
	}
	return nil
}

// mountFile mounts the device that is bound to the pool file, or binds one. A second device of one
// file would be a second file system on it.
func (p *Pool) mountFile() error {
	for range mountTries {
		dev, err := p.bind()
		if errors.Is(err, errGone) {
			continue
		}
		if err != nil {
			return err
		}
		if err := p.at("bound"); err != nil {
			return errors.Join(err, dev.Close())
		}
		err = mountXFS(dev.Name(), p.dir)
		return errors.Join(err, dev.Close())
	}
	return errs.Errorf("", errkind.Busy, "the loop device of %s comes and goes", p.file())
}

var errGone = errors.New("the device was freed meanwhile")

// bind returns an open loop device of the pool file.
func (p *Pool) bind() (*os.File, error) {
	name, ok, err := loopdev.Device(p.file())
	if err != nil {
		return nil, err
	}
	if !ok {
		dev, err := loopdev.Attach(p.file(), false)
		if err != nil {
			return nil, errs.E("", errkind.Unavailable, "", err)
		}
		return dev, nil
	}
	dev, err := os.OpenFile(name, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	// It cannot be freed while it is open; it may have been before.
	if again, ok, err := loopdev.Device(p.file()); err != nil || !ok || again != name {
		return nil, errors.Join(errGone, err, dev.Close())
	}
	return dev, nil
}

// grow makes the file, its device and its file system as large as size. It goes on where an earlier
// process was killed.
func (p *Pool) grow(size uint64) error {
	st, err := os.Stat(p.file())
	if err != nil {
		return err
	}
	now, size := uint64(st.Size()), size/unit*unit
	switch {
	case size > now:
		if err := growFile(p.file(), int64(size)); err != nil {
			return err
		}
		now = size
	case size > 0 && size < now:
		p.log.Info("the pool keeps its size: it cannot shrink", "file", p.file(), "bytes", now, "wanted", size)
	}
	if err := p.at("truncated"); err != nil {
		return err
	}
	if have, err := xfsSize(p.dir); err != nil || have >= now/unit*unit {
		return err
	}
	dev, ok, err := loopdev.Device(p.file())
	if err != nil || !ok {
		return errors.Join(err, errs.Errorf("", errkind.Internal, "%s has no loop device", p.file()))
	}
	if err := loopdev.SetCapacity(dev); err != nil {
		return err
	}
	if err := p.at("resized"); err != nil {
		return err
	}
	return growXFS(p.dir, now)
}

func growFile(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(size); err != nil {
		return fmt.Errorf("grow %s: %w", path, err)
	}
	return f.Sync()
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return d.Sync()
}
