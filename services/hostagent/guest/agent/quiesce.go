package agent

import (
	"context"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

const (
	maxGrace   = 5 * time.Minute
	killTime   = 10 * time.Second     // how long SIGKILL is repeated
	lookAgain  = 5 * time.Millisecond // an orphan's end is told to nobody but its parent
	minGrace   = 0
	maxSyncFSs = 64
)

// quiesce ends all user processes and syncs the file systems. From its
// beginning on starts are refused, until resume.
func (c *call) quiesce() (any, error) {
	var req wire.Quiesce
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	return c.agent.Quiesce(c.ctx, time.Duration(req.Grace))
}

func (c *call) resume() (any, error) {
	c.agent.mu.Lock()
	defer c.agent.mu.Unlock()
	c.agent.quiesced = false
	return struct{}{}, nil
}

// sync writes the file systems out and leaves the processes alone.
func (c *call) sync() (any, error) {
	if err := syncAll(); err != nil {
		return nil, err
	}
	return struct{}{}, nil
}

// Quiesce sends SIGTERM to all user processes, after grace SIGKILL, and syncs
// the file systems that hold / and what is mounted. It needs Run to reap.
func (a *Agent) Quiesce(ctx context.Context, grace time.Duration) (wire.Quiesced, error) {
	grace = min(max(grace, minGrace), maxGrace)
	a.mu.Lock()
	a.quiesced = true
	a.mu.Unlock()
	var q wire.Quiesced
	a.signalAll(syscall.SIGTERM)
	gone, err := a.waitGone(ctx, grace, func() {})
	if err == nil && !gone {
		q.Killed = true
		gone, err = a.waitGone(ctx, killTime, func() { a.signalAll(syscall.SIGKILL) })
	}
	if err != nil {
		return q, err
	}
	if !gone {
		q.Remaining = max(a.remaining(), 1)
	}
	return q, syncAll()
}

// waitGone waits until no user process is left; each time it looks it calls again.
func (a *Agent) waitGone(ctx context.Context, limit time.Duration, again func()) (bool, error) {
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	look := time.NewTicker(lookAgain)
	defer look.Stop()
	for {
		again()
		if a.remaining() == 0 {
			return true, nil
		}
		select {
		case <-look.C:
		case <-deadline.C:
			return false, nil
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// signalAll signals every process of the sandbox. Only PID 1 may do so: for any
// other process -1 means every process of the machine.
func (a *Agent) signalAll(sig syscall.Signal) {
	if a.opts.Init && os.Getpid() == 1 {
		_ = unix.Kill(-1, sig)
		return
	}
	for _, x := range a.running() {
		_ = a.reaper.signalGroup(x.pid, sig)
	}
}

// remaining counts user processes, or at least says whether there are any.
func (a *Agent) remaining() int {
	if a.opts.Init && os.Getpid() == 1 {
		if unix.Kill(-1, 0) == unix.ESRCH {
			return 0
		}
		return max(len(processes())-1, 1)
	}
	return len(a.running())
}

// running returns the execs whose process has not ended.
func (a *Agent) running() []*execution {
	a.mu.Lock()
	all := make([]*execution, 0, len(a.execs))
	for _, x := range a.execs {
		all = append(all, x)
	}
	a.mu.Unlock()
	out := all[:0]
	for _, x := range all {
		<-x.started
		if x.failed == nil && a.reaper.alive(x.pid) {
			out = append(out, x)
		}
	}
	return out
}

// syncAll writes out the file systems that may hold user data: that of / and
// every mounted one that has a device. A sync of everything would wait for the
// other sandboxes of the host.
func syncAll() error {
	paths := []string{"/"}
	b, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(b)) {
		left, right, ok := strings.Cut(line, " - ")
		fields, kind := strings.Fields(left), strings.Fields(right)
		if !ok || len(fields) < 6 || len(kind) == 0 || len(paths) > maxSyncFSs {
			continue
		}
		switch kind[0] {
		case "ext4", "xfs", "btrfs", "overlay", "virtiofs", "9p", "fuse":
			paths = append(paths, fields[4])
		}
	}
	var first error
	for i, path := range paths {
		if err := syncOne(path); err != nil && i == 0 {
			first = err
		}
	}
	return first
}

func syncOne(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	err = unix.Syncfs(fd)
	if err == unix.ENOSYS {
		unix.Sync()
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "syncfs", Path: path, Err: err}
	}
	return nil
}
