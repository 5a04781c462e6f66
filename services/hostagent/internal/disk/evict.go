package disk

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Evict removes the local image of a sleeping session whose head is saved: the next wake restores it.
// Nothing of it stays on this host. Kinds: NotFound, Busy (attached, or being read), Refused (not
// clean, or not known to be in the store).
func (s *Store) Evict(_ context.Context, k Key) error {
	const op = "evict disk"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	s.mu.Lock()
	_, active := s.active[k]
	_, shot := s.shots[k]
	s.mu.Unlock()
	switch {
	case active || shot:
		return errs.E(op, errkind.Busy, k.String(), "the disk is in use")
	case !s.evictableRecord(rec):
		return errs.E(op, errkind.Refused, k.String(), "the disk is not known to be saved elsewhere")
	}
	return s.erase(op, rec.Key())
}

// evictableRecord holds only for an image that equals a manifest which went through a store: the
// index proves it, which a manifest of a host without one lacks.
func (s *Store) evictableRecord(rec Record) bool {
	if rec.State != Clean || rec.Base == "" || rec.Ephemeral || rec.Doubtful || rec.Pending.ID != "" {
		return false
	}
	_, ok := s.readIndex(rec.Key(), baseIndexName, rec.Base)
	return ok
}

// erase removes a session's folder. The record goes first: an image without one is never handed out.
func (s *Store) erase(op string, k Key) error {
	err := os.Remove(s.file(k, recordName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.E(op, errkind.Internal, k.String(), err)
	}
	if err == nil {
		if err := syncDir(s.folder(k)); err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
	}
	if err := s.at("delete.record"); err != nil {
		return errs.E(op, errkind.Internal, k.String(), err)
	}
	for _, name := range []string{imageName, baseImageName, shotImageName} {
		if err := discard(s.file(k, name)); err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
	}
	if err := s.at("delete.images"); err != nil {
		return errs.E(op, errkind.Internal, k.String(), err)
	}
	return errs.Wrap(op, k.String(), s.unclaim(k))
}

// records returns every readable record with a state that makes sense.
func (s *Store) records() ([]Record, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "sessions"))
	if err != nil {
		return nil, err
	}
	var out []Record
	for _, e := range entries {
		k, err := parseKey(e.Name())
		if err != nil {
			continue
		}
		if rec, err := s.load(k); err == nil {
			out = append(out, rec)
		}
	}
	return out, nil
}

// sleepers returns the disks that can be evicted, the one that slept first at first.
func (s *Store) sleepers() ([]Record, error) {
	all, err := s.records()
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(r Record) bool { return s.isActive(r.Key()) || !s.evictableRecord(r) })
	slices.SortStableFunc(all, func(a, b Record) int {
		return cmp.Or(a.Slept.Compare(b.Slept), a.Epoch.Compare(b.Epoch))
	})
	return all, nil
}

// evictable is what makeRoom could return to the pool.
func (s *Store) evictable() (uint64, error) {
	all, err := s.records()
	if err != nil {
		return 0, err
	}
	var sum uint64
	for _, r := range all {
		k := r.Key()
		if !s.isActive(k) && s.evictableRecord(r) {
			n, err := allocated(s.image(k))
			if err != nil {
				continue
			}
			if t, err := allocated(s.template(r.Size)); err == nil && s.reflink {
				n -= min(n, t)
			}
			sum += n
		}
		if n, err := alone(s.file(k, baseImageName)); err == nil {
			sum += n
		}
	}
	return sum, nil
}

// makeRoom gives up one thing that only saves work: the base of a disk that is not attached, then that
// of one that is, that of own, and last the image of the sleeper that slept first. False if there is
// none. The caller has the lock of own.
func (s *Store) makeRoom(own Key) bool {
	if s.dropBase(false, own) || s.dropBase(true, own) {
		return true
	}
	if _, err := os.Lstat(s.file(own, baseImageName)); err == nil {
		return s.dropClone(own, baseImageName) == nil
	}
	return s.evictOne()
}

// dropBase drops one base clone of a disk that is, or is not, attached. What a clean sleeper's base
// holds comes back with its image.
func (s *Store) dropBase(attached bool, own Key) bool {
	all, err := s.records()
	if err != nil {
		return false
	}
	for _, r := range all {
		k := r.Key()
		if k == own || s.isActive(k) != attached || !attached && r.State == Clean {
			continue
		}
		if _, err := os.Lstat(s.file(k, baseImageName)); err != nil {
			continue
		}
		if s.tryLocked(k, func() bool { return s.dropClone(k, baseImageName) == nil }) {
			return true
		}
	}
	return false
}

// evictOne evicts the sleeper that slept first.
func (s *Store) evictOne() bool {
	found, err := s.sleepers()
	if err != nil {
		return false
	}
	for _, r := range found {
		k := r.Key()
		done := s.tryLocked(k, func() bool {
			now, err := s.load(k)
			s.mu.Lock()
			_, active := s.active[k]
			_, shot := s.shots[k]
			s.mu.Unlock()
			if err != nil || active || shot || !s.evictableRecord(now) {
				return false
			}
			if err := s.erase("evict disk", k); err != nil {
				s.log.Error("cannot evict a disk", "session", k.Session, "error", err)
				return false
			}
			return true
		})
		if done {
			s.log.Info("evicted the disk of a sleeping session", "session", k.Session, "manifest", r.Base, "slept", r.Slept)
			return true
		}
	}
	return false
}

// tryLocked runs f with the lock of k, unless somebody has it.
func (s *Store) tryLocked(k Key, f func() bool) bool {
	s.mu.Lock()
	m := s.keyLock(k)
	s.mu.Unlock()
	if !m.TryLock() {
		return false
	}
	defer m.Unlock()
	return f()
}
