package layer

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/beneath"
)

// maxPath is the longest name that an archive's reader could open.
const maxPath = 4095

// dir is a directory that is being read. It is closed while deeper ones are read if there are many,
// and goes on after the cookie of the entry that was read last.
type dir struct {
	path   string // "" for the root
	f      *os.File
	cookie int64
	buf    []byte // entries that were read and not handed out
}

const direntBytes = 16 << 10

// walk writes every entry below the root, a directory before what it holds.
func (a *archive) walk() error {
	// On the disk these hold nothing of the session: something is mounted on them while it is awake.
	mountPoints := map[string]bool{"dev": true, "proc": true, "run": true, "sys": true}
	stack := []*dir{{}}
	defer func() {
		for _, d := range stack {
			d.close()
		}
	}()
	for len(stack) > 0 {
		if err := a.ctx.Err(); err != nil {
			return err
		}
		d := stack[len(stack)-1]
		name, err := d.next(a.root)
		if a.gone(err) {
			name, err = "", nil
		}
		if err != nil {
			return fmt.Errorf("read directory %.200q: %w", "/"+d.path, err)
		}
		if name == "" {
			d.close()
			stack = stack[:len(stack)-1]
			continue
		}
		if len(stack) == 1 && mountPoints[name] {
			continue
		}
		below, err := a.entry(d, name)
		if err != nil {
			return err
		}
		if below == nil {
			continue
		}
		if len(stack) >= a.limits.OpenDirs {
			d.rest()
		}
		stack = append(stack, below)
	}
	return nil
}

// next returns the next name of the directory, "" after the last.
func (d *dir) next(root *os.File) (string, error) {
	for {
		if len(d.buf) == 0 {
			if err := d.fill(root); err != nil || len(d.buf) == 0 {
				return "", err
			}
		}
		// struct linux_dirent64: ino 8, off 8, reclen 2, type 1, name, NUL.
		reclen := int(binary.NativeEndian.Uint16(d.buf[16:18]))
		name := d.buf[19:reclen]
		if i := bytes.IndexByte(name, 0); i >= 0 {
			name = name[:i]
		}
		d.cookie = int64(binary.NativeEndian.Uint64(d.buf[8:16]))
		d.buf = d.buf[reclen:]
		if s := string(name); s != "." && s != ".." && s != "" {
			return s, nil
		}
	}
}

func (d *dir) fill(root *os.File) error {
	if err := d.open(root); err != nil {
		return err
	}
	buf := make([]byte, direntBytes)
	for {
		n, err := unix.Getdents(int(d.f.Fd()), buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		d.buf = buf[:n]
		return nil
	}
}

// open opens the directory where it was left.
func (d *dir) open(root *os.File) error {
	if d.f != nil {
		return nil
	}
	path := d.path
	if path == "" {
		path = "."
	}
	f, err := beneath.Open(root, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	d.f = f
	if d.cookie != 0 {
		_, err = unix.Seek(int(f.Fd()), d.cookie, unix.SEEK_SET)
	}
	return err
}

// rest gives back what the directory holds; it goes on where it stopped.
func (d *dir) rest() {
	d.close()
	d.buf = nil
}

func (d *dir) close() {
	if d.f != nil {
		_ = d.f.Close()
		d.f = nil
	}
}

// entry writes one name of a directory; for a directory it returns it, to be read next.
func (a *archive) entry(d *dir, name string) (*dir, error) {
	path := name
	if d.path != "" {
		path = d.path + "/" + name
	}
	switch {
	case len(path) > maxPath:
		a.stats.skip(path, "the path is longer than 4095 bytes")
		return nil, nil
	case strings.HasPrefix(name, whiteout):
		a.stats.skip(path, "in an archive such a name means a removal")
		return nil, nil
	}
	if err := d.open(a.root); err != nil {
		if a.gone(err) {
			return nil, nil
		}
		return nil, err
	}
	f, err := beneath.Open(d.f, name, unix.O_PATH, 0)
	if a.gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at %.200q: %w", path, err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return a.directory(d, name, path)
	case unix.S_IFREG:
		return nil, a.file(d, name, path)
	case unix.S_IFLNK:
		return nil, a.symlink(f, path, &st)
	case unix.S_IFCHR:
		if st.Rdev == 0 { // overlay's mark of a removal
			return nil, a.remove(join(d.path, whiteout+name), &st)
		}
	}
	a.stats.skip(path, "it is neither a file, a directory nor a link")
	return nil, nil
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

func (a *archive) directory(d *dir, name, path string) (*dir, error) {
	f, err := beneath.Open(d.f, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if a.gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	below := &dir{path: path, f: f}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		below.close()
		return nil, fmt.Errorf("look at %.200q: %w", path, err)
	}
	h := headerOf(path+"/", &st)
	h.Typeflag = tar.TypeDir
	err = a.attributes(f, h)
	if err == nil {
		err = a.header(h)
	}
	if err == nil && marked(f, "opaque", "y") {
		err = a.remove(join(path, opaque), &st)
	}
	if err != nil {
		below.close()
		return nil, err
	}
	return below, nil
}

func (a *archive) symlink(f *os.File, path string, st *unix.Stat_t) error {
	buf := a.buf[:unix.PathMax+1]
	n, err := unix.Readlinkat(int(f.Fd()), "", buf)
	if err != nil {
		return fmt.Errorf("read the link %.200q: %w", path, err)
	}
	if first := a.linkTo(path, st); first != "" {
		return a.header(&tar.Header{Typeflag: tar.TypeLink, Name: path, Linkname: first, ModTime: modTime(st)})
	}
	h := headerOf(path, st)
	h.Typeflag, h.Linkname = tar.TypeSymlink, string(buf[:n])
	return a.header(h)
}

// headerOf describes a file but for its kind.
func headerOf(path string, st *unix.Stat_t) *tar.Header {
	h := &tar.Header{Name: path, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid), ModTime: modTime(st)}
	if !utf8.ValidString(path) {
		h.PAXRecords = map[string]string{"hdrcharset": "BINARY"}
	}
	return h
}

func modTime(st *unix.Stat_t) time.Time { return time.Unix(st.Mtim.Sec, st.Mtim.Nsec) }
