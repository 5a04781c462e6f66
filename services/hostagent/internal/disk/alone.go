package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// From linux/fiemap.h.
const (
	fiemapIoctl  = 0xc020660b // FS_IOC_FIEMAP
	extentLast   = 0x1
	extentShared = 0x2000
	fiemapBatch  = 256
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
	extents                        [fiemapBatch]fiemapExtent
}

// alone is what a file holds that no clone shares: its removal returns so much. A missing file holds
// nothing.
func alone(path string) (uint64, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look at clone: %w", err)
	}
	defer func() { _ = f.Close() }()
	var sum uint64
	for m := (fiemap{}); ; {
		m.length, m.mapped, m.count = ^uint64(0)-m.start, 0, fiemapBatch
		err := ioctl(f, fiemapIoctl, &m)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("map of the clone: %w", err)
		}
		last := m.mapped == 0
		for _, e := range m.extents[:min(m.mapped, fiemapBatch)] {
			if e.flags&extentShared == 0 {
				sum += e.length
			}
			m.start, last = max(m.start, e.logical+e.length), e.flags&extentLast != 0
		}
		if last {
			return sum, nil
		}
	}
}
