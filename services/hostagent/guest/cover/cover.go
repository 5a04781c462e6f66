// Package cover lays files of the run folder over files of a session's root: the addresses of the resolver
// and the certificates to trust are the host's to say, and are never written to the session's disk.
//
// It guarantees that a file is laid over what its path means within that one root file system and nowhere
// else, whatever links a session left there; that what is laid over is a file or a symbolic link, never a
// folder; that the copy cannot be written to; and that nothing is made in the root but an empty
// /etc/resolv.conf where there is none. To lay the same file over the same place again changes nothing.
//
// The root must be nobody's while this works: a session that runs could change it in between.
package cover

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// File is one file of the run folder and where it goes.
type File struct {
	From string // name in the run folder
	To   string // absolute path in the root
}

// Resolver is the one file that is made if it is missing.
const Resolver = "/etc/resolv.conf"

// ErrNone: nothing is at a path that a file could be laid over.
var ErrNone = errors.New("nothing is there that a file could be laid over")

const (
	lookup   = unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC
	maxLinks = 40
)

// Taken is a copy of a file's mount, which is mounted nowhere yet.
type Taken struct {
	fd   int
	to   string
	file unix.Stat_t
}

// Take opens the files of the run folder. They are closed by Close, also after an error.
type Take []Taken

// Open takes every file from the run folder, whose descriptor run is.
func Open(run int, list []File) (all Take, err error) {
	defer func() {
		if err != nil {
			all.Close()
			all = nil
		}
	}()
	for _, f := range list {
		one, err := open(run, f)
		if err != nil {
			return all, fmt.Errorf("file %s of the run folder: %w", f.From, err)
		}
		all = append(all, one)
	}
	return all, nil
}

func open(run int, f File) (Taken, error) {
	t := Taken{fd: -1, to: f.To}
	var err error
	if t.fd, err = unix.OpenTree(run, f.From, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return t, err
	}
	if err = unix.Fstat(t.fd, &t.file); err == nil && t.file.Mode&unix.S_IFMT != unix.S_IFREG {
		err = errors.New("it is no regular file")
	}
	if err != nil {
		_ = unix.Close(t.fd)
		return t, err
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if err := unix.MountSetattr(t.fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		_ = unix.Close(t.fd)
		return t, fmt.Errorf("make its copy read-only: %w", err)
	}
	return t, nil
}

// Close drops what was not put anywhere.
func (t Take) Close() {
	for _, one := range t {
		_ = unix.Close(one.fd)
	}
}

// Root is where files are laid over others.
type Root struct {
	FD int // of its top folder
	// Follow: a link at a path's end is followed, for kernels that mount nothing over a link.
	Follow bool
	// Owner is the user and group that makes a missing Resolver, where that is not root.
	Owner int
}

// Put lays the files over those of the root. The process is in the table of mounts that the root is in.
func (r Root) Put(all Take) error {
	for _, one := range all {
		if err := r.put(one); err != nil {
			return fmt.Errorf("lay a file over %s: %w", one.to, err)
		}
	}
	return nil
}

func (r Root) put(t Taken) error {
	fd, _, err := r.Find(t.to)
	if errors.Is(err, ErrNone) && t.to == Resolver {
		fd, err = r.makeResolver()
	}
	if errors.Is(err, ErrNone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Dev == t.file.Dev && st.Ino == t.file.Ino {
		return nil // it lies there
	}
	return unix.MoveMount(t.fd, "", fd, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// makeResolver makes an empty file, unless there is anything of its name.
func (r Root) makeResolver() (int, error) {
	dir, name := Resolver[:strings.LastIndexByte(Resolver, '/')], Resolver[strings.LastIndexByte(Resolver, '/')+1:]
	at, err := r.folder(dir)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(at) }()
	if err := unix.Fstatat(at, name, &unix.Stat_t{}, unix.AT_SYMLINK_NOFOLLOW); !errors.Is(err, unix.ENOENT) {
		return -1, ErrNone // a folder, or a link that leads nowhere
	}
	if r.Owner != 0 {
		defer func() { _, _ = unix.SetfsuidRetUid(0); _, _ = unix.SetfsgidRetGid(0) }()
		if _, err := unix.SetfsgidRetGid(r.Owner); err != nil {
			return -1, err
		}
		if _, err := unix.SetfsuidRetUid(r.Owner); err != nil {
			return -1, err
		}
	}
	fd, err := unix.Openat(at, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return -1, fmt.Errorf("make it: %w", err)
	}
	_ = unix.Close(fd)
	return unix.Openat(at, name, lookup, 0)
}

// Find opens the file that a path means within the root file system, by looking at one name after the other,
// so that no kernel's idea of a path matters, and says where it is, without links. ErrNone if there is
// none, or something that is neither a file nor, where links are not followed, a link.
func (r Root) Find(path string) (fd int, real string, err error) {
	w := walk{root: r.FD, follow: r.Follow}
	defer w.close()
	return w.find(path)
}

// folder opens a folder of the root file system.
func (r Root) folder(path string) (int, error) {
	w := walk{root: r.FD, follow: true}
	defer w.close()
	if _, _, err := w.find(path); !errors.Is(err, errFolder) {
		return -1, errors.Join(err, ErrNone)
	}
	return unix.Openat(w.at(), ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

// errFolder: the walk ended in a folder.
var errFolder = fmt.Errorf("%w: a folder", ErrNone)

// walk is one way through the root.
type walk struct {
	root   int
	follow bool
	fds    []int    // of the folders below the root that it is in
	names  []string // of these
	dev    uint64
	links  int
}

func (w *walk) at() int {
	if n := len(w.fds); n > 0 {
		return w.fds[n-1]
	}
	return w.root
}

// up leaves the last n folders.
func (w *walk) up(n int) {
	for ; n > 0 && len(w.fds) > 0; n-- {
		_ = unix.Close(w.at())
		w.fds, w.names = w.fds[:len(w.fds)-1], w.names[:len(w.names)-1]
	}
}

func (w *walk) close() { w.up(len(w.fds)) }

func (w *walk) find(path string) (int, string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(w.root, &st); err != nil {
		return -1, "", err
	}
	w.dev = st.Dev
	todo := split(path)
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		if name == ".." {
			w.up(1)
			continue
		}
		fd, err := unix.Openat(w.at(), name, lookup, 0)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENAMETOOLONG) {
			return -1, "", ErrNone
		}
		if err != nil {
			return -1, "", err
		}
		more, done, err := w.step(fd, name, len(todo) == 0)
		if done {
			return fd, "/" + strings.Join(append(w.names, name), "/"), nil
		}
		if err != nil {
			return -1, "", err
		}
		todo = append(more, todo...)
	}
	return -1, "", errFolder
}

// step goes on from what was opened: into a folder, along a link, or no further. It closes fd, or keeps it as the
// folder that the walk is in, unless the walk is done.
func (w *walk) step(fd int, name string, last bool) (more []string, done bool, err error) {
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	switch kind := st.Mode & unix.S_IFMT; {
	case err != nil:
	case kind == unix.S_IFDIR && st.Dev == w.dev:
		w.fds, w.names = append(w.fds, fd), append(w.names, name)
		return nil, false, nil
	case last && (kind == unix.S_IFREG || kind == unix.S_IFLNK && !w.follow):
		return nil, true, nil
	case kind == unix.S_IFLNK && w.links < maxLinks:
		w.links++
		var target string
		if target, err = readlink(w.at(), name); err == nil {
			if strings.HasPrefix(target, "/") {
				w.up(len(w.fds))
			}
			more = split(target)
		}
	default:
		err = ErrNone
	}
	_ = unix.Close(fd)
	return more, false, err
}

func readlink(at int, name string) (string, error) {
	b := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(at, name, b)
	if err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

func split(path string) (out []string) {
	for name := range strings.SplitSeq(path, "/") {
		if name != "" && name != "." {
			out = append(out, name)
		}
	}
	return out
}

// Folder opens a folder of this process's own files, to be a Root or the run folder.
func Folder(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Places says where the files of a list would lie, without links, for whoever lays them there by other means: what
// has no place is left out, and of those that have the same one the first.
func (r Root) Places(list []File) (out []File, err error) {
	seen := map[string]bool{}
	for _, f := range list {
		fd, real, err := r.Find(f.To)
		if errors.Is(err, ErrNone) && f.To == Resolver {
			if fd, err = r.makeResolver(); err == nil {
				_ = unix.Close(fd)
				fd, real, err = r.Find(f.To)
			}
		}
		if errors.Is(err, ErrNone) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look for %s: %w", f.To, err)
		}
		_ = unix.Close(fd)
		if !seen[real] {
			seen[real] = true
			out = append(out, File{From: f.From, To: real})
		}
	}
	return out, nil
}
