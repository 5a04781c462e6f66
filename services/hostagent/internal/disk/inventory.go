package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// Inventory is everything that the store finds on this host.
type Inventory struct {
	Disks  []Disk
	Blanks map[uint64]int // formatted and ready, per size
	// Strays belong to no disk with a record: paths of half-made images, mounts and loop devices.
	Strays []string
}

// Disk is one image with a record.
type Disk struct {
	ID Key
	Record
	Allocated uint64
	Mounted   bool
	Device    string // loop device, empty if none
	// Broken says why the disk cannot be used, empty if it can.
	Broken string
}

func (s *Store) inventory() (Inventory, error) {
	inv := Inventory{Blanks: map[uint64]int{}}
	entries, err := os.ReadDir(filepath.Join(s.dir, "sessions"))
	if err != nil {
		return inv, fmt.Errorf("list disks: %w", err)
	}
	held, err := loopdev.Bound(s.dir)
	if err != nil {
		return inv, err
	}
	points, err := mounts.Below(filepath.Join(s.dir, "mnt"))
	if err != nil {
		return inv, err
	}
	device, mounted := map[string]string{}, map[string]bool{}
	for _, l := range held {
		device[l.Backing] = l.Device
	}
	for _, m := range points {
		mounted[m] = true
	}
	delete(mounted, filepath.Join(s.dir, "mnt"))
	for _, e := range entries {
		d, ok := s.inspect(e.Name())
		if !ok {
			inv.Strays = append(inv.Strays, filepath.Join(s.dir, "sessions", e.Name()))
			continue
		}
		d.Device, d.Mounted = device[s.image(d.ID)], mounted[s.mountPoint(d.ID)]
		delete(device, s.image(d.ID))
		delete(mounted, s.mountPoint(d.ID))
		inv.Disks = append(inv.Disks, d)
	}
	for m := range mounted {
		inv.Strays = append(inv.Strays, m)
	}
	for back, dev := range device {
		if !strings.HasPrefix(back, filepath.Join(s.dir, "blanks")) {
			inv.Strays = append(inv.Strays, dev)
		}
	}
	return inv, s.countBlanks(&inv)
}

// inspect reads one folder; ok is false if it holds no record, so that it was never mounted.
func (s *Store) inspect(name string) (Disk, bool) {
	k, err := parseKey(name)
	if err != nil {
		return Disk{}, false
	}
	d := Disk{ID: k}
	rec, err := s.load(k)
	switch {
	case errs.Is(err, errkind.NotFound):
		return d, false
	case err != nil:
		d.Broken = err.Error()
	}
	d.Record = rec
	if d.Allocated, err = allocated(s.image(k)); err != nil && d.Broken == "" {
		d.Broken = err.Error()
	}
	return d, true
}

func (s *Store) countBlanks(inv *Inventory) error {
	files, err := filepath.Glob(filepath.Join(s.dir, "blanks", "*", "*.img"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if size, ok := blankSize(filepath.Dir(f)); ok {
			inv.Blanks[size]++
		}
	}
	return nil
}

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
		case v == KeepDetached && (d.Mounted || d.Device != ""):
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
	if k, err := parseKey(filepath.Base(path)); err == nil {
		defer s.lock(k)()
		if _, err := s.load(k); err == nil || s.isActive(k) {
			return nil
		}
	}
	const op = "remove stray"
	switch {
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
