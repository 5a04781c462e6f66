package agent

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The raw calls below change one thread; the wrappers of the standard library
// change all of them.

const keep = ^uintptr(0)

func switchThread(groups []uint32, gid, uid uint32) error {
	if err := threadGroups(groups); err != nil {
		return err
	}
	if _, _, e := syscall.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(gid), keep); e != 0 {
		return fmt.Errorf("effective group %d: %w", gid, e)
	}
	if _, _, e := syscall.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); e != 0 {
		return fmt.Errorf("effective user %d: %w", uid, e)
	}
	return nil
}

func restoreThread(groups []uint32) error {
	if _, _, e := syscall.RawSyscall(unix.SYS_SETRESUID, keep, 0, keep); e != 0 {
		return fmt.Errorf("effective user 0: %w", e)
	}
	if _, _, e := syscall.RawSyscall(unix.SYS_SETRESGID, keep, 0, keep); e != 0 {
		return fmt.Errorf("effective group 0: %w", e)
	}
	return threadGroups(groups)
}

func threadGroups(groups []uint32) error {
	var p unsafe.Pointer
	if len(groups) > 0 {
		p = unsafe.Pointer(&groups[0])
	}
	if _, _, e := syscall.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(p), 0); e != 0 {
		return fmt.Errorf("groups: %w", e)
	}
	return nil
}
