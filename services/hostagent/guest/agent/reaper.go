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

// reaper collects the exit status of every child exactly once and hands it to
// whom it belongs. A start holds gate for reading until its pid is known, and
// collecting holds it for writing, so that no status is collected before there
// is someone to give it to, and no signal goes to a pid that was collected.
type reaper struct {
	all  bool // collect every child, as PID 1 must
	gate sync.RWMutex

	born chan struct{} // a process was started

	mu    sync.Mutex
	procs map[int]func(syscall.WaitStatus, error)
}

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
	r.gate.RLock()
	defer r.gate.RUnlock()
	r.mu.Lock()
	_, alive := r.procs[pid]
	r.mu.Unlock()
	if !alive {
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

// collect takes every status that there is.
func (r *reaper) collect() {
	r.gate.Lock()
	defer r.gate.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		r.deliver(pid, status, nil)
	}
}

// waitOne waits for one child when the others are not ours to collect.
func (r *reaper) waitOne(pid int) {
	err := retryEINTR(func() error {
		return unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	})
	r.gate.Lock()
	defer r.gate.Unlock()
	var status syscall.WaitStatus
	if err == nil {
		err = retryEINTR(func() error {
			_, err := syscall.Wait4(pid, &status, 0, nil)
			return err
		})
	}
	if err != nil {
		err = fmt.Errorf("wait for process %d: %w", pid, err)
	}
	r.deliver(pid, status, err)
}

// deliver hands a status over; a stranger's (an orphan's) is dropped.
func (r *reaper) deliver(pid int, status syscall.WaitStatus, err error) {
	r.mu.Lock()
	exited := r.procs[pid]
	delete(r.procs, pid)
	r.mu.Unlock()
	if exited != nil {
		exited(status, err)
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
