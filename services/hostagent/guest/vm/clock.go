package vm

import (
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of random(4), which package unix does not name.
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// setClock sets the machine's clock to unix nanoseconds.
func setClock(ns int64) error {
	if ns <= 0 {
		return fmt.Errorf("the host's time is %d", ns)
	}
	ts := unix.NsecToTimespec(ns)
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("set clock: %w", err)
	}
	return nil
}

// reseed gives the kernel's random source the seed and has it used at once: what a clone drew before
// this is what its siblings drew.
func reseed(seed []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("reseed: %w", err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 8, 8+len(seed)) // struct rand_pool_info
	binary.NativeEndian.PutUint32(b, uint32(8*len(seed)))
	binary.NativeEndian.PutUint32(b[4:], uint32(len(seed)))
	b = append(b, seed...)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&b[0]))); e != 0 {
		return fmt.Errorf("add entropy: %w", e)
	}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndReseedCRNG, 0); e != 0 {
		return fmt.Errorf("reseed: %w", e)
	}
	return nil
}
