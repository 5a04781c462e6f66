// Package cgroup makes the parent cgroup of each sandbox and puts the limits on it, for cgroup v1
// and v2. It guarantees that a limit which cannot be set is an error and not ignored, that Remove
// leaves nothing in any hierarchy, and that Update kills nothing: a memory limit below what is in use
// is refused.
//
// The rate of a disk is limited on version 2 alone. Version 1 has a throttle too, but what was written
// to the page cache passes it, so there is none rather than one that does not hold; see Tree.IO.
package cgroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of one cgroup.
type Limits struct {
	CPUMillis   uint32
	MemoryBytes uint64
	PIDs        uint32
	IO          IO
}

// Stats of one cgroup and those below it.
type Stats struct {
	CPU         time.Duration
	MemoryBytes uint64
	Processes   uint32
	OOMKills    uint64
	// PIDsHits is how often no process could be made for the limit.
	PIDsHits uint64
}

const (
	root   = "/sys/fs/cgroup"
	period = 100_000 // of the CPU quota, in microseconds
)

// needed controllers of version 1 that carry limits, counters or the freezer.
var needed = []string{"cpu", "cpuacct", "memory", "pids", "freezer"}

// Tree is the host's cgroup file system.
type Tree struct {
	root string
	v2   bool
	io   bool
}

// Detect finds the host's cgroups; the error is one sentence.
func Detect() (Tree, error) { return detect(root) }

func detect(root string) (Tree, error) {
	t := Tree{root: root}
	if b, err := os.ReadFile(filepath.Join(root, "cgroup.controllers")); err == nil {
		t.v2 = true
		for _, c := range []string{"cpu", "memory", "pids"} {
			if !slices.Contains(strings.Fields(string(b)), c) {
				return t, fmt.Errorf("cgroup v2 is mounted but its controller %s is not available", c)
			}
		}
		t.io = slices.Contains(strings.Fields(string(b)), "io")
		return t, nil
	}
	for _, c := range needed {
		if _, err := os.Stat(filepath.Join(root, c, "cgroup.procs")); err != nil {
			return t, fmt.Errorf("no cgroup controller %s in %s", c, root)
		}
	}
	return t, nil
}

// V2 reports whether the unified hierarchy is used.
func (t Tree) V2() bool { return t.v2 }

// dirs returns the directory of path in every hierarchy that exists.
func (t Tree) dirs(path string) []string {
	if t.v2 {
		return []string{filepath.Join(t.root, path)}
	}
	entries, _ := os.ReadDir(t.root)
	var out []string
	for _, e := range entries {
		if e.Type()&fs.ModeSymlink == 0 { // cpu and cpuacct may be links to one hierarchy
			out = append(out, filepath.Join(t.root, e.Name(), path))
		}
	}
	return out
}

// Create makes the cgroup path and puts the limits on it. Idempotent.
func (t Tree) Create(path string, l Limits) error {
	if t.v2 {
		return t.create2(path, l)
	}
	for _, c := range needed {
		if err := os.MkdirAll(filepath.Join(t.root, c, path), 0o755); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
	}
	return t.set(append(t.cpu(path, l), append(t.memory(path, l.MemoryBytes, true), t.pids(path, l)...)...))
}

func (t Tree) create2(path string, l Limits) error {
	dir, controllers := t.root, t.controllers()
	for _, part := range strings.Split(strings.Trim(path, "/"), "/") {
		if err := write(filepath.Join(dir, "cgroup.subtree_control"), controllers); err != nil {
			return err
		}
		dir = filepath.Join(dir, part)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make cgroup: %w", err)
		}
	}
	if err := write(filepath.Join(dir, "cgroup.subtree_control"), controllers); err != nil {
		return err
	}
	if err := t.set(append(t.cpu(path, l), append(t.memory(path, l.MemoryBytes, true), t.pids(path, l)...)...)); err != nil {
		return err
	}
	return t.setIO(path, l.IO)
}

func write(file, value string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("set cgroup limit: %w", err)
	}
	_, err = f.WriteString(value)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("set cgroup limit: %w", err)
	}
	return nil
}

// Children lists the cgroups directly below path in any hierarchy.
func (t Tree) Children(path string) []string {
	seen := map[string]bool{}
	for _, d := range t.dirs(path) {
		entries, _ := os.ReadDir(d)
		for _, e := range entries {
			if e.IsDir() {
				seen[e.Name()] = true
			}
		}
	}
	out := make([]string, 0, len(seen))
	for name := range seen {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// Exists reports whether path exists in any hierarchy.
func (t Tree) Exists(path string) bool {
	return slices.ContainsFunc(t.dirs(path), func(d string) bool {
		_, err := os.Stat(d)
		return err == nil
	})
}

// Remove kills what still runs in path and removes it with everything below, in every hierarchy.
// Idempotent.
func (t Tree) Remove(ctx context.Context, path string) error {
	if path == "" || path == "/" {
		return fmt.Errorf("refusing to remove the root cgroup")
	}
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := t.removeOnce(path)
		if err == nil || !errors.Is(err, unix.EBUSY) {
			return err
		}
		t.Kill(path)
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", path, err)
		case <-time.After(pause):
		}
	}
}

func (t Tree) removeOnce(path string) error {
	var errs []error
	for _, d := range t.dirs(path) {
		if err := removeTree(d); err != nil {
			errs = append(errs, fmt.Errorf("remove cgroup: %w", err))
		}
	}
	return errors.Join(errs...)
}

func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}

// Kill sends SIGKILL to every process in path and below. A frozen one dies when it thaws.
func (t Tree) Kill(path string) {
	for _, d := range t.dirs(path) {
		if t.v2 && write(filepath.Join(d, "cgroup.kill"), "1") == nil {
			return
		}
		_ = filepath.WalkDir(d, func(p string, e fs.DirEntry, err error) error {
			if err != nil || e.Name() != "cgroup.procs" {
				return nil
			}
			for _, pid := range numbers(p) {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
			return nil
		})
	}
}

func numbers(file string) []int {
	b, _ := os.ReadFile(file)
	var out []int
	for _, f := range strings.Fields(string(b)) {
		if n, err := strconv.Atoi(f); err == nil {
			out = append(out, n)
		}
	}
	return out
}

// Freeze stops every process in path and below from running; Freeze(false) lets them run again.
func (t Tree) Freeze(ctx context.Context, path string, on bool) error {
	file, value, want := filepath.Join(t.root, "freezer", path, "freezer.state"), "THAWED", "THAWED"
	if on {
		value, want = "FROZEN", "FROZEN"
	}
	state := func() string { b, _ := os.ReadFile(file); return strings.TrimSpace(string(b)) }
	if t.v2 {
		file, value = filepath.Join(t.root, path, "cgroup.freeze"), "0"
		if on {
			value = "1"
		}
		want = "frozen " + value
		state = func() string { return keyed(filepath.Join(t.root, path, "cgroup.events"), "frozen") }
	}
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if err := write(file, value); err != nil {
			return err
		}
		if state() == want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("freeze cgroup %s: %w", path, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// Stats reads the counters of path.
func (t Tree) Stats(path string) (Stats, error) {
	if t.v2 {
		return t.stats2(path)
	}
	cpu, err := number(filepath.Join(t.root, "cpuacct", path, "cpuacct.usage"))
	if err != nil {
		return Stats{}, err
	}
	mem, err := number(filepath.Join(t.root, "memory", path, "memory.usage_in_bytes"))
	if err != nil {
		return Stats{}, err
	}
	pids, err := number(filepath.Join(t.root, "pids", path, "pids.current"))
	if err != nil {
		return Stats{}, err
	}
	s := Stats{CPU: time.Duration(cpu), MemoryBytes: mem, Processes: uint32(pids)}
	// Version 1 counts a kill in the victim's own cgroup alone.
	_ = filepath.WalkDir(filepath.Join(t.root, "memory", path), func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Name() == "memory.oom_control" {
			s.OOMKills += keyedNumber(p, "oom_kill")
		}
		return nil
	})
	_ = filepath.WalkDir(filepath.Join(t.root, "pids", path), func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Name() == "pids.events" {
			s.PIDsHits += keyedNumber(p, "max")
		}
		return nil
	})
	return s, nil
}

func (t Tree) stats2(path string) (Stats, error) {
	dir := filepath.Join(t.root, path)
	mem, err := number(filepath.Join(dir, "memory.current"))
	if err != nil {
		return Stats{}, err
	}
	pids, err := number(filepath.Join(dir, "pids.current"))
	if err != nil {
		return Stats{}, err
	}
	return Stats{
		CPU:         time.Duration(keyedNumber(filepath.Join(dir, "cpu.stat"), "usage_usec")) * time.Microsecond,
		MemoryBytes: mem,
		Processes:   uint32(pids),
		OOMKills:    keyedNumber(filepath.Join(dir, "memory.events"), "oom_kill"),
		PIDsHits:    t.pidsHits2(path),
	}, nil
}

func number(file string) (uint64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("read cgroup: %w", err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read cgroup: %w", err)
	}
	return n, nil
}

// keyed returns the line of a flat-keyed file that begins with key.
func keyed(file, key string) string {
	b, _ := os.ReadFile(file)
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		if strings.HasPrefix(sc.Text(), key+" ") {
			return sc.Text()
		}
	}
	return ""
}

func keyedNumber(file, key string) uint64 {
	_, value, _ := strings.Cut(keyed(file, key), " ")
	n, _ := strconv.ParseUint(value, 10, 64)
	return n
}
