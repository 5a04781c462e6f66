package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/beneath"
)

// Bounds of the extended attributes of one entry: what an archive's reader takes as a header.
const (
	maxAttrList  = 64 << 10
	maxAttrBytes = 256 << 10
	xattrKey     = "SCHILY.xattr."
	overlayAttr  = "user.overlay."
)

// marked reports whether overlay noted such a mark at an open file.
func marked(f *os.File, mark, value string) bool {
	var buf [8]byte
	n, err := unix.Fgetxattr(int(f.Fd()), overlayAttr+mark, buf[:])
	return err == nil && (value == "" || string(buf[:n]) == value)
}

// attributes puts the user's attributes of an open file into its header, but for those of overlay.
// Those of other name spaces are not the session's.
func (a *archive) attributes(f *os.File, h *tar.Header) error {
	list, value := a.buf[:maxAttrList], a.value[:]
	n, err := unix.Flistxattr(int(f.Fd()), list)
	switch {
	case errors.Is(err, unix.ENOTSUP):
		return nil
	case errors.Is(err, unix.ERANGE) || errors.Is(err, unix.E2BIG):
		a.stats.Attributes++
		return nil
	case err != nil:
		return fmt.Errorf("list attributes of %.200q: %w", h.Name, err)
	}
	total := 0
	for name := range bytes.SplitSeq(list[:n], []byte{0}) {
		key := string(name)
		if !strings.HasPrefix(key, "user.") || strings.HasPrefix(key, overlayAttr) {
			continue
		}
		n, err := unix.Fgetxattr(int(f.Fd()), key, value)
		if err != nil && !errors.Is(err, unix.ERANGE) {
			return fmt.Errorf("read attribute %.100q of %.200q: %w", key, h.Name, err)
		}
		if total += len(key) + n; err != nil || strings.Contains(key, "=") || total > maxAttrBytes {
			a.stats.Attributes++
			continue
		}
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[xattrKey+key] = string(value[:n])
	}
	return nil
}

// file writes a regular file.
func (a *archive) file(d *dir, name, path string) error {
	f, err := beneath.Open(d.f, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if a.gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("look at %.200q: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		a.stats.skip(path, "it changed while it was read")
		return nil
	}
	h := headerOf(path, &st)
	h.Typeflag, h.Size = tar.TypeReg, st.Size
	if st.Size == 0 && marked(f, "whiteout", "") {
		return a.remove(join(d.path, whiteout+name), &st)
	}
	if first := a.linkTo(path, &st); first != "" {
		return a.header(&tar.Header{Typeflag: tar.TypeLink, Name: path, Linkname: first, ModTime: modTime(&st)})
	}
	if err := a.attributes(f, h); err != nil {
		return err
	}
	if st.Size-st.Blocks*512 >= worthwhile {
		parts, err := a.data(f, st.Size)
		if err != nil {
			return fmt.Errorf("look for holes in %.200q: %w", path, err)
		}
		return a.sparse(f, h, parts)
	}
	if err := a.header(h); err != nil {
		return err
	}
	return a.copy(a.tar, f, path, part{0, st.Size})
}

// copy copies a range of a file. A file that ends early is an error, unless it may change: then the rest
// is zeros, as its header said already how long it is.
func (a *archive) copy(w io.Writer, f *os.File, path string, p part) error {
	for left := p.len; left > 0; {
		n, err := f.ReadAt(a.buf[:min(left, int64(len(a.buf)))], p.off)
		if n > 0 {
			if _, werr := w.Write(a.buf[:n]); werr != nil {
				return werr
			}
			p.off, left = p.off+int64(n), left-int64(n)
			continue
		}
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
			if a.limits.Live {
				a.stats.skip(path, "it became shorter while it was read, so that its end is zeros")
				return zeros(w, left)
			}
		}
		return fmt.Errorf("read %.200q: %w", path, err)
	}
	return nil
}

// zeros writes n of them.
func zeros(w io.Writer, n int64) error {
	buf := make([]byte, 32<<10)
	for n > 0 {
		m, err := w.Write(buf[:min(n, int64(len(buf)))])
		if err != nil {
			return err
		}
		n -= int64(m)
	}
	return nil
}

// gone says that a name went away, or became something else, since it was read, which is right where
// files are in use.
func (a *archive) gone(err error) bool {
	return a.limits.Live && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP))
}
