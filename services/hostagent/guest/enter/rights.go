package enter

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kept are the capabilities of root in a sandbox.
var kept = []uint{
	unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_KILL, unix.CAP_SETGID, unix.CAP_SETUID,
	unix.CAP_SETPCAP, unix.CAP_SETFCAP, unix.CAP_NET_BIND_SERVICE, unix.CAP_SYS_CHROOT,
}

// refused are the system calls that a sandbox's filter lets through only until the root is entered.
var refused = []uint32{unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE}

func keptMask() (m uint64) {
	for _, c := range kept {
		m |= 1 << c
	}
	return m
}

// bounded: all that the process executes lacks what is not kept.
var bounded atomic.Bool

// Prepare is for a process that will be asked to enter a root, before its sandbox is anybody's. It takes
// from all that the process will ever execute what is not kept, for good; the process itself still has
// it. Root would do that too, but it is slow. Then it goes through what Root does, on the root that there
// is and without changing it: the first time costs most, and nobody waits yet. Idempotent.
func Prepare() error {
	if err := bound(); err != nil {
		return err
	}
	rehearse()
	return nil
}

// bound takes the rights of what the process will execute.
func bound() error {
	if bounded.Load() {
		return nil
	}
	for c, m := uintptr(0), keptMask(); ; c++ {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) { // beyond the last that the kernel knows
			break
		}
		if err != nil {
			return fmt.Errorf("read capability %d: %w", c, err)
		}
		if has == 0 || m&(1<<c) != 0 {
			continue
		}
		if _, _, e := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0); e != 0 {
			return fmt.Errorf("drop capability %d: %w", c, e)
		}
	}
	if set, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err != nil || set != 1 {
		if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); e != 0 {
			return fmt.Errorf("no new privileges: %w", e)
		}
	}
	bounded.Store(true)
	return nil
}

// rehearse does what changes nothing of what Root does. What fails here fails there.
func rehearse() {
	points, _ := mounted("/")
	top, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		places, _ := find(top, points)
		closeAll(places)
		_ = unix.Close(top)
	}
	_ = verifyThreads()
}

// giveUp takes from every thread, and so from all that they ever start, what is not kept.
func giveUp() error {
	if err := bound(); err != nil {
		return err
	}
	m := keptMask()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(m), Permitted: uint32(m)}, {Effective: uint32(m >> 32), Permitted: uint32(m >> 32)},
	}
	if _, _, e := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&data[0])), 0); e != 0 {
		return fmt.Errorf("set capabilities: %w", e)
	}
	return refuse()
}

// refuse filters the calls away that made the root, for all threads at once.
func refuse() error {
	n := uint8(len(refused))
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}} // the call's number
	for i, nr := range refused {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: n - uint8(i), K: nr})
	}
	filter = append(filter,
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)})
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	r, _, e := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if e != 0 {
		return fmt.Errorf("filter system calls: %w", e)
	}
	if r != 0 {
		return fmt.Errorf("filter system calls: thread %d cannot", r)
	}
	return nil
}

// verify looks at every thread, and tries.
func verify() error {
	if err := verifyThreads(); err != nil {
		return err
	}
	if err := unix.Mount("none", "/proc", "tmpfs", 0, ""); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("a mount is not refused: %v", err)
	}
	return nil
}

func verifyThreads() error {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("list threads: %w", err)
	}
	for _, t := range threads {
		b, err := os.ReadFile("/proc/self/task/" + t.Name() + "/status")
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended
		}
		if err == nil {
			err = verifyThread(string(b))
		}
		if err != nil {
			return fmt.Errorf("thread %s: %w", t.Name(), err)
		}
	}
	return nil
}

// verifyThread reads /proc/self/task/N/status.
func verifyThread(status string) error {
	seen := 0
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		most := keptMask()
		switch name {
		case "CapInh", "CapAmb":
			most = 0
		case "CapPrm", "CapEff", "CapBnd":
			seen++
		default:
			continue
		}
		got, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		if more := got &^ most; more != 0 {
			return fmt.Errorf("%s still has %x", name, more)
		}
	}
	if seen != 3 {
		return errors.New("its capabilities cannot be read")
	}
	return nil
}
