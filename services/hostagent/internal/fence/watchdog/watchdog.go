// Package watchdog is the process that stands in for a hostagent which cannot fence its host any
// more: killed, stopped, or cut off from its scheduler. It guarantees that, from the first time that
// the shared page names until hostagent moves it, every process of the host's sandboxes is frozen,
// also of those that begin meanwhile: it freezes the one cgroup that holds them all; that from the
// second time on, if there is one, they are killed, so that nothing of a session is left here when
// its scheduler gives it away (cgroup.Tree.Stop says why nothing runs in between); and that it touches
// nothing else, only that it also thaws the file systems which a dead hostagent left frozen (package
// frozen). There is one per host, by a file lock; it ends when it is dismissed, or when neither
// sandboxes nor its folder are left.
//
// It runs from init, before anything else of the program: the process is a copy of the host agent,
// told apart by its name alone, and stays when the host agent ends.
package watchdog

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/frozen"
)

const (
	// Name is what the process calls itself in argv[0].
	Name = "berth-watchdog"
	// Ready is what it says on its standard output once it watches.
	Ready = "ready\n"

	// format is that of the page and of what a watchdog does by it. It stands in the lock file.
	format = 2

	lookEvery  = 100 * time.Millisecond
	freezeTime = time.Second     // of one try
	stopTime   = time.Second     // of one try
	priority   = -20             // where it is allowed: a busy machine must not keep it from its work
	lockTime   = 5 * time.Second // for a predecessor that was dismissed to end
)

func init() {
	if len(os.Args) != 3 || os.Args[0] != Name {
		return
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		say(err.Error())
		os.Exit(1)
	}
	os.Exit(0)
}

// Lock is the file that the watchdog of a host's folder holds a lock on.
func Lock(dir string) string { return filepath.Join(dir, "watchdog.lock") }

// Held reports whether a watchdog lives.
func Held(dir string) (bool, error) {
	f, err := tryLock(dir)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return false, f.Close()
}

// Old reports that the watchdog which lives is of another format than this program, so that it does
// not do all that is asked of one, and gives its process.
func Old(dir string) (pid int, old bool) {
	b, err := os.ReadFile(Lock(dir))
	if err != nil {
		return 0, false
	}
	var of int
	n, _ := fmt.Sscan(string(b), &pid, &of)
	return pid, n >= 1 && of != format
}

// End kills a watchdog of another format. It is not dismissed: it would let run what is frozen.
func End(dir string, pid int) error {
	if cmd, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err != nil || !strings.HasPrefix(string(cmd), Name+"\x00"+dir+"\x00") {
		return fmt.Errorf("process %d is not the watchdog of %s", pid, dir)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	for end := time.Now().Add(lockTime); ; time.Sleep(5 * time.Millisecond) {
		if held, err := Held(dir); err != nil || !held {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("process %d does not end", pid)
		}
	}
}

func tryLock(dir string) (*os.File, error) {
	f, err := os.OpenFile(Lock(dir), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// watch is the state of the process.
type watch struct {
	lease  *Lease
	tree   cgroup.Tree
	cgroup string
	lock   *os.File
	// frozen is true unless the sandboxes are known to run.
	frozen, told bool
	// stopped is true once all was stopped since the lease ended; it is said once.
	stopped bool
}

func run(dir, cg string) error {
	tree, err := cgroup.Detect()
	if err != nil {
		return err
	}
	w := &watch{tree: tree, cgroup: cg, frozen: true}
	if w.lease, err = OpenLease(dir); err != nil {
		return err
	}
	if w.lock, err = lock(dir); err != nil {
		return err
	}
	if w.lease.Dismissed() {
		w.lease.Set(none, 0) // that was said to the one before
	}
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0) // where it is allowed
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, priority)
	go frozen.Watch(frozen.Dir(dir), say) // apart: a thaw can hang, the look at the lease must not
	if _, err := os.Stdout.WriteString(Ready); err != nil {
		return err
	}
	for !w.look() {
		time.Sleep(lookEvery)
	}
	return nil
}

// lock takes the place of a predecessor that is about to end, and names this process in the file.
func lock(dir string) (*os.File, error) {
	for end := time.Now().Add(lockTime); ; time.Sleep(10 * time.Millisecond) {
		f, err := tryLock(dir)
		if err == nil {
			_ = f.Truncate(0)
			_, err = fmt.Fprintf(f, "%d\n%d\n", os.Getpid(), format)
			return f, err
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return nil, err
		}
	}
}

// look compares the lease with the clock once; over is true when there is nothing left to watch.
func (w *watch) look() (over bool) {
	// In this order: of two words that are set while they are read, stop is never older than freeze.
	freeze, stop := w.lease.freeze(), w.lease.stop()
	switch now := int64(Now()); {
	case freeze == dismissed:
		if len(w.tree.Children(w.cgroup)) == 0 { // else they stay as they are: no lease lets them run
			w.freeze(false, freezeTime)
		}
		return true
	case stop != 0 && now >= stop: // before freeze: no later one hides that the time is over
		if w.abandoned() {
			return true
		}
		w.stop()
	case now < freeze:
		w.stopped = false
		if w.frozen {
			w.freeze(false, freezeTime)
		}
	case w.abandoned():
		return true
	default:
		w.stopped = false
		w.freeze(true, w.patience(now, stop))
	}
	return false
}

// patience is how long a try to freeze may take: it never holds up the stop.
func (w *watch) patience(now, stop int64) time.Duration {
	if stop == 0 {
		return freezeTime
	}
	return max(min(freezeTime, time.Duration(stop-now)), lookEvery/10)
}

// stop kills the sandboxes, and keeps frozen what may yet begin.
func (w *watch) stop() {
	if w.tree.Populated(w.cgroup) {
		ctx, cancel := context.WithTimeout(context.Background(), stopTime)
		defer cancel()
		w.lease.stopped(Now())
		err := w.tree.Stop(ctx, w.cgroup)
		w.lease.stopped(Now())
		w.frozen = false // version 1 thaws what it kills
		switch {
		case err != nil && !w.told:
			say("cannot stop: " + err.Error())
		case err == nil && !w.stopped:
			say("the lease is over at the scheduler soon: sandboxes are stopped")
		}
		w.told, w.stopped = err != nil, err == nil
	}
	w.freeze(true, freezeTime)
}

// abandoned reports that the host's folder was removed and no sandbox is left.
func (w *watch) abandoned() bool {
	st, err := w.lock.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(w.lock.Name())
	gone := errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(st, now)
	return gone && len(w.tree.Children(w.cgroup)) == 0
}

// freeze stands the sandboxes still, or lets them run. What does not work is tried again at the next
// look.
func (w *watch) freeze(on bool, patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := w.tree.Freeze(ctx, w.cgroup, on)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // there is no sandbox
	}
	changed := w.frozen != on
	if on || err == nil {
		w.frozen = on
	}
	if err != nil && !w.told {
		say("cannot freeze or thaw: " + err.Error())
	} else if changed && err == nil {
		say(map[bool]string{true: "the lease is over: sandboxes are frozen", false: "the lease was renewed: sandboxes run"}[on])
	}
	w.told = err != nil
}

func say(what string) { fmt.Fprintln(os.Stderr, time.Now().Format(time.RFC3339Nano), what) }
