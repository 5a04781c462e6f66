package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// freezeTry bounds the wait for the freezer before a kill: what does not freeze is killed all the same.
const freezeTry = 200 * time.Millisecond

// Stop ends every process in path and below, also what is frozen, and returns once none is left; the
// cgroups stay. A path that does not exist holds none.
//
// Nothing of the user runs between the kill and a process's death:
//
//   - Version 2: cgroup.kill puts SIGKILL on every process below, and the kernel does it again for one
//     that is forked meanwhile. A frozen process waits inside the kernel's handling of signals; a fatal
//     one takes it from there to its exit without a way back to user mode. Nothing is thawed.
//   - Version 1: a frozen process waits inside the kernel and takes its SIGKILL only when it is thawed.
//     So everything is frozen first and then killed: while it is frozen nothing forks, so the list of
//     processes is whole. The thaw then wakes each in the kernel with SIGKILL pending, which is looked
//     at before every return to user mode; where a cgroup above has to stay frozen, what was killed is
//     moved out of it instead, which thaws it alone. What cannot be frozen in time (it sleeps in the kernel and
//     does not take signals) is killed too: it runs no user code until it takes that signal.
//
// A process that a runtime is starting in that very moment is found by the next round; none of the
// user's is started by anybody without hostagent, which asks its lease first.
func (t Tree) Stop(ctx context.Context, path string) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		if !t.Populated(path) {
			return nil
		}
		if err := t.stopOnce(ctx, path); err != nil {
			return fmt.Errorf("stop cgroup %s: %w", path, err)
		}
		if !t.Populated(path) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("stop cgroup %s: %w", path, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// stopOnce is one round: all that is there now gets its SIGKILL and may take it.
func (t Tree) stopOnce(ctx context.Context, path string) error {
	if t.v2 {
		return ignoreGone(write(filepath.Join(t.root, path, "cgroup.kill"), "1"))
	}
	fctx, cancel := context.WithTimeout(ctx, freezeTry)
	defer cancel()
	_ = t.Freeze(fctx, path, true)
	dir := filepath.Join(t.root, "freezer", path)
	for _, pid := range t.processes(path) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	var failed []error
	if t.frozenAbove(path) {
		return t.release(path)
	}
	// What a driver froze by itself has a state of its own: the parent's thaw does not reach it.
	_ = filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Name() == "freezer.state" {
			failed = append(failed, ignoreGone(write(p, "THAWED")))
		}
		return nil
	})
	return errors.Join(failed...)
}

// frozenAbove reports that a cgroup above keeps path frozen, whatever its own state is.
func (t Tree) frozenAbove(path string) bool {
	n, err := number(filepath.Join(t.root, "freezer", path, "freezer.parent_freezing"))
	return err == nil && n == 1
}

// release moves what was killed out of a frozen tree, into the freezer's root: the kernel thaws what it
// moves, and it dies there. What runs beside it stays frozen.
func (t Tree) release(path string) error {
	for _, pid := range t.processes(path) {
		err := write(filepath.Join(t.root, "freezer", "cgroup.procs"), strconv.Itoa(pid))
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// Populated reports whether a process lives in path or below.
func (t Tree) Populated(path string) bool {
	if t.v2 {
		return strings.HasSuffix(keyed(filepath.Join(t.root, path, "cgroup.events"), "populated"), " 1")
	}
	return len(t.processes(path)) > 0
}

// processes lists what is in the freezer's cgroups of version 1, threads too: a process whose first
// thread has ended is found by its others.
func (t Tree) processes(path string) []int {
	var out []int
	_ = filepath.WalkDir(filepath.Join(t.root, "freezer", path), func(p string, e fs.DirEntry, err error) error {
		if err == nil && (e.Name() == "cgroup.procs" || e.Name() == "tasks") {
			out = append(out, numbers(p)...)
		}
		return nil
	})
	slices.Sort(out)
	return slices.Compact(out)
}
