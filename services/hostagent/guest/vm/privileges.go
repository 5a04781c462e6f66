package vm

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kept are the capabilities of root in the other tiers.
var kept = []uint{
	unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_KILL, unix.CAP_SETGID, unix.CAP_SETUID,
	unix.CAP_SETPCAP, unix.CAP_SETFCAP, unix.CAP_NET_BIND_SERVICE, unix.CAP_SYS_CHROOT,
}

// dropPrivileges takes from every thread of the process, and so from all that it ever starts, what is
// not kept, for good.
func dropPrivileges() error {
	var mask uint64
	for _, c := range kept {
		mask |= 1 << c
	}
	for c := uintptr(0); ; c++ {
		if mask&(1<<c) != 0 {
			continue
		}
		_, _, e := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0)
		if e == unix.EINVAL && c > unix.CAP_AUDIT_READ { // beyond the last that the kernel knows
			break
		}
		if e != 0 {
			return fmt.Errorf("drop capability %d: %w", c, e)
		}
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(mask), Permitted: uint32(mask)}, {Effective: uint32(mask >> 32), Permitted: uint32(mask >> 32)},
	}
	if _, _, e := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&data[0])), 0); e != 0 {
		return fmt.Errorf("set capabilities: %w", e)
	}
	if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); e != 0 {
		return fmt.Errorf("no new privileges: %w", e)
	}
	return nil
}
