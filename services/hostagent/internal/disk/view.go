package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// View is a read-only mount of a disk as it was at one time.
type View struct {
	// Root holds the folders Upper and Work, and is entered with Beneath alone.
	Root            string
	CrashConsistent bool

	s    *Store
	key  Key
	lost chan struct{}
	once sync.Once
}

// Lost is closed when the pool took the view's space back: what is read from then on is worthless.
func (v *View) Lost() <-chan struct{} { return v.lost }

// Close takes the view away. NoCapacity if it was lost: then what was read may be wrong. Busy while
// somebody has a file of it open. Idempotent.
func (v *View) Close() error {
	const op = "close view of disk"
	defer v.s.lock(v.key)()
	v.s.mu.Lock()
	current := v.s.views[v.key] == v
	v.s.mu.Unlock()
	if current {
		if err := v.s.removeView(v.key.String(), 0); err != nil {
			return errs.E(op, kindOf(err), v.key.String(), err)
		}
		v.s.mu.Lock()
		delete(v.s.views, v.key)
		v.s.mu.Unlock()
	}
	select {
	case <-v.lost:
		return errs.E(op, errkind.NoCapacity, v.key.String(), "the disk pool needed the view's space; what was read may be wrong")
	default:
		return nil
	}
}

func (s *Store) viewPoint(name string) string { return filepath.Join(s.dir, "views", name) }

const viewSuffix = ".img"

// View mounts a still copy of an attached disk read-only; the session goes on. One per disk at a time:
// Busy. Kinds otherwise as Shoot; Refused if a virtual machine wrote the disk.
func (s *Store) View(ctx context.Context, k Key, epoch ids.Epoch) (*View, error) {
	const op = "view disk"
	defer s.lock(k)()
	rec, err := s.attachedRecord(op, k, epoch)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	other, frozen := s.views[k], s.frozen[k] != nil
	s.mu.Unlock()
	switch {
	case rec.VMWritten:
		return nil, errs.E(op, errkind.Refused, k.String(), "a virtual machine wrote this disk; its files are exported from within it")
	case other != nil:
		return nil, errs.E(op, errkind.Busy, k.String(), "another view of the disk is open")
	case frozen:
		return nil, errs.E(op, errkind.NoCapacity, k.String(), "the disk is frozen until the pool has room")
	}
	end, err := s.allowClone(op, k)
	if err != nil {
		return nil, err
	}
	defer end()
	v := &View{Root: s.viewPoint(k.String()), s: s, key: k, lost: make(chan struct{})}
	sh := newShot(rec, epoch)
	path := v.Root + viewSuffix
	if err := s.still(ctx, sh, path); err != nil {
		return nil, errs.E(op, kindOf(err), k.String(), err)
	}
	sh.close()
	v.CrashConsistent = sh.CrashConsistent
	if err := s.mountView(path, v.Root); err != nil {
		return nil, errs.E(op, kindOf(err), k.String(), errors.Join(err, s.removeView(k.String(), 0)))
	}
	s.mu.Lock()
	s.views[k] = v
	s.mu.Unlock()
	return v, nil
}

// mountView mounts a copy. Its device is writable, for the journal of a copy that was not frozen.
func (s *Store) mountView(path, point string) error {
	dev, err := loopdev.Attach(path, false)
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	if err := os.MkdirAll(point, 0o700); err != nil {
		return err
	}
	if err := s.at("view.loop"); err != nil {
		return err
	}
	err = unix.Mount(dev.Name(), point, "ext4", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_NOATIME, "errors=remount-ro")
	if err != nil {
		return fmt.Errorf("mount %s: %w", dev.Name(), err)
	}
	return s.at("view.mounted")
}

// removeView unmounts and removes what there is of a view. Idempotent.
func (s *Store) removeView(name string, flags int) error {
	point := s.viewPoint(name)
	if err := unix.Unmount(point, unix.UMOUNT_NOFOLLOW|flags); err != nil &&
		!errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount view: %w", err)
	}
	if flags == 0 {
		if loopdev.WaitFree(point+viewSuffix, loopReclaim) != nil {
			mounts.Reclaim(point)
		}
		if err := loopdev.WaitFree(point+viewSuffix, loopGrace); err != nil {
			return err
		}
	}
	if err := os.Remove(point); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove view: %w", err)
	}
	return errors.Join(discard(point+viewSuffix), discard(point+viewSuffix+making))
}

// loseView takes a view's space back while it is read. The caller has the lock of its key.
func (s *Store) loseView(k Key) bool {
	s.mu.Lock()
	v := s.views[k]
	delete(s.views, k)
	s.mu.Unlock()
	if v == nil {
		return false
	}
	v.once.Do(func() { close(v.lost) })
	if err := s.removeView(k.String(), unix.MNT_DETACH); err != nil {
		s.log.Error("cannot end a view of a disk", "session", k.Session, "error", err)
	}
	return true
}
