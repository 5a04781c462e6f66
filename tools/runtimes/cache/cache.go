// Package cache keeps what Berth's tools build once and use often: runtimes and
// images. It guarantees that an entry is either absent or complete, that a killed
// build leaves nothing that looks like an entry, and that two processes never
// build the same entry at the same time.
package cache

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// EnvRoot overrides where the cache is.
const EnvRoot = "BERTH_CACHE"

// Root returns the cache's root: $BERTH_CACHE, or berth below the user's cache
// directory. The directory need not exist.
func Root() (string, error) {
	if dir := os.Getenv(EnvRoot); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory (set %s to choose one): %w", EnvRoot, err)
	}
	return filepath.Join(dir, "berth"), nil
}

// Fill returns the path of entry name in directory parent. If the entry is
// missing, it calls build with an empty directory and renames that to the entry
// when build succeeds. Another process that fills the same entry is waited for.
func Fill(parent, name string, build func(dir string) error) (string, error) {
	path := filepath.Join(parent, name)
	if has, err := exists(path); err != nil || has {
		return path, err
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("create the cache directory: %w", err)
	}
	unlock, err := lock(filepath.Join(parent, "."+name+".lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if has, err := exists(path); err != nil || has {
		return path, err
	}
	// Only the holder of the lock uses this name, so what is there was left by a
	// build that was killed.
	tmp := filepath.Join(parent, "."+name+".tmp")
	if err := os.RemoveAll(tmp); err != nil {
		return "", fmt.Errorf("remove an unfinished cache entry: %w", err)
	}
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return "", fmt.Errorf("create a cache entry: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := build(tmp); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, path); err != nil {
		return "", fmt.Errorf("finish cache entry %s: %w", name, err)
	}
	return path, nil
}

// Point makes the symbolic link at path point to target, replacing it in one step.
func Point(path, target string) error {
	tmp := fmt.Sprintf("%s.%d.tmp", path, os.Getpid())
	if err := os.Symlink(target, tmp); err != nil {
		return fmt.Errorf("link %s: %w", path, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		os.Remove(tmp)
		return fmt.Errorf("link %s: %w", path, err)
	}
	return nil
}

func exists(path string) (bool, error) {
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look into the cache: %w", err)
	}
	return true, nil
}

// lock takes an exclusive lock that the kernel drops when the process dies.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open a cache lock: %w", err)
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("take cache lock %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}
