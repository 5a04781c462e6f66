package agent

import (
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// spares is how many threads the agent may need at once for blocking system calls
// while the sandbox is at its limit of processes.
const spares = 6

// spareThreads makes the runtime create n threads, which it keeps for later use.
// Without a spare thread a blocking system call makes the runtime create one, and
// the runtime ends the process if the limit of processes allows none: a fork bomb
// would end PID 1, and with it the sandbox.
func spareThreads(n int) {
	var locked, unlocked sync.WaitGroup
	release := make(chan struct{})
	locked.Add(n)
	unlocked.Add(n)
	for range n {
		go func() {
			defer unlocked.Done()
			runtime.LockOSThread() // no two of these goroutines share a thread
			locked.Done()
			<-release
			runtime.UnlockOSThread()
		}()
	}
	locked.Wait()
	close(release)
	unlocked.Wait()
}

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
