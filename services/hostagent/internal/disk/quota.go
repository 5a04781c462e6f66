package disk

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// Usage is the file system inside a disk, in bytes.
type Usage struct {
	Size uint64
	Used uint64
	Free uint64 // what a user can still write
}

// Usage measures an attached disk; NotFound if it is not attached, Unimplemented for a raw one. It never
// waits for a frozen one.
func (s *Store) Usage(k Key) (Usage, error) {
	const op = "measure disk"
	if !s.isActive(k) {
		return Usage{}, errs.E(op, errkind.NotFound, k.String(), "the disk is not attached")
	}
	if s.handed(k) {
		return Usage{}, errs.E(op, errkind.Unimplemented, k.String(), "a virtual machine writes this disk; only its own kernel knows how full it is")
	}
	d, err := openMount(s.mountPoint(k))
	if err == nil && d == nil {
		return Usage{}, errs.E(op, errkind.NotFound, k.String(), "the disk is not attached")
	}
	if err != nil {
		return Usage{}, errs.E(op, errkind.Internal, k.String(), err)
	}
	defer func() { _ = d.Close() }()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(d.Fd()), &st); err != nil {
		return Usage{}, errs.E(op, errkind.Internal, k.String(), err)
	}
	unit := uint64(st.Bsize)
	return Usage{Size: st.Blocks * unit, Used: (st.Blocks - st.Bfree) * unit, Free: st.Bavail * unit}, nil
}

// Grow makes an attached disk larger while the session goes on, and returns the size that is in effect.
// That is the old one for a disk that is not attached, which grows with the next Attach that wants
// more, and where this process may not resize what is mounted (it lacks CAP_SYS_RESOURCE): then the
// next Attach does it. Of a raw disk the image alone grows: the virtual machine is to be told, and grows
// the file system in it. A disk never shrinks. Kinds: NotFound, Invalid, NoCapacity (the pool has not so
// much).
func (s *Store) Grow(ctx context.Context, k Key, size uint64) (uint64, error) {
	const op = "grow disk"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return 0, errs.Wrap(op, k.String(), err)
	}
	old := rec.Size
	if err := checkSize(size); err != nil {
		return old, err
	}
	switch {
	case size < old:
		return old, errs.Errorf(op, errkind.Invalid, "the disk has %s; it cannot shrink to %s", fmtBytes(old), fmtBytes(size))
	case !s.isActive(k):
		return old, nil
	}
	if err := s.thaw(k); err != nil {
		return old, errs.E(op, kindOf(err), k.String(), err)
	}
	if err := s.admit(op, k, size, s.image(k)); err != nil {
		return old, err
	}
	if size > old {
		rec.Size = size
		if err := s.save(rec); err != nil {
			return old, errs.E(op, kindOf(err), k.String(), err)
		}
	}
	if err := s.at("grow.recorded"); err != nil {
		return old, errs.Wrap(op, k.String(), err)
	}
	if rec.Raw {
		err = s.stretch(k, size)
	} else {
		err = s.extend(k, size)
	}
	if errors.Is(err, unix.EPERM) {
		s.log.Warn("a mounted disk cannot be resized without CAP_SYS_RESOURCE; it grows with the next wake", "session", k.Session)
		return s.inside(k)
	}
	if err != nil {
		return old, errs.E(op, kindOf(err), k.String(), err)
	}
	return size, nil
}

// stretch makes the image's file as large as its record says. A crash in Grow may have left less.
func (s *Store) stretch(k Key, size uint64) error {
	st, err := os.Stat(s.image(k))
	if err != nil {
		return fmt.Errorf("look at image: %w", err)
	}
	if uint64(st.Size()) >= size {
		return nil
	}
	if err := os.Truncate(s.image(k), int64(size)); err != nil {
		return fmt.Errorf("grow image: %w", err)
	}
	return s.at("grow.stretched")
}

// extend brings a mounted file system to the size of its image. EPERM if this process may not.
func (s *Store) extend(k Key, size uint64) error {
	if err := s.stretch(k, size); err != nil {
		return err
	}
	dev := s.device(k)
	if err := loopdev.SetCapacity(dev); err != nil {
		return err
	}
	if err := s.at("grow.device"); err != nil {
		return err
	}
	d, err := os.Open(s.mountPoint(k))
	if err != nil {
		return fmt.Errorf("open disk: %w", err)
	}
	defer func() { _ = d.Close() }()
	const resizeFS = 0x40086610 // EXT4_IOC_RESIZE_FS
	blocks := size / SizeUnit
	if err := ioctl(d, resizeFS, &blocks); err != nil {
		return fmt.Errorf("resize the file system: %w", err)
	}
	return s.at("grow.resized")
}

// inside is the size of an attached file system.
func (s *Store) inside(k Key) (uint64, error) {
	n, err := ext4Size(s.device(k))
	if err != nil {
		return 0, errs.E("measure disk", errkind.Internal, k.String(), err)
	}
	return n, nil
}

// growLeast is what a file system may be smaller than its image: ext4 leaves the end of a device unused
// if it is too short for another group of blocks.
const growLeast = 8 << 20

// fit sees to it that a file system which was just mounted fills its image. One that cannot is used as
// it is: the next Attach tries again.
func (s *Store) fit(ctx context.Context, k Key, size uint64) error {
	now, err := ext4Size(s.device(k))
	if err != nil || now+growLeast > size {
		return err
	}
	err = s.extend(k, size)
	if errors.Is(err, unix.EPERM) {
		if err = s.unmount(k); err != nil {
			return err
		}
		err = errors.Join(s.resizeQuiet(ctx, k), s.bind(k))
	}
	if errors.Is(err, errResize) {
		s.log.Error("cannot grow the file system of a disk; it stays smaller", "session", k.Session, "error", err)
		return nil
	}
	return err
}

var errResize = errors.New("resize2fs failed")

// resizeQuiet lets e2fsprogs grow an image that is not mounted and whose journal was replayed. It
// works on a clone where it can, so that a crash leaves the image as it was.
func (s *Store) resizeQuiet(ctx context.Context, k Key) error {
	path := s.image(k)
	if s.reflink {
		image, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = image.Close() }()
		path = s.file(k, imageName+".grown")
		defer func() { _ = discard(path) }()
		if err := s.cloneFile(image, path); err != nil {
			return err
		}
	}
	out, err := exec.CommandContext(ctx, "resize2fs", "-f", path).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %w: %s", errResize, err, bytes.TrimSpace(out))
	}
	if err := errors.Join(syncFile(path), s.at("grow.offline")); err != nil {
		return err
	}
	if err := os.Rename(path, s.image(k)); err != nil {
		return err
	}
	return syncDir(s.folder(k))
}

// ext4Size reads the size of a file system from its superblock: statfs leaves out what the file system
// needs itself.
func ext4Size(device string) (uint64, error) {
	f, err := os.Open(device)
	if err != nil {
		return 0, fmt.Errorf("open disk: %w", err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 1024)
	if _, err := f.ReadAt(b, 1024); err != nil {
		return 0, fmt.Errorf("read superblock: %w", err)
	}
	return parseSuper(b)
}

func parseSuper(b []byte) (uint64, error) {
	le := binary.LittleEndian
	if len(b) < 1024 || le.Uint16(b[0x38:]) != 0xef53 {
		return 0, errors.New("the disk holds no ext4")
	}
	blocks, shift := uint64(le.Uint32(b[0x4:])), 10+le.Uint32(b[0x18:])
	const has64bit = 0x80
	if le.Uint32(b[0x60:])&has64bit != 0 {
		blocks |= uint64(le.Uint32(b[0x150:])) << 32
	}
	if shift > 16 || blocks > MaxSize>>shift {
		return 0, fmt.Errorf("the superblock says %d blocks of 2^%d bytes", blocks, shift)
	}
	return blocks << shift, nil
}
