// Package watchdog is the process that stands in for a hostagent which cannot fence its host any
// more: killed, stopped, or cut off from its scheduler. It guarantees that, from the time that the
// shared word names until hostagent moves it, every process of the host's sandboxes is frozen, also
// of those that begin meanwhile: it freezes the one cgroup that holds them all, and touches nothing
// else; only that it also thaws the file systems which a dead hostagent left frozen (package frozen).
// There is one per host, by a file lock; it ends when it is dismissed, or when neither sandboxes nor
// its folder are left.
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

	lookEvery  = 100 * time.Millisecond
	freezeTime = time.Second     // of one try
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
		w.lease.Set(none) // that was said to the one before
	}
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0) // where it is allowed
	go frozen.Watch(frozen.Dir(dir), say)                           // apart: a thaw can hang, the look at the lease must not
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
			_, err = fmt.Fprintln(f, os.Getpid())
			return f, err
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return nil, err
		}
	}
}

// look compares the lease with the clock once; over is true when there is nothing left to watch.
func (w *watch) look() (over bool) {
	at := w.lease.get()
	switch {
	case at == dismissed:
		w.freeze(false)
		return true
	case int64(Now()) < at:
		if w.frozen {
			w.freeze(false)
		}
	case w.abandoned():
		return true
	default:
		w.freeze(true)
	}
	return false
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

// freeze stops the sandboxes, or lets them run. What does not work is tried again at the next look.
func (w *watch) freeze(on bool) {
	ctx, cancel := context.WithTimeout(context.Background(), freezeTime)
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
