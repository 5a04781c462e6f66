package agent

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

func (c *call) fileMkdir() (any, error) {
	var req wire.FileMkdir
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if req.Mode&^0o7777 != 0 {
		return nil, wire.Failf(wire.KindInvalid, "mode %o has more than permission bits", req.Mode)
	}
	if req.Mode == 0 {
		req.Mode = 0o755
	}
	p, err := c.perform(req.At, func(path string) error { return makeDir(path, req.Mode, req.Parents) })
	if err == nil {
		err = syncDir(parent(p.path))
	}
	return struct{}{}, err
}

// makeDir makes one directory, or all that are missing; one that exists is an
// error only without parents.
func makeDir(path string, mode uint32, parents bool) error {
	if parents {
		if isDir(path) {
			return nil
		}
		if err := os.MkdirAll(parent(path), 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mkdir(path, mode); err != nil {
		if parents && err == unix.EEXIST && isDir(path) {
			return nil
		}
		return &os.PathError{Op: "mkdir", Path: path, Err: err}
	}
	return unix.Chmod(path, mode) // regardless of the umask
}

func (c *call) fileMove() (any, error) {
	var req wire.FileMove
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	var to string
	p, err := c.perform(req.At, func(from string) error {
		u, err := c.agent.user(string(req.User))
		if err != nil {
			return err
		}
		if to, err = absolute(u, string(req.Cwd), string(req.To)); err != nil {
			return err
		}
		return move(from, to, req.Replace)
	})
	if err == nil {
		err = errors.Join(syncDir(parent(p.path)), syncDir(parent(to)))
	}
	return struct{}{}, err
}

func move(from, to string, replace bool) error {
	var err error
	if replace {
		err = unix.Rename(from, to)
	} else {
		err = unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
		if err == unix.ENOSYS || err == unix.EINVAL {
			// Not everywhere; a look first leaves a race that only its own users can run.
			var st unix.Stat_t
			if err = unix.EEXIST; unix.Lstat(to, &st) == unix.ENOENT {
				err = unix.Rename(from, to)
			}
		}
	}
	if err != nil {
		return &os.LinkError{Op: "move", Old: from, New: to, Err: err}
	}
	return nil
}

func (c *call) fileRemove() (any, error) {
	var req wire.FileRemove
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	p, err := c.perform(req.At, func(path string) error {
		if filepath.Clean(path) == "/" {
			return wire.Failf(wire.KindInvalid, "the root cannot be removed")
		}
		if !req.Recursive {
			return os.Remove(path)
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return &os.PathError{Op: "remove", Path: path, Err: err}
		}
		return os.RemoveAll(path)
	})
	if err == nil {
		err = syncDir(parent(p.path))
	}
	return struct{}{}, err
}
