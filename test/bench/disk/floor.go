package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// FIFREEZE and FITHAW of linux/fs.h, which package unix lacks.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

func command(ctx context.Context, name string, args ...string) error {
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// poolFloor is the time to make and mount an XFS as large as the pool's in a file.
func poolFloor(ctx context.Context, dir string) (time.Duration, error) {
	file, at := filepath.Join(dir, "floor.xfs"), filepath.Join(dir, "floor.pool")
	defer os.Remove(file)
	defer os.Remove(at)
	if err := os.Mkdir(at, 0o700); err != nil {
		return 0, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, err
	}
	began := time.Now()
	if err := sparse(file, int64(fs.Blocks)*fs.Bsize); err != nil {
		return 0, err
	}
	if err := command(ctx, "mkfs.xfs", "-q", "-m", "reflink=1", file); err != nil {
		return 0, err
	}
	if err := command(ctx, "mount", "-o", "loop", file, at); err != nil {
		return 0, err
	}
	took := time.Since(began)
	return took, syscall.Unmount(at, 0)
}

func sparse(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Close())
}

// plain is an ext4 in a file of the pool, mounted as a session's disk is, that no session uses.
type plain struct{ file, at string }

// mountPlain makes one of a size. mounted is the time of losetup and mount alone.
func mountPlain(ctx context.Context, pool, dir string, size int64) (p plain, mounted time.Duration, err error) {
	p = plain{filepath.Join(pool, "bench-plain.img"), filepath.Join(dir, "plain")}
	if err := errors.Join(os.MkdirAll(p.at, 0o700), sparse(p.file, size)); err != nil {
		return p, 0, err
	}
	err = command(ctx, "mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", p.file)
	began := time.Now()
	if err == nil {
		err = p.mount(ctx)
	}
	if err != nil {
		return p, 0, errors.Join(err, os.Remove(p.file))
	}
	return p, time.Since(began), nil
}

func (p plain) mount(ctx context.Context) error {
	return command(ctx, "mount", "-o", "loop,noatime", p.file, p.at)
}

// remove unmounts it; the loop device goes by itself.
func (p plain) remove() {
	if err := syscall.Unmount(p.at, 0); err != nil {
		note("unmount the floor: %v", err)
	}
	if err := os.Remove(p.file); err != nil {
		note("remove the floor: %v", err)
	}
}

// freezes times FIFREEZE and FITHAW; before says what is written, unsynced, each time.
func (p plain) freezes(n int, before func() error) (took []time.Duration, err error) {
	dir, err := os.Open(p.at)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	for range n {
		if err := before(); err != nil {
			return nil, err
		}
		began := time.Now()
		if err := unix.IoctlSetInt(int(dir.Fd()), fiFreeze, 0); err != nil {
			return nil, err
		}
		if err := unix.IoctlSetInt(int(dir.Fd()), fiThaw, 0); err != nil {
			return nil, err
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}

// overwrite writes a file of so many bytes in place and does not sync it.
func overwrite(path string, bytes int, seed uint64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	b := make([]byte, mib)
	fill(b, seed)
	for off := 0; off < bytes && err == nil; off += len(b) {
		b[0]++
		_, err = f.WriteAt(b, int64(off))
	}
	return errors.Join(err, f.Close())
}

// dd writes so many bytes to a new file and syncs it, with the program of that name.
func dd(ctx context.Context, dir string, megabytes int) (time.Duration, error) {
	from, to := filepath.Join(dir, "dd.in"), filepath.Join(dir, "dd.out")
	defer os.Remove(from)
	defer os.Remove(to)
	if err := overwrite(from, megabytes*mib, 77); err != nil {
		return 0, err
	}
	began := time.Now()
	err := command(ctx, "dd", "if="+from, "of="+to, "bs=1M", "conv=fsync", "status=none")
	return time.Since(began), err
}
