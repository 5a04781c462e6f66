// Package extents knows which parts of a sparse file hold something and which parts of two clones
// of one file differ, without reading them. It guarantees that a part that it leaves out is a hole,
// or the same in both files; it may name more than it must, never less.
package extents

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

var (
	// ErrUnknown says that the file system cannot tell what changed: read all that is there.
	ErrUnknown = errors.New("this file system cannot tell what changed")
	// ErrNotSupported says that the file system cannot clone files: copy.
	ErrNotSupported = errors.New("this file system cannot clone files")
)

// Range is a part of a file in bytes.
type Range struct{ Off, Len uint64 }

// End is the first byte after the range.
func (r Range) End() uint64 { return r.Off + r.Len }

// add appends [off, end) to sorted ranges and merges it with the last one where they touch.
func add(to []Range, off, end uint64) []Range {
	if off >= end {
		return to
	}
	if n := len(to); n > 0 && to[n-1].End() >= off {
		to[n-1].Len = max(end, to[n-1].End()) - to[n-1].Off
		return to
	}
	return append(to, Range{off, end - off})
}

// Data lists the parts of f outside of which f reads as zeros, in order, none touching the next. It
// moves the offset of f. A file system that knows no holes has one part: all.
func Data(f *os.File) ([]Range, error) {
	const op = "list the data of a file"
	size, err := sizeOf(f)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	var out []Range
	for pos := int64(0); uint64(pos) < size; {
		from, err := unix.Seek(int(f.Fd()), pos, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if errors.Is(err, unix.EINVAL) {
			return add(nil, 0, size), nil
		}
		if err != nil {
			return nil, errs.E(op, errkind.Internal, "", fmt.Errorf("seek data: %w", err))
		}
		if pos, err = unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE); err != nil {
			return nil, errs.E(op, errkind.Internal, "", fmt.Errorf("seek hole: %w", err))
		}
		if pos <= from {
			return add(out, uint64(from), size), nil // the file changes: the rest is data
		}
		out = add(out, uint64(from), min(uint64(pos), size))
	}
	return out, nil
}

// Changed lists the parts of now that may differ from base, where base reads as zeros after its end.
// Both must be clones of one file and unwritten since they were made; base must be the older one.
//
// Why it is sound: base keeps its blocks for as long as it is open, so none of them is given to
// another use, and XFS never writes a block in place that two files share. A block that now has at
// the same offset is therefore the block that base has, with the content that base has.
//
// ErrUnknown (errors.Is) where that cannot be told: not XFS, or two file systems.
func Changed(base, now *os.File) ([]Range, error) {
	const op = "compare two clones"
	if err := related(base, now); err != nil {
		return nil, errs.E(op, errkind.Unimplemented, "", err)
	}
	a, err := walk(base)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	b, err := walk(now)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	return compared(op, a, b)
}

// compared is diff with the errors that callers know.
func compared(op string, base, now pieces) ([]Range, error) {
	out, err := diff(base, now)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) {
		return nil, errs.E(op, errkind.Unimplemented, "", fmt.Errorf("%w: %w", ErrUnknown, err))
	}
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	return out, nil
}

// diff goes through both files by the largest parts that are of one piece in both.
func diff(base, now pieces) ([]Range, error) {
	var out []Range
	for pos := uint64(0); pos < now.size(); {
		a, err := base.at(pos)
		if err != nil {
			return nil, err
		}
		b, err := now.at(pos)
		if err != nil {
			return nil, err
		}
		end := min(a.end, b.end)
		if !a.same(b, pos) {
			out = add(out, pos, end)
		}
		pos = end
	}
	return out, nil
}

// related refuses files whose block numbers say nothing about each other.
func related(base, now *os.File) error {
	var a, b unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Fstat(int(base.Fd()), &a), unix.Fstat(int(now.Fd()), &b),
		unix.Fstatfs(int(now.Fd()), &fs)); err != nil {
		return err
	}
	switch {
	case a.Mode&unix.S_IFMT != unix.S_IFREG || b.Mode&unix.S_IFMT != unix.S_IFREG:
		return fmt.Errorf("%w: it is no file", ErrUnknown)
	case a.Dev != b.Dev:
		return fmt.Errorf("%w: the files are on two", ErrUnknown)
	case int64(fs.Type) != unix.XFS_SUPER_MAGIC:
		return fmt.Errorf("%w: it is not XFS", ErrUnknown)
	}
	return nil
}

func sizeOf(f *os.File) (uint64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return uint64(st.Size()), nil
}
