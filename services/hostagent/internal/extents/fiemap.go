package extents

import (
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From linux/fiemap.h, which golang.org/x/sys lacks.
const (
	fiemapIoctl = 0xc020660b // FS_IOC_FIEMAP
	fiemapSync  = 0x1        // FIEMAP_FLAG_SYNC

	extentLast      = 0x1
	extentUnwritten = 0x800
	extentMerged    = 0x1000
	extentShared    = 0x2000
	// Every other flag, also one that is yet to be invented, says that the block number is not all.
	extentPlain = extentLast | extentUnwritten | extentMerged | extentShared

	batch = 512
)

type fiemapExtent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

type fiemap struct {
	start, length                  uint64
	flags, mapped, count, reserved uint32
	extents                        [batch]fiemapExtent
}

// kind says what is known of a piece.
type kind uint8

const (
	zeros   kind = iota // a hole, or allocated and never written
	blocks              // at a known place of the device
	unknown             // anything else
)

// piece is a part of a file that is of one kind, from off to end.
type piece struct {
	off, end uint64
	physical uint64 // of off
	kind     kind
}

// same reports that a and b surely hold the same at pos, and as far as both go.
func (a piece) same(b piece, pos uint64) bool {
	switch {
	case a.kind != b.kind:
		return false
	case a.kind == zeros:
		return true
	}
	return a.kind == blocks && a.physical+(pos-a.off) == b.physical+(pos-b.off)
}

// pieces answers what a file is at offsets that only grow.
type pieces interface {
	size() uint64
	at(pos uint64) (piece, error)
}

// walker reads the map of a file in batches: a hostile guest can make it very long.
type walker struct {
	f     *os.File
	bytes uint64
	page  fiemap
	next  int // index in page of the first extent that may end after pos
	last  bool
	// flushed: what was in the page cache when the walk began is in the map. Only files that nobody
	// writes have a map that says all.
	flushed bool
}

func walk(f *os.File) (*walker, error) {
	size, err := sizeOf(f)
	return &walker{f: f, bytes: size}, err
}

func (w *walker) size() uint64 { return w.bytes }

// at returns the piece at pos. After the end of the file are zeros.
func (w *walker) at(pos uint64) (piece, error) {
	if pos >= w.bytes {
		return piece{off: pos, end: math.MaxUint64}, nil
	}
	for {
		for ; w.next < int(w.page.mapped); w.next++ {
			e := &w.page.extents[w.next]
			end := e.logical + e.length
			if end < e.logical {
				return piece{}, fmt.Errorf("map of the file: an extent at %d has no end", e.logical)
			}
			if end <= pos {
				continue
			}
			if e.logical > pos {
				return piece{off: pos, end: min(e.logical, w.bytes)}, nil
			}
			return piece{off: e.logical, end: min(end, w.bytes), physical: e.physical, kind: e.kind()}, nil
		}
		if w.last {
			return piece{off: pos, end: w.bytes}, nil
		}
		if err := w.read(pos); err != nil {
			return piece{}, err
		}
	}
}

// read gets the batch of extents from pos on.
func (w *walker) read(pos uint64) error {
	w.page.start, w.page.length = pos, math.MaxUint64-pos
	w.page.flags, w.page.mapped, w.page.count = fiemapSync, 0, batch
	if w.flushed {
		w.page.flags = 0
	}
	w.next, w.flushed = 0, true
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, w.f.Fd(), fiemapIoctl, uintptr(unsafe.Pointer(&w.page)))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return fmt.Errorf("map of the file: %w", errno)
		}
		break
	}
	n := w.page.mapped
	if n > batch {
		return fmt.Errorf("map of the file: %d extents for %d", n, batch)
	}
	// A batch that brings nothing new would be asked for again for ever.
	w.last = n == 0 || w.page.extents[n-1].flags&extentLast != 0 ||
		w.page.extents[n-1].logical+w.page.extents[n-1].length <= pos
	return nil
}

func (e *fiemapExtent) kind() kind {
	switch {
	case e.flags&^uint32(extentPlain) != 0:
		return unknown
	case e.flags&extentUnwritten != 0:
		return zeros
	}
	return blocks
}

// Alone is what a file holds that no clone of it shares, in bytes.
func Alone(f *os.File) (uint64, error) {
	w := &walker{f: f}
	var sum, pos uint64
	for !w.last {
		if err := w.read(pos); err != nil {
			return 0, err
		}
		for _, e := range w.page.extents[:w.page.mapped] {
			if e.flags&extentShared == 0 {
				sum += e.length
			}
			pos = max(pos, e.logical+e.length)
		}
	}
	return sum, nil
}
