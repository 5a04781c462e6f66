package extents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const copyUnit = 1 << 20

// Clone makes dst the same as src; they share their blocks until one of them is written.
// ErrNotSupported (errors.Is) where the file system cannot; dst is unchanged then.
func Clone(dst, src *os.File) error {
	for {
		if err := unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())); !errors.Is(err, unix.EINTR) {
			return cloneError("clone file", err)
		}
	}
}

func cloneError(op string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY), errors.Is(err, unix.ENOSYS),
		errors.Is(err, unix.EXDEV), errors.Is(err, unix.EINVAL):
		return errs.E(op, errkind.Unimplemented, "", fmt.Errorf("%w: %w", ErrNotSupported, err))
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.E(op, errkind.NoCapacity, "", err)
	}
	return errs.E(op, errkind.Internal, "", err)
}

// CopySparse makes dst the same as src by reading it, and leaves holes where src has some. It is for
// file systems without Clone, and takes as long as the data is large. After an error dst holds
// anything.
func CopySparse(ctx context.Context, dst, src *os.File) error {
	err := copySparse(ctx, dst, src)
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.E("copy file", errkind.NoCapacity, "", err)
	case err != nil:
		return errs.E("copy file", errs.Kind(err), "", err)
	}
	return nil
}

func copySparse(ctx context.Context, dst, src *os.File) error {
	size, err := sizeOf(src)
	if err != nil {
		return err
	}
	data, err := Data(src)
	if err != nil {
		return err
	}
	if err := errors.Join(dst.Truncate(0), dst.Truncate(int64(size))); err != nil {
		return err
	}
	buf := make([]byte, copyUnit)
	for _, r := range data {
		for off := r.Off; off < r.End(); {
			if err := ctx.Err(); err != nil {
				return err
			}
			b := buf[:min(copyUnit, r.End()-off)]
			if _, err := io.ReadFull(io.NewSectionReader(src, int64(off), int64(len(b))), b); err != nil {
				return err
			}
			if _, err := dst.WriteAt(b, int64(off)); err != nil {
				return err
			}
			off += uint64(len(b))
		}
	}
	return nil
}

// Usable returns nil if files in dir can be cloned, and else why not. It leaves nothing behind.
func Usable(dir string) error {
	const op = "check for clones"
	src, err := scratch(dir)
	if err != nil {
		return errs.E(op, errkind.Internal, dir, err)
	}
	defer func() { _ = src.Close() }()
	dst, err := scratch(dir)
	if err != nil {
		return errs.E(op, errkind.Internal, dir, err)
	}
	defer func() { _ = dst.Close() }()
	if _, err := src.WriteAt(make([]byte, 4096), 0); err != nil {
		return errs.E(op, errkind.Internal, dir, err)
	}
	return errs.Wrap(op, dir, Clone(dst, src))
}

// scratch opens a file that goes away when it is closed.
func scratch(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	if err == nil || !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return f, err
	}
	if f, err = os.CreateTemp(dir, ".scratch-"); err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}
