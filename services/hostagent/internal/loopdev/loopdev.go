// Package loopdev binds files to loop devices. It guarantees that a device is freed when nothing uses
// it any more, also after its maker was killed; and that it can be told which file a device stands for,
// so that nobody binds and mounts one file twice.
package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Control is the device that hands out loop devices.
	Control = "/dev/loop-control"

	tries = 64
	// Block is the sector size of the devices: direct I/O on the file below needs no smaller writes.
	Block = 4096
)

// Loop is a loop device that is bound to a file.
type Loop struct {
	Device  string // for example /dev/loop3
	Backing string // path of the file; the kernel appends " (deleted)" after its removal
}

// Attach binds image to a free loop device that frees itself at its last close. The caller closes
// the returned file once the device is mounted (or to give it up).
func Attach(image string, readonly bool) (*os.File, error) {
	mode := os.O_RDWR
	if readonly {
		mode = os.O_RDONLY
	}
	back, err := os.OpenFile(image, mode|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open image: %w", err)
	}
	defer func() { _ = back.Close() }()
	ctl, err := os.OpenFile(Control, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", Control, err)
	}
	defer func() { _ = ctl.Close() }()
	for range tries {
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		dev, err := configure(fmt.Sprintf("/dev/loop%d", n), back, mode)
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENXIO) {
			continue // another process took it first
		}
		return dev, err
	}
	return nil, fmt.Errorf("find a free loop device: lost the race %d times", tries)
}

func configure(path string, back *os.File, mode int) (*os.File, error) {
	dev, err := os.OpenFile(path, mode|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	base := uint32(unix.LO_FLAGS_AUTOCLEAR)
	if mode == os.O_RDONLY {
		base |= unix.LO_FLAGS_READ_ONLY
	}
	// Direct I/O keeps one copy of the data in memory, not two; not every file system has it.
	for _, flags := range []uint32{base | unix.LO_FLAGS_DIRECT_IO, base} {
		cfg := unix.LoopConfig{Fd: uint32(back.Fd()), Size: Block}
		cfg.Info.Flags = flags
		copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], filepath.Base(back.Name()))
		if err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg); err == nil || errors.Is(err, unix.EBUSY) {
			break
		}
	}
	if err != nil {
		_ = dev.Close()
		return nil, fmt.Errorf("configure %s: %w", path, err)
	}
	return dev, nil
}

// Bound lists the loop devices whose file lies below dir.
func Bound(dir string) ([]Loop, error) {
	all, err := bound()
	if err != nil {
		return nil, err
	}
	var out []Loop
	for _, l := range all {
		if strings.HasPrefix(l.Backing, strings.TrimSuffix(dir, "/")+"/") {
			out = append(out, l)
		}
	}
	return out, nil
}

func bound() ([]Loop, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var out []Loop
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it was freed meanwhile
		}
		dev := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(f)))
		out = append(out, Loop{Device: dev, Backing: strings.TrimRight(string(b), "\n")})
	}
	return out, nil
}

// Device returns the loop device that is bound to image, by whatever path; ok is false if none is.
func Device(image string) (device string, ok bool, err error) {
	var st unix.Stat_t
	if err := unix.Stat(image, &st); errors.Is(err, unix.ENOENT) {
		return "", false, nil
	} else if err != nil {
		return "", false, fmt.Errorf("stat %s: %w", image, err)
	}
	all, err := bound()
	if err != nil {
		return "", false, err
	}
	for _, l := range all {
		dev, ino, err := backing(l.Device)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) {
			continue // it was freed meanwhile
		}
		if err != nil {
			return "", false, err
		}
		if dev == uint64(st.Dev) && ino == st.Ino {
			return l.Device, true, nil
		}
	}
	return "", false, nil
}

// backing identifies the file that a device is bound to.
func backing(device string) (dev, ino uint64, err error) {
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, 0, fmt.Errorf("open %s: %w", device, err)
	}
	defer func() { _ = f.Close() }()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err != nil {
		return 0, 0, fmt.Errorf("look at %s: %w", device, err)
	}
	return info.Device, info.Inode, nil
}

// WaitFree returns once no loop device is bound to image: two mounts of one image destroy it. A
// container that is just starting may hold the last one for some milliseconds. EBUSY after patience.
func WaitFree(image string, patience time.Duration) error {
	deadline := time.Now().Add(patience)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		held, err := Bound(filepath.Dir(image))
		if err != nil {
			return err
		}
		dev := ""
		for _, l := range held {
			if l.Backing == image {
				dev = l.Device
			}
		}
		if dev == "" {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s is still bound to %s: %w", filepath.Base(image), dev, unix.EBUSY)
		}
		time.Sleep(pause)
	}
}

// Free asks the kernel to drop a device as soon as nothing uses it. Idempotent.
func Free(device string) error {
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", device, err)
	}
	defer func() { _ = f.Close() }()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("free %s: %w", device, err)
	}
	return nil
}

// SetCapacity gives a device the size that its file has now.
func SetCapacity(device string) error {
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", device, err)
	}
	defer func() { _ = f.Close() }()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("resize %s: %w", device, err)
	}
	return nil
}
