package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// IO limits the rate of one block device. A number that is 0 is no limit.
type IO struct {
	// Device is "major:minor"; empty: nothing is limited.
	Device         string
	BytesPerSecond uint64
	OpsPerSecond   uint64
}

// ErrInUse says that a memory limit lies below what is in use. Nothing was changed.
var ErrInUse = errors.New("more memory is in use than the new limit allows")

// shrinkTime is what the kernel gets to take back memory that is only cached.
const shrinkTime = 2 * time.Second

// IO reports whether the rate of a disk can be limited so that it holds.
func (t Tree) IO() bool { return t.v2 && t.io }

// Device names the block device that the file system at path lies on, for IO.
func Device(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", fmt.Errorf("find the device of %s: %w", path, err)
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)), nil
}

// setting is one file of a cgroup and what is written to it.
type setting struct {
	file, value string
	optional    bool // it may not be there
}

func (t Tree) set(all []setting) error {
	for _, s := range all {
		err := write(filepath.Join(t.root, s.file), s.value)
		if err != nil && !(s.optional && errors.Is(err, fs.ErrNotExist)) {
			return err
		}
	}
	return nil
}

func (t Tree) controllers() string {
	if t.io {
		return "+cpu +memory +pids +io"
	}
	return "+cpu +memory +pids"
}

func (t Tree) cpu(path string, l Limits) []setting {
	quota := strconv.FormatInt(max(int64(l.CPUMillis)*period/1000, 1000), 10)
	if t.v2 {
		return []setting{{path + "/cpu.max", quota + " " + strconv.Itoa(period), false}}
	}
	return []setting{{"cpu/" + path + "/cpu.cfs_period_us", strconv.Itoa(period), false}, {"cpu/" + path + "/cpu.cfs_quota_us", quota, false}}
}

// memory is in the order in which version 1 takes it: what counts swap too is never the smaller.
func (t Tree) memory(path string, bytes uint64, shrinks bool) []setting {
	mem := strconv.FormatUint(bytes, 10)
	if t.v2 {
		return []setting{{path + "/memory.max", mem, false}, {path + "/memory.swap.max", "0", true}}
	}
	out := []setting{{"memory/" + path + "/memory.limit_in_bytes", mem, false},
		{"memory/" + path + "/memory.memsw.limit_in_bytes", mem, true}} // absent without swap accounting
	if !shrinks {
		out[0], out[1] = out[1], out[0]
	}
	return out
}

func (t Tree) pids(path string, l Limits) []setting {
	n := strconv.FormatUint(uint64(l.PIDs), 10)
	if t.v2 {
		return []setting{{path + "/pids.max", n, false}}
	}
	return []setting{{"pids/" + path + "/pids.max", n, false}}
}

// setIO limits a device. The kernel limits reads and writes each for itself: each gets half, so that
// together they hold what was asked for.
func (t Tree) setIO(path string, l IO) error {
	if l.Device == "" || !t.IO() {
		return nil
	}
	half := func(n uint64) string {
		if n == 0 {
			return "max"
		}
		return strconv.FormatUint(max(n/2, 1), 10)
	}
	bytes, ops := half(l.BytesPerSecond), half(l.OpsPerSecond)
	return t.set([]setting{{path + "/io.max", fmt.Sprintf("%s rbps=%s wbps=%s riops=%s wiops=%s", l.Device, bytes, bytes, ops, ops), false}})
}

// Update changes the limits of a cgroup that has processes. An error of ErrInUse, or of the context
// while memory is taken back, changed nothing.
func (t Tree) Update(ctx context.Context, path string, l Limits) error {
	was, err := t.memoryLimit(path)
	if err != nil {
		return err
	}
	if l.MemoryBytes < was {
		err = t.shrink(ctx, path, l.MemoryBytes, was)
	} else {
		err = t.set(t.memory(path, l.MemoryBytes, false))
	}
	if err != nil {
		return err
	}
	if err := t.set(append(t.cpu(path, l), t.pids(path, l)...)); err != nil {
		return err
	}
	return t.setIO(path, l.IO)
}

func (t Tree) memoryLimit(path string) (uint64, error) {
	file := filepath.Join(t.root, "memory", path, "memory.limit_in_bytes")
	if t.v2 {
		file = filepath.Join(t.root, path, "memory.max")
	}
	return number(file)
}

// shrink lowers the memory limit. Version 1 takes back what is cached and refuses if that is not
// enough. Version 2 would kill; there memory.high takes back first, and the limit follows only if
// enough was had.
func (t Tree) shrink(ctx context.Context, path string, bytes, was uint64) error {
	if !t.v2 {
		err := t.set(t.memory(path, bytes, true))
		if err == nil {
			return nil
		}
		_ = t.set(t.memory(path, was, false))
		if errors.Is(err, unix.EBUSY) {
			return ErrInUse
		}
		return err
	}
	high := filepath.Join(t.root, path, "memory.high")
	if err := write(high, strconv.FormatUint(bytes, 10)); err != nil {
		return err
	}
	defer func() { _ = write(high, "max") }()
	for end := time.Now().Add(shrinkTime); ; {
		used, err := number(filepath.Join(t.root, path, "memory.current"))
		if err != nil {
			return err
		}
		if used <= bytes {
			return t.set(t.memory(path, bytes, true))
		}
		if time.Now().After(end) {
			return ErrInUse
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// pidsHits2 counts in the cgroup whose limit was hit; kernels before 6.11 count where the process was
// to be made instead.
func (t Tree) pidsHits2(path string) uint64 {
	own := keyedNumber(filepath.Join(t.root, path, "pids.events"), "max")
	var below uint64
	_ = filepath.WalkDir(filepath.Join(t.root, path), func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Name() == "pids.events" && filepath.Dir(p) != filepath.Join(t.root, path) {
			below += keyedNumber(p, "max")
		}
		return nil
	})
	return max(own, below)
}
