package disk

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
	loopControl = "/dev/loop-control"
	loopTries   = 64
	loopBlock   = 4096
)

// attachLoop binds image to a free loop device that frees itself at its last close. The caller
// closes the returned file once the device is mounted (or to give it up).
func attachLoop(image string) (*os.File, error) {
	back, err := os.OpenFile(image, os.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open image: %w", err)
	}
	defer func() { _ = back.Close() }()
	ctl, err := os.OpenFile(loopControl, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", loopControl, err)
	}
	defer func() { _ = ctl.Close() }()
	for range loopTries {
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		dev, err := configureLoop(fmt.Sprintf("/dev/loop%d", n), back)
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENXIO) {
			continue // another process took it first
		}
		return dev, err
	}
	return nil, fmt.Errorf("find a free loop device: lost the race %d times", loopTries)
}

func configureLoop(path string, back *os.File) (*os.File, error) {
	dev, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	// Direct I/O keeps one copy of the user's data in memory, not two; not every file system has it.
	for _, flags := range []uint32{unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO, unix.LO_FLAGS_AUTOCLEAR} {
		cfg := unix.LoopConfig{Fd: uint32(back.Fd()), Size: loopBlock}
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

// Loop is a loop device bound to a file below the store.
type Loop struct {
	Device  string // for example /dev/loop3
	Backing string // path of the image; the kernel appends " (deleted)" after its removal
}

// loops lists the loop devices whose backing file lies below dir.
func loops(dir string) ([]Loop, error) {
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
		back := strings.TrimRight(string(b), "\n")
		if strings.HasPrefix(back, dir+"/") {
			out = append(out, Loop{Device: "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(f))), Backing: back})
		}
	}
	return out, nil
}

// waitLoopFree returns once no loop device is bound to image: two mounts of one image destroy it.
// A container that is just starting may hold the last one for some milliseconds.
func waitLoopFree(image string, patience time.Duration) error {
	deadline := time.Now().Add(patience)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		held, err := loops(filepath.Dir(image))
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

// freeLoop asks the kernel to drop a device as soon as nothing uses it.
func freeLoop(device string) error {
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
