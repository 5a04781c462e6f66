// Package fence keeps the promise that nothing of a host's sandboxes runs without a lease, and that
// nothing of them is left when the sessions are given away, also when hostagent is dead, stopped or
// cannot act: a watchdog process of its own freezes them from the time that hostagent named last,
// stops them from a second one, and lets them run when hostagent names later ones. Guarantees: Start
// returns once a watchdog watches, an earlier one is taken over, one of another format or that died is
// replaced; Close leaves it only while sandboxes are left.
package fence

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
)

const (
	startTime = 10 * time.Second
	endTime   = 5 * time.Second
)

// Fence is hostagent's end of the watchdog.
type Fence struct {
	dir, cgroup string
	tree        cgroup.Tree
	log         *slog.Logger
	lease       *watchdog.Lease

	mu      sync.Mutex // one look after the watchdog at a time
	problem string
}

// Start makes sure that a watchdog watches the sandboxes below a cgroup. dir is the host's folder.
func Start(dir, path string, log *slog.Logger) (*Fence, error) {
	tree, err := cgroup.Detect()
	if err != nil {
		return nil, err
	}
	lease, err := watchdog.OpenLease(dir)
	if err != nil {
		return nil, err
	}
	f := &Fence{dir: dir, cgroup: path, tree: tree, log: log, lease: lease}
	if _, err := f.ensure(); err != nil {
		return nil, errors.Join(err, lease.Close())
	}
	return f, nil
}

// Until says that sandboxes may run until freeze and be there until stop (0: for ever), on the clock of
// the lease.
func (f *Fence) Until(freeze, stop time.Duration) {
	f.change(func(l *watchdog.Lease) { l.Set(freeze, stop) })
}

// Keep says that sandboxes may be there until stop, and lets stand until when they may run.
func (f *Fence) Keep(stop time.Duration) { f.change(func(l *watchdog.Lease) { l.Keep(stop) }) }

// Freeze says that nothing may run from now on.
func (f *Fence) Freeze() { f.change((*watchdog.Lease).Freeze) }

// Stopped is when the watchdog last stopped sandboxes here, on the clock of the lease; 0 if never.
func (f *Fence) Stopped() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lease == nil {
		return 0
	}
	return f.lease.Stopped()
}

// Problem says why nothing fences this host, empty if a watchdog does.
func (f *Fence) Problem() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.problem
}

// change writes to the page and sees to it that somebody reads it.
func (f *Fence) change(write func(*watchdog.Lease)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lease == nil {
		return
	}
	write(f.lease)
	started, err := f.ensure()
	f.problem = ""
	if err != nil {
		f.problem = "no watchdog fences its sandboxes"
		f.log.Error("nothing fences this host's sandboxes while hostagent cannot", "error", err)
	} else if started {
		f.log.Warn("the watchdog had ended; another one was started")
	}
}

// Close dismisses the watchdog when there is nothing left to watch, and leaves it to the next
// hostagent otherwise.
func (f *Fence) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	lease := f.lease
	f.lease = nil
	if len(f.tree.Children(f.cgroup)) > 0 {
		return lease.Close()
	}
	lease.Dismiss()
	for end := time.Now().Add(endTime); ; time.Sleep(10 * time.Millisecond) {
		held, err := watchdog.Held(f.dir)
		if err != nil || !held {
			return errors.Join(err, lease.Close(), os.Remove(watchdog.Lock(f.dir)))
		}
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("the watchdog of %s does not end", f.dir), lease.Close())
		}
	}
}

// ensure starts a watchdog unless one watches.
func (f *Fence) ensure() (started bool, err error) {
	held, err := watchdog.Held(f.dir)
	if err != nil {
		return false, fmt.Errorf("look for a watchdog: %w", err)
	}
	pid, old := watchdog.Old(f.dir)
	if held && old {
		if err := watchdog.End(f.dir, pid); err != nil {
			return false, fmt.Errorf("replace a watchdog of another format: %w", err)
		}
	} else if held && !f.lease.Dismissed() {
		return false, nil
	}
	if err := f.spawn(); err != nil {
		return false, fmt.Errorf("start a watchdog: %w", err)
	}
	return true, nil
}

// spawn starts the process apart from this one's session and signals, and waits until it watches.
func (f *Fence) spawn() error {
	log, err := os.OpenFile(filepath.Join(f.dir, "watchdog.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: []string{watchdog.Name, f.dir, f.cgroup}, Dir: "/",
		Env: []string{"GOMAXPROCS=1"}, Stdout: w, Stderr: log, SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }() // only so that it is no zombie: the lock says whether it lives
	_ = r.SetReadDeadline(time.Now().Add(startTime))
	if line, err := bufio.NewReader(r).ReadString('\n'); line != watchdog.Ready {
		_ = cmd.Process.Kill()
		said, _ := os.ReadFile(log.Name())
		return fmt.Errorf("it did not get ready: %w: %s", errors.Join(err, errors.New("no word")), said)
	}
	return nil
}
