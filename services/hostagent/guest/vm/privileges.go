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

func keptMask() (m uint64) {
	for _, c := range kept {
		m |= 1 << c
	}
	return m
}

// boundPrivileges takes from all that the process will ever execute what is not kept, for good. The
// process itself still has it: this is the slow part, and can be done before the machine is anybody's.
func boundPrivileges() error {
	for c, m := uintptr(0), keptMask(); ; c++ {
		if m&(1<<c) != 0 {
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
	if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); e != 0 {
		return fmt.Errorf("no new privileges: %w", e)
	}
	return nil
}

// dropPrivileges takes from every thread of the process, and so from all that it ever starts, what is
// not kept.
func dropPrivileges() error {
	m := keptMask()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(m), Permitted: uint32(m)}, {Effective: uint32(m >> 32), Permitted: uint32(m >> 32)},
	}
	if _, _, e := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&data[0])), 0); e != 0 {
		return fmt.Errorf("set capabilities: %w", e)
	}
	return nil
}
