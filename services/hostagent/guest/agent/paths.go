package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// place is a path that the kernel can take, and who asks.
type place struct {
	user *account
	path string
}

// place resolves the user and makes the path absolute. It does not clean it:
// what .. means after a symlink is the kernel's to say.
func (c *call) place(at wire.At) (place, error) {
	u, err := c.agent.user(string(at.User))
	if err != nil {
		return place{}, err
	}
	path, err := absolute(u, string(at.Cwd), string(at.Path))
	return place{user: u, path: path}, err
}

func absolute(u *account, cwd, path string) (string, error) {
	switch {
	case path == "":
		return "", wire.Failf(wire.KindInvalid, "empty path")
	case strings.IndexByte(path, 0) >= 0 || strings.IndexByte(cwd, 0) >= 0:
		return "", wire.Failf(wire.KindInvalid, "zero byte in path %q", path)
	case filepath.IsAbs(path):
		return path, nil
	case cwd == "":
		cwd = u.home
	case !filepath.IsAbs(cwd):
		cwd = u.home + "/" + cwd
	}
	return cwd + "/" + path, nil
}

// acquire takes one of the slots for file calls.
func (c *call) acquire() (release func(), err error) {
	select {
	case c.agent.files <- struct{}{}:
		return func() { <-c.agent.files }, nil
	case <-c.ctx.Done():
		return nil, c.ctx.Err()
	}
}

// perform runs a file operation with the permissions of its user.
func (c *call) perform(at wire.At, f func(path string) error) (place, error) {
	p, err := c.place(at)
	if err != nil {
		return p, err
	}
	release, err := c.acquire()
	if err != nil {
		return p, err
	}
	defer release()
	return p, p.user.as(func() error { return f(p.path) })
}

// follow resolves symlinks at the end of a path, also one to nothing.
func follow(path string) (string, error) {
	for range 40 {
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil // no symlink, or an error that the next call will show
		}
		if !filepath.IsAbs(target) {
			target = filepath.Dir(path) + "/" + target
		}
		path = target
	}
	return "", &os.PathError{Op: "follow", Path: path, Err: unix.ELOOP}
}

// split parts a path into directory and name; there must be a name.
func split(path string) (dir, name string, err error) {
	dir, name = filepath.Split(path)
	if name == "" || name == "." || name == ".." {
		return "", "", &os.PathError{Op: "write", Path: path, Err: unix.EISDIR}
	}
	return dir, name, nil
}

// syncDir makes names in a directory durable.
func syncDir(dir string) error {
	d, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	return nil
}

// parent is the directory that holds the name of a path.
func parent(path string) string {
	return filepath.Dir(strings.TrimRight(path, "/"))
}
