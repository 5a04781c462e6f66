package unpack

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// entered is a directory of the archive: what is written into it changes its time, so mode and time
// are set when it is left.
type entered struct {
	name     string
	dev, ino uint64
	mode     uint32
	when     time.Time
}

// leave ends the directories that name is not below.
func (u *unpacker) leave(name string) error {
	for n := len(u.open); n > 0; n = len(u.open) {
		top := u.open[n-1]
		if strings.HasPrefix(name, top.name+"/") {
			return nil
		}
		u.open = u.open[:n-1]
		if err := u.finish(top); err != nil {
			return err
		}
	}
	return nil
}

// finish sets mode and time of a directory, if its name still is that directory.
func (u *unpacker) finish(d entered) error {
	dir, base := path.Split(d.name)
	in, err := u.walk(dir, false)
	if err != nil {
		return nil //nolint:nilerr // the archive has put something else there
	}
	defer in.close()
	f, err := openDir(in.fd(), base)
	if err != nil {
		return nil //nolint:nilerr // the same
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Dev != d.dev || st.Ino != d.ino {
		return nil
	}
	if err := u.try(unix.Fchmod(int(f.Fd()), d.mode)); err != nil {
		return err
	}
	return u.times(in.fd(), base, d.when)
}

func (u *unpacker) directory(in *place, base, name string, h *tar.Header) error {
	var st unix.Stat_t
	err := unix.Fstatat(in.fd(), base, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if err := unix.Unlinkat(in.fd(), base, 0); err != nil {
			return err
		}
		err = unix.ENOENT
	}
	if errors.Is(err, unix.ENOENT) {
		err = unix.Mkdirat(in.fd(), base, 0o700|uint32(h.Mode)&0o777)
	}
	if err != nil {
		return err
	}
	f, err := openDir(in.fd(), base)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	mode, err := u.owner(f, h)
	if err == nil {
		err = u.attributes(f, h)
	}
	u.open = append(u.open, entered{name, st.Dev, st.Ino, mode, h.ModTime})
	return err
}

// temp is a name beside the one that is to be replaced.
func temp() string {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails, see crypto/rand
	return ".berth-import-" + hex.EncodeToString(random[:]) + ".tmp"
}

// replace gives what was made under a temporary name its own; on failure it is removed.
func (u *unpacker) replace(in *place, from, base string) error {
	err := unix.Renameat(in.fd(), from, in.fd(), base)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		if err = u.remove(in.fd(), base, 0); err == nil {
			err = unix.Renameat(in.fd(), from, in.fd(), base)
		}
	}
	// Of two names of one file a rename leaves both; else there is nothing to remove.
	_ = unix.Unlinkat(in.fd(), from, 0)
	return err
}

func (u *unpacker) file(in *place, base string, h *tar.Header, r io.Reader) error {
	name := temp()
	fd, err := unix.Openat(in.fd(), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	err = u.fill(f, h, r)
	if err == nil {
		err = u.fileAttributes(f, h)
	}
	if err == nil {
		err = u.times(in.fd(), name, h.ModTime)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = unix.Unlinkat(in.fd(), name, 0)
		return err
	}
	return u.replace(in, name, base)
}

// fill writes the content; runs of zeros become holes.
func (u *unpacker) fill(f *os.File, h *tar.Header, r io.Reader) error {
	at := int64(0)
	for {
		if err := u.ctx.Err(); err != nil { // a hole is read without reading the stream
			return err
		}
		n, err := io.ReadFull(r, u.buf[:])
		if n > 0 && !bytes.Equal(u.buf[:n], u.zero[:n]) {
			if _, werr := f.WriteAt(u.buf[:n], at); werr != nil {
				return werr
			}
		}
		at += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) && at == h.Size {
			return f.Truncate(at)
		}
		if err != nil {
			return u.in.blame(err, "a file in it is cut off")
		}
	}
}

func (u *unpacker) symlink(in *place, base string, h *tar.Header) error {
	if h.Linkname == "" || len(h.Linkname) > maxPath || strings.IndexByte(h.Linkname, 0) >= 0 {
		u.stats.Entries--
		return u.skip(h.Name, "what it links to is no path")
	}
	name := temp()
	if err := unix.Symlinkat(h.Linkname, in.fd(), name); err != nil {
		return err
	}
	err := u.linkAttributes(in, name, h)
	if err != nil {
		_ = unix.Unlinkat(in.fd(), name, 0)
		return err
	}
	return u.replace(in, name, base)
}

func (u *unpacker) linkAttributes(in *place, name string, h *tar.Header) error {
	if uid, gid, ok := ids(h); !ok {
		u.stats.Attributes++
	} else if err := u.try(unix.Fchownat(in.fd(), name, uid, gid, unix.AT_SYMLINK_NOFOLLOW)); err != nil {
		return err
	}
	return u.times(in.fd(), name, h.ModTime)
}

// link makes a further name of a file.
func (u *unpacker) link(in *place, base string, h *tar.Header) error {
	target, why := clean(h.Linkname)
	if why == "" && target == "." {
		why = "it links to a directory"
	}
	if why != "" {
		u.stats.Entries--
		return u.skip(h.Name, why)
	}
	dir, tbase := path.Split(target)
	from, err := u.walk(dir, false)
	if err == nil {
		defer from.close()
		if u.isRoot && system[first(from.names, tbase)] {
			err = errSystem
		}
	}
	name := temp()
	if err == nil {
		err = unix.Linkat(from.fd(), tbase, in.fd(), name, 0)
	}
	if slices.ContainsFunc([]error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EPERM, unix.EXDEV, unix.EMLINK, unix.ENAMETOOLONG, errSystem},
		func(e error) bool { return errors.Is(err, e) }) {
		u.stats.Entries--
		return u.skip(h.Name, "it cannot be linked to "+target)
	}
	if err != nil {
		return err
	}
	return u.replace(in, name, base)
}

// fileAttributes sets what belongs to the file but its time.
func (u *unpacker) fileAttributes(f *os.File, h *tar.Header) error {
	mode, err := u.owner(f, h)
	if err != nil {
		return err
	}
	if err := u.attributes(f, h); err != nil {
		return err
	}
	return u.try(unix.Fchmod(int(f.Fd()), mode))
}

// owner sets the owner and returns the mode that may be set then: without it nobody's program gets
// somebody else's rights.
func (u *unpacker) owner(f *os.File, h *tar.Header) (mode uint32, err error) {
	mode = uint32(h.Mode) & 0o7777
	uid, gid, ok := ids(h)
	if ok {
		err = unix.Fchown(int(f.Fd()), uid, gid)
	}
	if !ok || err != nil {
		mode &^= unix.S_ISUID | unix.S_ISGID
	}
	if !ok {
		u.stats.Attributes++
	}
	return mode, u.try(err)
}

// ids are the owner of an entry; -1 would mean no change.
func ids(h *tar.Header) (uid, gid int, ok bool) {
	const most = 1<<32 - 2
	return h.Uid, h.Gid, h.Uid >= 0 && h.Gid >= 0 && h.Uid <= most && h.Gid <= most
}

const xattrKey = "SCHILY.xattr."

// attributes sets the extended attributes of users, and those that say what a program may.
func (u *unpacker) attributes(f *os.File, h *tar.Header) error {
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrKey)
		if !ok {
			continue
		}
		if !strings.HasPrefix(name, "user.") && name != "security.capability" || strings.HasPrefix(name, "user.overlay.") || strings.IndexByte(name, 0) >= 0 {
			u.stats.Attributes++
			continue
		}
		if err := u.try(unix.Fsetxattr(int(f.Fd()), name, []byte(value), 0)); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacker) times(at int, name string, when time.Time) error {
	ts, err := unix.TimeToTimespec(when)
	if err != nil {
		u.stats.Attributes++
		return nil //nolint:nilerr // a time that no file can have
	}
	return u.try(unix.UtimesNanoAt(at, name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
}

// try counts an attribute that may not be set here; other errors are returned.
func (u *unpacker) try(err error) error {
	for _, e := range []error{unix.EPERM, unix.EACCES, unix.EINVAL, unix.ENOTSUP, unix.ENOSYS, unix.ERANGE, unix.E2BIG, unix.EOVERFLOW} {
		if errors.Is(err, e) {
			u.stats.Attributes++
			return nil
		}
	}
	return err
}
