// Package unpack takes the files of a tar archive into a directory of a sandbox. It runs in the
// guest agent, as root of the sandbox, on archives that anybody may have made.
//
// It guarantees that
//
//   - nothing is written, removed or changed outside the directory: every name is walked component
//     by component with its links resolved as if the directory were the root, so that neither a link
//     in the archive nor one that was there already leads out;
//   - a file is replaced as a whole: whoever reads it sees the old or the new one;
//   - memory is bounded, whatever the archive says: one entry's header (at most 1 MiB) and the
//     directories above it are held, nothing more;
//   - it never blocks on what it finds: FIFOs and devices are neither opened nor made;
//   - an archive without its end mark is an error: what was cut off is not taken for whole.
//
// An error leaves the entries before it in place; taking the same archive again is right.
//
// A name .wh.<name> removes <name>, as in layers of the OCI image specification; .wh..wh..opq
// removes what is in its directory at that point of the archive. Runs of zeros become holes.
package unpack

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// Stats say what was taken.
type Stats struct {
	// Bytes of the archive.
	Bytes uint64
	// Entries: files, directories, links and removals.
	Entries uint64
	// Skipped entries; Names are the first of them, each with the reason.
	Skipped uint64
	Names   []string
	// Attributes: owners, modes, times and extended attributes that could not be set.
	Attributes uint64
}

// Bounds of what an archive may name.
const (
	maxPath     = 4095
	maxName     = 255
	maxTold     = 20
	maxToldName = 200
)

// ErrArchive is the kind of error for which the archive itself is to blame.
var ErrArchive = errors.New("the archive cannot be taken")

func badArchive(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrArchive, fmt.Sprintf(format, args...))
}

// system are the directories of a sandbox's root that are not the session's files.
var system = map[string]bool{"proc": true, "sys": true, "dev": true, "run": true}

const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
	special  = ".wh..wh."
)

// syncfs is the kernel's; a fuzz test has no time for it.
var syncfs = unix.Syncfs

// unpacker is one archive under way.
type unpacker struct {
	ctx    context.Context
	in     *source
	root   *os.File
	isRoot bool // of the sandbox
	stats  Stats
	open   []entered // directories whose attributes are set once what they hold is there
	at     *place    // the directory of the last entry
	atName string
	buf    [64 << 10]byte
	zero   [64 << 10]byte
}

// Into takes the archive in r into the directory dir, and syncs the file system before it returns
// without an error. dir may be a link; it must exist. Errors wrap ErrArchive, a unix.Errno (ENOSPC
// when the disk is full), or the error of r or ctx.
func Into(ctx context.Context, dir string, r io.Reader) (Stats, error) {
	root, err := os.OpenFile(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Stats{}, err
	}
	defer root.Close()
	isRoot, err := sameFile(root, "/")
	if err != nil {
		return Stats{}, err
	}
	return into(ctx, root, isRoot, r)
}

func into(ctx context.Context, root *os.File, isRoot bool, r io.Reader) (Stats, error) {
	u := &unpacker{ctx: ctx, root: root, isRoot: isRoot, in: &source{r: r, ctx: ctx}}
	defer u.forget()
	err := u.all()
	if lerr := u.leave(""); err == nil {
		err = lerr
	}
	if err == nil {
		err = syncfs(int(root.Fd()))
	}
	u.stats.Bytes = u.in.n
	return u.stats, err
}

func sameFile(f *os.File, path string) (bool, error) {
	var a, b unix.Stat_t
	if err := errors.Join(unix.Fstat(int(f.Fd()), &a), unix.Stat(path, &b)); err != nil {
		return false, err
	}
	return a.Dev == b.Dev && a.Ino == b.Ino, nil
}

// all takes every entry, then the rest of the stream.
func (u *unpacker) all() error {
	if err := u.in.sniff(); err != nil {
		return err
	}
	r := tar.NewReader(u.in)
	for {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return u.in.blame(err, "it is no tar archive, or it is damaged")
		}
		if err := u.entry(h, r); err != nil {
			return err
		}
	}
	if !u.in.ended() {
		return badArchive("it ends without its end mark, so it was cut off")
	}
	return u.rest()
}

// rest reads what follows the end mark, which is nothing but padding.
func (u *unpacker) rest() error {
	told := false
	for {
		n, err := u.in.Read(u.buf[:])
		if !told && !bytes.Equal(u.buf[:n], u.zero[:n]) {
			told = true
			_ = u.skip("the rest of the stream", "it follows the end mark of the archive")
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// skip counts an entry that is left out.
func (u *unpacker) skip(name, why string) error {
	u.stats.Skipped++
	if len(u.stats.Names) < maxTold {
		if len(name) > maxToldName {
			name = name[:maxToldName] + "..."
		}
		u.stats.Names = append(u.stats.Names, name+": "+why)
	}
	return nil
}

// entry takes one entry.
func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeGNUSparse, tar.TypeCont:
	case tar.TypeXGlobalHeader:
		return nil
	default:
		return u.skip(h.Name, "it is neither a file, a directory nor a link")
	}
	name, why := clean(h.Name)
	if why != "" {
		return u.skip(h.Name, why)
	}
	if err := u.leave(name); err != nil {
		return err
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return u.skip(h.Name, "it is the directory itself")
		}
		return nil // the directory was there before; its attributes are its own
	}
	dir, base := path.Split(name)
	in, err := u.enter(dir, !strings.HasPrefix(base, whiteout))
	if err != nil {
		return u.walkFailed(h.Name, err)
	}
	if u.isRoot && system[first(in.names, base)] {
		return u.skip(h.Name, "it is not one of the session's own files")
	}
	u.stats.Entries++
	err = u.place(in, base, name, h, r)
	if errors.Is(err, unix.EBUSY) {
		u.stats.Entries--
		return u.skip(h.Name, "something is mounted there")
	}
	if err != nil {
		return fmt.Errorf("%.200q: %w", h.Name, err)
	}
	return nil
}

// walkFailed says what a directory that cannot be entered means: a full disk and its like end the
// import, a name that cannot be is left out.
func (u *unpacker) walkFailed(name string, err error) error {
	switch {
	case errors.Is(err, errSystem):
		return u.skip(name, "it is not one of the session's own files")
	case errors.Is(err, unix.ENOENT):
		return nil // a removal of what is not there
	case errors.Is(err, unix.ELOOP):
		return u.skip(name, "its links lead in a circle")
	case errors.Is(err, unix.ENOTDIR):
		return u.skip(name, "a part of its path is no directory")
	case errors.Is(err, unix.ENAMETOOLONG):
		return u.skip(name, "a link in its path is too long")
	}
	return fmt.Errorf("%.200q: %w", name, err)
}

func first(names []string, base string) string {
	if len(names) > 0 {
		return names[0]
	}
	return base
}

// place puts an entry into its directory.
func (u *unpacker) place(in *place, base, name string, h *tar.Header, r io.Reader) error {
	if strings.HasPrefix(base, whiteout) {
		return u.removal(in, base)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.directory(in, base, name, h)
	case tar.TypeSymlink:
		return u.symlink(in, base, h)
	case tar.TypeLink:
		return u.link(in, base, h)
	}
	return u.file(in, base, h, r)
}

// removal is an entry of the layer format.
func (u *unpacker) removal(in *place, base string) error {
	gone := strings.TrimPrefix(base, whiteout)
	switch {
	case base == opaque:
		return u.empty(in)
	case strings.HasPrefix(base, special) || gone == "" || gone == "." || gone == "..":
		u.stats.Entries--
		return u.skip(base, "it is no removal that is known")
	case u.isRoot && system[first(in.names, gone)]:
		u.stats.Entries--
		return u.skip(base, "it would remove what is not one of the session's own files")
	}
	return u.remove(in.fd(), gone, 0)
}

// clean makes a name of an archive relative and plain, or says why it cannot be.
func clean(name string) (string, string) {
	if strings.IndexByte(name, 0) >= 0 {
		return "", "its name holds a zero byte"
	}
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "..":
			return "", "its name leads upward"
		case len(part) > maxName:
			return "", "a part of its name is longer than 255 bytes"
		}
	}
	name = strings.TrimLeft(path.Clean("/"+name), "/")
	if len(name) > maxPath {
		return "", "its name is longer than 4095 bytes"
	}
	if name == "" {
		name = "."
	}
	return name, ""
}

// source reads the archive, counts it and remembers its end.
type source struct {
	r    io.Reader
	ctx  context.Context
	n    uint64
	head []byte // read and not handed out
	tail [512]byte
	err  error // of r, but io.EOF
}

// sniff says in words what is no tar archive but often taken for one.
func (s *source) sniff() error {
	head := make([]byte, 512)
	n, err := io.ReadFull(s.r, head)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		s.err = err
		return err
	}
	s.head = head[:n]
	for magic, what := range map[string]string{"\x1f\x8b": "gzip", "\x28\xb5\x2f\xfd": "zstd", "BZh": "bzip2", "\xfd7zXZ": "xz", "PK\x03\x04": "zip"} {
		if bytes.HasPrefix(s.head, []byte(magic)) && !bytes.Contains(s.head, []byte("ustar")) {
			return badArchive("it is compressed or packed with %s; unpack it to plain tar first", what)
		}
	}
	if n < 512 {
		return badArchive("it has %d bytes, which is no tar archive", n)
	}
	return nil
}

// Read implements io.Reader.
func (s *source) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		return 0, err
	}
	var n int
	var err error
	if len(s.head) > 0 {
		n = copy(p, s.head)
		s.head = s.head[n:]
	} else {
		n, err = s.r.Read(p)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	s.n += uint64(n)
	if n >= len(s.tail) {
		copy(s.tail[:], p[n-len(s.tail):n])
	} else if n > 0 {
		copy(s.tail[:], s.tail[n:])
		copy(s.tail[len(s.tail)-n:], p[:n])
	}
	return n, err
}

// ended reports whether what was read last is the end mark.
func (s *source) ended() bool { return s.n >= 512 && s.n%512 == 0 && s.tail == [512]byte{} }

// blame gives an error of reading to who caused it: the stream, or the archive.
func (s *source) blame(err error, what string) error {
	if s.err != nil {
		return s.err
	}
	if cerr := s.ctx.Err(); cerr != nil {
		return cerr
	}
	return badArchive("%s (%v)", what, err)
}
