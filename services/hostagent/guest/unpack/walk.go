package unpack

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// errSystem: the path leads to what is not the session's files.
var errSystem = errors.New("not the session's files")

// maxLinks in one path, as in the kernel.
const maxLinks = 40

// place is a directory below the root, with the directories above it: what .. means is decided here
// and not by the kernel, so that it never means anything above the root.
type place struct {
	root  *os.File
	dirs  []*os.File
	names []string
}

func (p *place) fd() int {
	if n := len(p.dirs); n > 0 {
		return int(p.dirs[n-1].Fd())
	}
	return int(p.root.Fd())
}

func (p *place) up() {
	if n := len(p.dirs); n > 0 {
		_ = p.dirs[n-1].Close()
		p.dirs, p.names = p.dirs[:n-1], p.names[:n-1]
	}
}

func (p *place) close() {
	for len(p.dirs) > 0 {
		p.up()
	}
}

// enter returns the directory of an entry. It stays open for the next one: an archive names most
// directories many times in a row, and an entry of another directory closes it.
func (u *unpacker) enter(dir string, create bool) (*place, error) {
	if u.at != nil && u.atName == dir {
		return u.at, nil
	}
	u.forget()
	p, err := u.walk(dir, create)
	if err != nil {
		return nil, err
	}
	u.at, u.atName = p, dir
	return p, nil
}

func (u *unpacker) forget() {
	if u.at != nil {
		u.at.close()
		u.at = nil
	}
}

// walk opens the directory that a path names, with links resolved as if the root were /. Missing
// directories are made if asked for. The kernel is given one component at a time and follows none.
func (u *unpacker) walk(dir string, create bool) (_ *place, err error) {
	p := &place{root: u.root}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	todo := strings.Split(dir, "/")
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch {
		case part == "" || part == ".":
			continue
		case part == "..":
			p.up()
			continue
		case u.isRoot && len(p.names) == 0 && system[part]:
			return nil, errSystem
		}
		f, err := openDir(p.fd(), part)
		if errors.Is(err, unix.ENOENT) && create {
			if err = unix.Mkdirat(p.fd(), part, 0o755); err == nil || errors.Is(err, unix.EEXIST) {
				f, err = openDir(p.fd(), part)
			}
		}
		if err == nil {
			p.dirs, p.names = append(p.dirs, f), append(p.names, part)
			continue
		}
		if !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP) {
			return nil, err
		}
		target, err := readLink(p.fd(), part)
		if err != nil {
			return nil, err
		}
		if links++; links > maxLinks {
			return nil, unix.ELOOP
		}
		if strings.HasPrefix(target, "/") {
			p.close()
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	return p, nil
}

// openDir opens one component that is a directory; a link or anything else is ENOTDIR. O_DIRECTORY is
// not used: with it gVisor follows a link in spite of O_NOFOLLOW. What was opened must be what was
// looked at, so that no kernel's reading of the flags, and nobody who changes the name meanwhile,
// leads elsewhere.
func openDir(at int, name string) (*os.File, error) {
	var seen, got unix.Stat_t
	if err := unix.Fstatat(at, name, &seen, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, err
	}
	if seen.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, unix.ENOTDIR
	}
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	for errors.Is(err, unix.EINTR) {
		fd, err = unix.Openat(at, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, err
	}
	if err := unix.Fstat(fd, &got); err != nil || got.Dev != seen.Dev || got.Ino != seen.Ino || got.Mode&unix.S_IFMT != unix.S_IFDIR {
		_ = unix.Close(fd)
		return nil, errors.Join(err, unix.ENOTDIR)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// readLink reads a link; ENOTDIR if it is none.
func readLink(at int, name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(at, name, buf)
	switch {
	case errors.Is(err, unix.EINVAL):
		return "", unix.ENOTDIR
	case err != nil:
		return "", err
	case n == len(buf):
		return "", unix.ENAMETOOLONG
	}
	return string(buf[:n]), nil
}

// maxDepth is how deep directories are removed; each costs a descriptor.
const maxDepth = 900

// remove removes a name and all below it; nothing there is no error. Links are removed, not followed.
func (u *unpacker) remove(at int, name string, depth int) error {
	if err := u.ctx.Err(); err != nil {
		return err
	}
	err := unix.Unlinkat(at, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	if depth > maxDepth {
		return errors.New("directories are nested too deep to be removed")
	}
	f, derr := openDir(at, name)
	if derr != nil {
		return err
	}
	defer f.Close()
	if err := u.emptyDir(f, nil, depth); err != nil {
		return err
	}
	if err := unix.Unlinkat(at, name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// emptyDir removes what a directory holds but for names to keep.
func (u *unpacker) emptyDir(f *os.File, keep map[string]bool, depth int) error {
	for {
		// What is removed moves the place of what is left: begin again until there is nothing.
		if _, err := f.Seek(0, 0); err != nil {
			return err
		}
		removed := 0
		for {
			names, err := f.Readdirnames(256)
			for _, name := range names {
				if keep[name] {
					continue
				}
				if err := u.remove(int(f.Fd()), name, depth+1); err != nil {
					return &fs.PathError{Op: "remove", Path: name, Err: err}
				}
				removed++
			}
			if err != nil || len(names) == 0 {
				break
			}
		}
		if removed == 0 {
			return nil
		}
	}
}

// empty removes what is in the directory of an entry.
func (u *unpacker) empty(in *place) error {
	f, err := openDir(in.fd(), ".")
	if err != nil {
		return err
	}
	defer f.Close()
	keep := map[string]bool{}
	if u.isRoot && len(in.names) == 0 {
		keep = system
	}
	return u.emptyDir(f, keep, 0)
}
