// Package layer writes what a session changed on top of its image, the upper directory of its
// overlay, as a tar archive in the layer format of the OCI image specification.
//
// It guarantees that
//
//   - nothing outside the directory is read, whatever the session put there: each name is opened
//     beneath it, no symbolic link is followed, and nothing but regular files and directories is
//     opened for reading;
//   - memory is bounded, whatever the session made: directories are read as they are written, names
//     of hard links are kept up to a bound (beyond it a file is written whole once more), holes of
//     sparse files up to a number (beyond it the smallest are written as zeros);
//   - a file that cannot be described in an archive is counted and named, never left out in silence;
//   - an error or the end of the context ends the archive without its end mark, so that no reader
//     takes it for a whole one.
//
// Sparse files are written in the PAX sparse format 1.0, which GNU tar, libarchive and Go read: a
// hole costs its reader nothing. An archive without that would be as long as the session says its
// files are, which costs the session nothing at all.
//
// The directory must be at rest, such as a read-only view of a snapshot, or Limits.Live says that it is
// not: then each file is as it was at some time of the walk, what went away meanwhile is left out, and a
// file that became shorter ends in zeros. Owners are written as they
// are on the disk, which is as the session sees them.
package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const op = "export files"

// Names that stand for a removal in the layer format.
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// Limits bound an export. Zero values mean the defaults.
type Limits struct {
	// Entries is the most that an archive may hold; more is an error of kind Exhausted. Default: no bound
	// but the disk's own number of files.
	Entries uint64
	// LinkBytes bounds the names that are remembered of files with several names. Default 16 MiB.
	LinkBytes int
	// Holes bounds the data ranges of one sparse file. Default 8192.
	Holes int
	// OpenDirs is how many directories of one path are open at once. Default 64.
	OpenDirs int
	// Live: the directory is written to meanwhile.
	Live bool
}

func (l Limits) withDefaults() Limits {
	if l.LinkBytes <= 0 {
		l.LinkBytes = 16 << 20
	}
	if l.Holes <= 0 || l.Holes > maxHoles {
		l.Holes = maxHoles
	}
	if l.OpenDirs <= 0 {
		l.OpenDirs = 64
	}
	return l
}

// Stats say what an archive holds.
type Stats struct {
	// Bytes of the archive.
	Bytes uint64
	// Entries: files, directories, links and removals.
	Entries uint64
	// Skipped counts what was left out, SkippedNames are the first of it, each with the reason.
	Skipped      uint64
	SkippedNames []string
	// Attributes counts extended attributes that an archive cannot hold.
	Attributes uint64
}

// maxNames is how many skipped names are told, and maxNameTold how much of each.
const (
	maxNames    = 20
	maxNameTold = 200
)

// skip counts what is left out.
func (s *Stats) skip(name, why string) {
	s.Skipped++
	if len(s.SkippedNames) < maxNames {
		if len(name) > maxNameTold {
			name = name[:maxNameTold] + "..."
		}
		s.SkippedNames = append(s.SkippedNames, name+": "+why)
	}
}

// Write writes the directory upper to w. It owns neither. The caller may wrap w in a buffer: pieces
// are as small as 512 bytes. Errors: Canceled or Deadline when ctx ends, Exhausted above a limit,
// Internal when the disk cannot be read; an error of w is wrapped.
func Write(ctx context.Context, w io.Writer, upper *os.File, limits Limits) (Stats, error) {
	out := &counted{ctx: ctx, w: w}
	a := &archive{ctx: ctx, out: out, tar: tar.NewWriter(out), root: upper, limits: limits.withDefaults(), links: map[inode]*linked{}}
	err := a.walk()
	if err == nil {
		err = a.tar.Close()
	}
	a.stats.Bytes = out.n
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if known := (*errs.Error)(nil); err != nil && !errors.As(err, &known) {
		err = errs.Wrap(op, "", err)
	}
	return a.stats, err
}

// counted counts what is written and stops with its context.
type counted struct {
	ctx context.Context
	w   io.Writer
	n   uint64
}

func (c *counted) Write(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.w.Write(p)
	c.n += uint64(n)
	return n, err
}

type archive struct {
	ctx    context.Context
	out    *counted
	tar    *tar.Writer
	root   *os.File
	limits Limits
	stats  Stats
	buf    [64 << 10]byte
	value  [64 << 10]byte

	links     map[inode]*linked
	linkBytes int
}

// inode names a file of the disk.
type inode struct{ dev, ino uint64 }

// linked is a file with several names, of which the first was written.
type linked struct {
	name string
	left uint64 // names that have not come yet
}

// header writes an entry's header and counts it.
func (a *archive) header(h *tar.Header) error {
	if err := a.count(); err != nil {
		return err
	}
	h.Format = tar.FormatPAX
	if err := a.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("describe %.200q: %w", h.Name, err)
	}
	return nil
}

func (a *archive) count() error {
	a.stats.Entries++
	if a.limits.Entries > 0 && a.stats.Entries > a.limits.Entries {
		return errs.Errorf(op, errkind.Exhausted, "the session has more than %d files; an export holds no more", a.limits.Entries)
	}
	return nil
}

// remove writes the removal of a name of the image.
func (a *archive) remove(name string, st *unix.Stat_t) error {
	return a.header(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, ModTime: modTime(st)})
}

// linkTo returns the name under which the file was written before; empty: write it, under name.
func (a *archive) linkTo(name string, st *unix.Stat_t) string {
	if st.Nlink < 2 {
		return ""
	}
	key := inode{st.Dev, st.Ino}
	if l := a.links[key]; l != nil {
		if l.left--; l.left == 0 {
			a.linkBytes -= len(l.name)
			delete(a.links, key)
		}
		return l.name
	}
	if a.linkBytes+len(name) <= a.limits.LinkBytes && len(a.links) < a.limits.LinkBytes/64 {
		a.links[key] = &linked{name: name, left: uint64(st.Nlink) - 1}
		a.linkBytes += len(name)
	}
	return ""
}
