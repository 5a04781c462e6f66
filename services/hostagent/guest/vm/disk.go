package vm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// Requests of ext4 and of any file system, which package unix does not name.
const (
	fiFreeze     = 0xc0045877
	fiThaw       = 0xc0045878
	ext4ResizeFS = 0x40086610
)

const (
	sizePatience = 10 * time.Second // for a device that the host resized
	diskFlags    = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOATIME
	// As the host mounts it for the other tiers.
	diskOptions = "errors=remount-ro,noinit_itable,discard"
	superOffset = 1024
	superMagic  = 0xef53
)

// disk is the session's file system, as the supervisor holds it.
type disk struct {
	device string
	folder *os.File

	mu     sync.Mutex
	frozen *time.Timer // thaws by itself; nil while it is not frozen
	turn   uint64      // of the freeze that the timer belongs to
}

// openDisk mounts the device for the supervisor; the stage mounts the same one again.
func openDisk(want *vmwire.Disk, t *timer) (d *disk, repaired bool, err error) {
	d = &disk{device: want.Device}
	if d.device == "" {
		d.device = "vdb"
	}
	size := func() uint64 { return deviceBytes(d.device) }
	if err := waitFor("device "+d.device, sizePatience, func() bool { return size() > 0 && size() >= want.Bytes }); err != nil {
		return nil, false, fmt.Errorf("%w (it has %d bytes, %d are wanted)", err, size(), want.Bytes)
	}
	t.step("disk.device")
	repaired, more, err := inspect("/dev/" + d.device)
	if err != nil {
		return nil, false, err
	}
	t.step("disk.look")
	if err := os.MkdirAll(diskDir, 0o700); err != nil {
		return nil, false, err
	}
	if err := unix.Mount("/dev/"+d.device, diskDir, "ext4", diskFlags, diskOptions); err != nil {
		return nil, false, fmt.Errorf("the session's file system cannot be mounted: %w", err)
	}
	if d.folder, err = os.Open(diskDir); err != nil {
		return nil, false, err
	}
	t.step("disk.mount")
	if want.Grow && size() >= more {
		if _, err := d.grow(want.Bytes); err != nil {
			return nil, false, err
		}
	}
	t.step("disk.grow")
	return d, repaired, d.folders(want.Create)
}

// inspect reads the superblock: whether it is one, whether the journal has to be replayed, and what a
// device must have at least for the file system to be grown to it. The kernel's own word on what it mounts comes later; this one is clearer.
func inspect(dev string) (repaired bool, more uint64, err error) {
	f, err := os.Open(dev)
	if err != nil {
		return false, 0, err
	}
	defer func() { _ = f.Close() }()
	super := make([]byte, 1024)
	if _, err := f.ReadAt(super, superOffset); err != nil {
		return false, 0, fmt.Errorf("read the session's file system: %w", err)
	}
	if binary.LittleEndian.Uint16(super[0x38:]) != superMagic {
		return false, 0, errors.New("the session's disk holds no ext4 file system")
	}
	const recover, errorsSeen, wide = 0x4, 0x2, 0x80
	if binary.LittleEndian.Uint16(super[0x3a:])&errorsSeen != 0 {
		return false, 0, errors.New("the session's file system is marked as damaged; it needs a check")
	}
	features := binary.LittleEndian.Uint32(super[0x60:])
	blocks := uint64(binary.LittleEndian.Uint32(super[0x4:]))
	if features&wide != 0 {
		blocks |= uint64(binary.LittleEndian.Uint32(super[0x150:])) << 32
	}
	block := uint64(1024) << (binary.LittleEndian.Uint32(super[0x18:]) & 0xf)
	return features&recover != 0, (blocks + 1) * block, nil
}

// folders sees to the two that every disk of a session has.
func (d *disk) folders(create bool) error {
	for _, name := range []string{"upper", "work"} {
		path := diskDir + "/" + name
		if create {
			if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
		}
		if st, err := os.Lstat(path); err != nil || !st.IsDir() {
			return fmt.Errorf("the file system holds no folder %s: it is not a session's disk", name)
		}
	}
	return nil
}

func deviceBytes(name string) uint64 {
	b, err := os.ReadFile("/sys/class/block/" + name + "/size")
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 64)
	return n * 512
}

// freeze writes the file system out and keeps it as it is until thaw, at most for hold.
func (d *disk) freeze(hold time.Duration) error {
	if most := time.Duration(vmwire.MaxFreeze); hold <= 0 || hold > most {
		hold = most
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.frozen == nil {
		if err := d.ioctl(fiFreeze, 0); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("freeze: %w", err)
		}
	} else {
		d.frozen.Stop()
	}
	d.turn++
	turn := d.turn
	d.frozen = time.AfterFunc(hold, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.frozen != nil && d.turn == turn {
			d.frozen = nil
			_ = d.ioctl(fiThaw, 0)
		}
	})
	return nil
}

// thaw ends a freeze; expired says that it had ended, or that there was none.
func (d *disk) thaw() (expired bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.frozen == nil {
		return true, nil
	}
	d.frozen.Stop()
	d.frozen = nil
	if err := d.ioctl(fiThaw, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		return false, fmt.Errorf("thaw: %w", err)
	}
	return false, nil
}

// grow makes the file system as large as its device, which must have want bytes, and returns its size.
func (d *disk) grow(want uint64) (uint64, error) {
	if err := waitFor("the device's new size", sizePatience, func() bool { return deviceBytes(d.device) >= want }); err != nil {
		return 0, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(d.folder.Fd()), &st); err != nil {
		return 0, err
	}
	blocks := deviceBytes(d.device) / uint64(st.Bsize)
	if err := d.ioctl(ext4ResizeFS, uintptr(unsafe.Pointer(&blocks))); err != nil {
		return 0, fmt.Errorf("grow the file system to %d bytes: %w", blocks*uint64(st.Bsize), err)
	}
	return blocks * uint64(st.Bsize), nil
}

func (d *disk) ioctl(request, arg uintptr) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, d.folder.Fd(), request, arg); e != 0 {
		return e
	}
	return nil
}

// close unmounts, once nothing else has the file system. What is left after limit is left to the
// journal.
func (d *disk) close(limit time.Duration) error {
	_, _ = d.thaw()
	_ = unix.Syncfs(int(d.folder.Fd()))
	_ = d.folder.Close()
	if err := unix.Unmount(diskDir, 0); err != nil {
		return fmt.Errorf("unmount: %w", err)
	}
	return waitFor("the unmounted disk", limit, func() bool {
		fd, err := unix.Open("/dev/"+d.device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(fd)
		}
		return err == nil
	})
}
