package extents

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	// cloneStep bounds for how long one clone of a range keeps writers of the file waiting.
	cloneStep = 4 << 20
	// notedMost bounds the memory that the map of a mirror takes, at 32 bytes a piece.
	notedMost = 1 << 19
)

// Mirror is a file that follows another one by sharing its blocks. What costs time, cloning, is done
// while the other one is in use; an update when it is quiet costs a look at its map and little else.
//
// Why it is sound: where both files have the same block at the same offset they are the same there,
// and stay so for as long as both have it, for XFS never writes a block in place that two files
// share. The mirror gives a block up only in Update.
type Mirror struct {
	dst, src *os.File
	noted    *list // the map of dst, nil if it is to be read
}

// Follow makes dst a mirror of src that holds nothing yet. Nobody else may write dst, and src must
// keep its size. ErrUnknown (errors.Is) where the file system cannot tell what changed.
func Follow(dst, src *os.File) (*Mirror, error) {
	const op = "follow file"
	if err := related(dst, src); err != nil {
		return nil, errs.E(op, errkind.Unimplemented, "", err)
	}
	size, err := sizeOf(src)
	if err == nil {
		err = errors.Join(dst.Truncate(0), dst.Truncate(int64(size)))
	}
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	return &Mirror{dst: dst, src: src, noted: &list{bytes: size}}, nil
}

// Update gives dst what src has, and returns how many ranges that differed were cloned. If nobody
// writes src meanwhile both are the same afterwards; else each range is of some time during the
// call. What the page cache has for src is written first. After an error dst holds a mixture, and
// may be updated again.
func (m *Mirror) Update(ctx context.Context) (ranges int, err error) {
	const op = "update clone"
	changed, err := m.changed()
	if err != nil {
		return 0, err
	}
	if len(changed) > 0 {
		m.noted = nil
	}
	for _, r := range changed {
		for off := r.Off; off < r.End(); off += cloneStep {
			if err := ctx.Err(); err != nil {
				return ranges, errs.E(op, errs.Kind(err), "", err)
			}
			if err := cloneRange(m.dst, m.src, Range{off, min(cloneStep, r.End()-off)}); err != nil {
				return ranges, cloneError(op, err)
			}
		}
		ranges++
	}
	return ranges, nil
}

// Note reads the map of dst ahead of the next update, which then has half as much to look at.
func (m *Mirror) Note() error {
	if m.noted != nil {
		return nil
	}
	var err error
	if m.noted, err = note(m.dst, notedMost); err != nil {
		return errs.E("read map of clone", errkind.Internal, "", err)
	}
	return nil
}

func (m *Mirror) changed() ([]Range, error) {
	const op = "compare clone"
	was, err := walk(m.dst)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	now, err := walk(m.src)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	if was.bytes != now.bytes {
		return nil, errs.E(op, errkind.Internal, "", fmt.Sprintf("the file changed its size from %d to %d", was.bytes, now.bytes))
	}
	if m.noted != nil {
		m.noted.next = 0
		return compared(op, m.noted, now)
	}
	return compared(op, was, now)
}

// cloneRange makes a range of dst that of src, holes included.
func cloneRange(dst, src *os.File, r Range) error {
	arg := unix.FileCloneRange{Src_fd: int64(src.Fd()), Src_offset: r.Off, Src_length: r.Len, Dest_offset: r.Off}
	for {
		if err := unix.IoctlFileCloneRange(int(dst.Fd()), &arg); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// list is the map of a file in memory: what is not zeros, in order.
type list struct {
	bytes uint64
	held  []piece
	next  int // index of the first piece that may end after pos
}

// note reads the map of a file; nil if it has more than so many pieces.
func note(f *os.File, most int) (*list, error) {
	w, err := walk(f)
	if err != nil {
		return nil, err
	}
	l := &list{bytes: w.bytes}
	for pos := uint64(0); pos < w.bytes; {
		p, err := w.at(pos)
		if err != nil {
			return nil, err
		}
		pos = p.end
		if p.kind == zeros {
			continue
		}
		if n := len(l.held); n > 0 && l.held[n-1].joins(p) {
			l.held[n-1].end = p.end
			continue
		}
		if len(l.held) == most {
			return nil, nil
		}
		l.held = append(l.held, p)
	}
	return l, nil
}

// joins says that b is the rest of one piece that begins with a.
func (a piece) joins(b piece) bool {
	return a.kind == blocks && b.kind == blocks && a.end == b.off && a.physical+(a.end-a.off) == b.physical
}

func (l *list) size() uint64 { return l.bytes }

func (l *list) at(pos uint64) (piece, error) {
	if pos >= l.bytes {
		return piece{off: pos, end: math.MaxUint64}, nil
	}
	for l.next < len(l.held) && l.held[l.next].end <= pos {
		l.next++
	}
	switch {
	case l.next == len(l.held):
		return piece{off: pos, end: l.bytes}, nil
	case l.held[l.next].off > pos:
		return piece{off: pos, end: l.held[l.next].off}, nil
	}
	return l.held[l.next], nil
}
