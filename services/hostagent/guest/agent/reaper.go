package agent

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reaper collects the exit status of every child exactly once and delivers it to
// the exec that started the child. A start holds gate for reading until its pid
// is known, and collecting unknown children holds it for writing, so that no
// status is collected before there is an exec to deliver it to. Known children
// are collected without gate: a start that hangs delays no other exec's exit.
// Signals and the collecting of known children hold mu, so that no signal goes
// to a pid that was collected.
type reaper struct {
	all  bool // collect every child, as PID 1 must
	gate sync.RWMutex

	born chan struct{} // a process was started

	mu    sync.Mutex
	procs map[int]func(syscall.WaitStatus, error)
}

// gateRetry is the pause between two attempts to collect while a start is under way.
const gateRetry = 2 * time.Millisecond

// orphanLook is how often an agent without children looks for new ones: only
// what a runtime put into the sandbox from outside can appear without a start.
const orphanLook = 5 * time.Second

func newReaper(all bool) *reaper {
	return &reaper{all: all, born: make(chan struct{}, 1), procs: map[int]func(syscall.WaitStatus, error){}}
}

// spawn starts a process; exited is called once, with its status or with the
// reason why there is none.
func (r *reaper) spawn(start func() (int, error), exited func(syscall.WaitStatus, error)) (int, error) {
	r.gate.RLock()
	defer r.gate.RUnlock()
	pid, err := start()
	if err != nil {
		return 0, err
	}
	r.mu.Lock()
	r.procs[pid] = exited
	r.mu.Unlock()
	if !r.all {
		go r.waitOne(pid)
		return pid, nil
	}
	select {
	case r.born <- struct{}{}:
	default:
	}
	return pid, nil
}

// signalGroup signals the process group of a child that was not yet collected.
func (r *reaper) signalGroup(pid int, sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, alive := r.procs[pid]; !alive {
		return syscall.ESRCH
	}
	return unix.Kill(-pid, sig)
}

// run collects children until ctx is done and no child is left. One thread
// waits for all of them: the kernel wakes it at an exit, while a signal would
// take the way through a handler and two goroutines.
func (r *reaper) run(ctx context.Context) {
	if !r.all {
		return
	}
	muteChildSignal()
	for {
		err := retryEINTR(func() error {
			return unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
		})
		if err == nil {
			r.collect()
			runtime.Gosched() // whom it concerns goes first: the next wait keeps this thread
			continue
		}
		look := time.NewTimer(orphanLook)
		select {
		case <-r.born:
		case <-look.C:
		case <-ctx.Done():
			look.Stop()
			return
		}
		look.Stop()
	}
}

// muteChildSignal undoes the handler that the runtime has for SIGCHLD. By
// default the kernel does not deliver it at all, and keeps zombies for wait.
func muteChildSignal() {
	var deflt [8]uintptr // struct sigaction: SIG_DFL, no flags, empty mask
	_, _, _ = syscall.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGCHLD), uintptr(unsafe.Pointer(&deflt)), 0, 8, 0, 0)
}

// collect collects every child that has ended. While a start is under way it
// collects only known children: an unknown one may be the child of that start.
func (r *reaper) collect() {
	for !r.gate.TryLock() {
		r.collectKnown()
		time.Sleep(gateRetry)
	}
	defer r.gate.Unlock()
	for r.take(-1) {
	}
}

// collectKnown collects the children of execs that have ended.
func (r *reaper) collectKnown() {
	r.mu.Lock()
	pids := make([]int, 0, len(r.procs))
	for pid := range r.procs {
		pids = append(pids, pid)
	}
	r.mu.Unlock()
	for _, pid := range pids {
		r.take(pid)
	}
}

// take collects one child that has ended, any for -1, and reports whether there
// was one. The status of an orphan is dropped.
func (r *reaper) take(which int) bool {
	var status syscall.WaitStatus
	var pid int
	r.mu.Lock()
	err := retryEINTR(func() (err error) {
		pid, err = syscall.Wait4(which, &status, syscall.WNOHANG, nil)
		return err
	})
	if err != nil || pid <= 0 {
		r.mu.Unlock()
		return false
	}
	exited := r.procs[pid]
	delete(r.procs, pid)
	r.mu.Unlock()
	if exited != nil {
		exited(status, nil)
	}
	return true
}

// waitOne waits for one child when the others are not ours to collect.
func (r *reaper) waitOne(pid int) {
	err := retryEINTR(func() error {
		return unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	})
	if err == nil && r.take(pid) {
		return
	}
	if err == nil {
		err = syscall.ECHILD // another waiter of this process has its status
	}
	r.mu.Lock()
	exited := r.procs[pid]
	delete(r.procs, pid)
	r.mu.Unlock()
	if exited != nil {
		exited(0, fmt.Errorf("wait for process %d: %w", pid, err))
	}
}

func retryEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// alive says whether the status of a child was not collected yet.
func (r *reaper) alive(pid int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.procs[pid]
	return ok
}
