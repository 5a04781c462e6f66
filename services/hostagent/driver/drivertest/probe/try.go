//go:build linux

package main

import (
	"errors"
	"os"
	"strconv"
	"syscall"
	"unsafe"
)

// attempts are what a sandbox must not be able to do; each would do no harm if it worked.
var attempts = map[string]func() error{
	"mount":   func() error { return syscall.Mount("tmpfs", "/mnt", "tmpfs", 0, "") },
	"userns":  func() error { return syscall.Unshare(syscall.CLONE_NEWUSER) },
	"sysctl":  func() error { return os.WriteFile("/proc/sys/kernel/core_pattern", []byte("core"), 0o644) },
	"reboot":  func() error { return syscall.Reboot(syscall.LINUX_REBOOT_CMD_CAD_OFF) },
	"settime": setTime,
	"raw": func() error {
		fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, 0)
		return closed(uintptr(fd), err)
	},
	"module": func() error { return call(syscall.SYS_INIT_MODULE, 0, 0, 0) },
	"kexec":  func() error { return call(syscall.SYS_KEXEC_LOAD, 0, 0, 0) },
	"pivot":  func() error { return syscall.PivotRoot("/", "/") },
	"swapon": func() error { return call(syscall.SYS_SWAPON, text("/etc/changed"), 0, 0) },
	"klog":   func() error { _, err := syscall.Klogctl(3, make([]byte, 64)); return err },
	"iopl":   func() error { return call(syscall.SYS_IOPL, 3, 0, 0) },
	"bpf": func() error { // a map of one element
		attr := [32]uint32{1, 4, 4, 1}
		return made(321, 0, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	},
	"perf": func() error { // cycles of everybody
		attr := [32]uint32{0, 128}
		fd, _, errno := syscall.Syscall6(298, uintptr(unsafe.Pointer(&attr)), ^uintptr(0), 0, ^uintptr(0), 0, 0)
		return closed(fd, orNil(errno))
	},
	"handle": func() error { // opening a file by its number, past any mount
		handle := [32]uint32{8, 1, 2}
		return made(304, uintptr(0xffffff9c), uintptr(unsafe.Pointer(&handle)), 0)
	},
	"keyring": func() error { // refused before it looks at what it was given
		err := call(syscall.SYS_ADD_KEY, 0, 0, 0)
		if errors.Is(err, syscall.EFAULT) || errors.Is(err, syscall.EINVAL) {
			return nil
		}
		return err
	},
}

// try attempts what a sandbox must not be able to do.
func try(a []string) (string, error) {
	if a[0] == "socket" {
		family, _ := strconv.Atoi(a[1])
		fd, err := syscall.Socket(family, syscall.SOCK_DGRAM, 0)
		return "", closed(uintptr(fd), err)
	}
	f, ok := attempts[a[0]]
	if !ok {
		return "", errors.New("unknown attempt")
	}
	return "", f()
}

// setTime sets the time that it is.
func setTime() error {
	var tv syscall.Timeval
	if err := syscall.Gettimeofday(&tv); err != nil {
		return err
	}
	return syscall.Settimeofday(&tv)
}

func call(nr, a, b, c uintptr) error {
	_, _, errno := syscall.Syscall(nr, a, b, c)
	return orNil(errno)
}

// made is a call that returns an open file.
func made(nr, a, b, c uintptr) error {
	fd, _, errno := syscall.Syscall(nr, a, b, c)
	return closed(fd, orNil(errno))
}

func closed(fd uintptr, err error) error {
	if err == nil {
		_ = syscall.Close(int(fd))
	}
	return err
}

func orNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

func text(s string) uintptr {
	p, _ := syscall.BytePtrFromString(s)
	return uintptr(unsafe.Pointer(p))
}

// thread makes the call with which a libc starts threads: it may be missing, but not forbidden.
func thread([]string) (string, error) {
	const clone3 = 435
	_, _, errno := syscall.Syscall(clone3, 0, 0, 0)
	if errno == syscall.EPERM || errno == syscall.EACCES {
		return "", errno
	}
	return "", nil
}
