package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// Swept says what a sweep removed.
type Swept struct {
	Detached []Key
	Deleted  []Key
	Strays   []string
}

// Verdict of a sweep over one disk.
type Verdict int

const (
	// Keep the disk as it is.
	Keep Verdict = iota
	// KeepDetached keeps the image, without compute: it is unmounted.
	KeepDetached
	// Remove the disk for ever: its generation was deleted.
	Remove
)

// Sweep brings the host to what is owned. The caller must have a positive, fresh and complete
// answer of who owns what; a disk of which it knows nothing is to be kept detached, not removed.
// Strays hold nothing of a session and always go.
func (s *Store) Sweep(ctx context.Context, judge func(Disk) Verdict) (Swept, error) {
	var out Swept
	inv, err := s.List()
	if err != nil {
		return out, err
	}
	var failed []error
	for _, d := range inv.Disks {
		switch v := judge(d); {
		case v == Remove:
			if err := s.Delete(ctx, d.ID); err != nil {
				failed = append(failed, err)
				continue
			}
			out.Deleted = append(out.Deleted, d.ID)
		case v == KeepDetached && (d.Mounted || d.Device != "" || d.Raw):
			if err := s.Detach(ctx, d.ID); err != nil {
				failed = append(failed, err)
				continue
			}
			out.Detached = append(out.Detached, d.ID)
		}
	}
	for _, stray := range inv.Strays {
		if err := s.removeStray(stray); err != nil {
			failed = append(failed, err)
			continue
		}
		out.Strays = append(out.Strays, stray)
	}
	return out, errors.Join(failed...)
}

// removeStray removes what belongs to no record, unless an Attach of this process just made it.
func (s *Store) removeStray(path string) error {
	const op = "remove stray"
	if k, err := parseKey(filepath.Base(filepath.Dir(path))); err == nil {
		defer s.lock(k)()
		rec, err := s.load(k)
		if err != nil {
			return nil // the whole folder is a stray now
		}
		return errs.Wrap(op, path, s.tidyFolder(rec))
	}
	if k, err := parseKey(filepath.Base(path)); err == nil {
		defer s.lock(k)()
		if strings.HasPrefix(path, filepath.Join(s.dir, "views")+"/") {
			return errs.Wrap(op, path, s.removeStrayView(k))
		}
		if _, err := s.load(k); err == nil || s.isActive(k) {
			return nil
		}
	}
	switch {
	case strings.HasPrefix(path, filepath.Join(s.dir, "views")+"/"):
		return errs.Wrap(op, path, s.removeView(filepath.Base(path), unix.MNT_DETACH))
	case strings.HasPrefix(path, "/dev/"):
		return errs.Wrap(op, path, loopdev.Free(path))
	case strings.HasPrefix(path, filepath.Join(s.dir, "mnt")+"/"):
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
			return errs.E(op, kindOf(err), path, err)
		}
		return errs.Wrap(op, path, os.Remove(path))
	case strings.HasPrefix(path, filepath.Join(s.dir, "sessions")+"/"):
		return errs.Wrap(op, path, os.RemoveAll(path))
	}
	return errs.E(op, errkind.Internal, path, "the path is not ours")
}

// tidyFolder removes what a crash left in a disk's folder. The caller has the disk's lock.
func (s *Store) tidyFolder(rec Record) error {
	for _, path := range s.leftovers(rec) {
		if err := discard(path); err != nil {
			return err
		}
	}
	return nil
}

// removeStrayView removes a view unless this process has it open. The caller has the disk's lock.
func (s *Store) removeStrayView(k Key) error {
	s.mu.Lock()
	ours := s.views[k] != nil
	s.mu.Unlock()
	if ours {
		return nil
	}
	return s.removeView(k.String(), unix.MNT_DETACH)
}

// tidyViews removes the views of an earlier process: whoever read them is gone with it.
func (s *Store) tidyViews() error {
	left, err := s.strayViews()
	if err != nil {
		return err
	}
	for _, path := range left {
		if err := s.removeView(filepath.Base(path), unix.MNT_DETACH); err != nil {
			return err
		}
	}
	return nil
}
