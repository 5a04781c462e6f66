//go:build linux

// Package jail takes from a process of a WebAssembly sandbox what it must not have. It guarantees
// that a step which fails is an error, never a weaker wall; that what is given up is given up by all
// threads and for good; and that Enter leaves no way to the files of the host.
package jail

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// noRoot: user 0 gets no capability by starting a program, and none of this can be undone.
const noRoot = 1<<0 | 1<<1 | 1<<2 | 1<<3 | 1<<5 | 1<<6 | 1<<7

// DropPrivileges gives up every capability, now and for whatever is started later, and the right to
// gain any. It needs CAP_SETPCAP in the process's own user namespace.
func DropPrivileges() error {
	for c := 0; c <= unix.CAP_LAST_CAP+8; c++ {
		_, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0, 0)
		if e == unix.EINVAL {
			break // one that this kernel does not know, nor those after it
		}
		if e != 0 {
			return fmt.Errorf("drop capability %d: %w", c, e)
		}
	}
	for _, p := range []struct {
		what string
		args [3]uintptr
	}{
		{"lock capabilities", [3]uintptr{unix.PR_SET_SECUREBITS, noRoot, 0}},
		{"clear ambient capabilities", [3]uintptr{unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0}},
		{"set no_new_privs", [3]uintptr{unix.PR_SET_NO_NEW_PRIVS, 1, 0}},
		{"forbid dumps", [3]uintptr{unix.PR_SET_DUMPABLE, 0, 0}},
	} {
		if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, p.args[0], p.args[1], p.args[2], 0, 0, 0); e != 0 {
			return fmt.Errorf("%s: %w", p.what, e)
		}
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if _, _, e := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&none[0])), 0); e != 0 {
		return fmt.Errorf("drop capabilities: %w", e)
	}
	return nil
}

// Limit bounds the descriptors of this process and its children, and forbids core dumps.
func Limit(openFiles uint64) error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	if openFiles == 0 {
		return nil
	}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("limit open files: %w", err)
	}
	l.Max = min(l.Max, openFiles)
	l.Cur = l.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("limit open files: %w", err)
	}
	return nil
}
