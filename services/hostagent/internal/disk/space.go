package disk

import (
	"path/filepath"
	"strconv"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Space is the account of the pool, in bytes.
type Space struct {
	Free      uint64 // what the file system has, and the one that the pool itself lies in
	Promised  uint64 // what active sessions may still allocate
	Reserve   uint64 // what stays free in any case: clones live from it
	Evictable uint64 // what comes back if clones and the images of clean sleepers go
}

// Room is what a further session may be promised.
func (s Space) Room() uint64 {
	if s.Free+s.Evictable < s.Promised+s.Reserve {
		return 0
	}
	return s.Free + s.Evictable - s.Promised - s.Reserve
}

// slack is what is free beyond all promises; clones eat it.
func (s Space) slack() int64 { return int64(s.Free) - int64(s.Promised) }

// mounting is a disk that is attached, or whose space is promised for another reason.
type mounting struct {
	size   uint64
	image  string // file that the promise is about
	device string // loop device, empty until it is mounted
}

// Space returns the account of the pool.
func (s *Store) Space() (Space, error) {
	sp, err := s.account()
	if err != nil {
		return sp, errs.E("measure disk pool", errkind.Internal, s.dir, err)
	}
	sp.Evictable, err = s.evictable()
	if err != nil {
		return sp, errs.E("measure disk pool", errkind.Internal, s.dir, err)
	}
	return sp, nil
}

// account is Space without what is evictable: it is cheap.
func (s *Store) account() (Space, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.space()
}

func (s *Store) space() (Space, error) {
	free, err := s.free()
	if err != nil {
		return Space{}, err
	}
	sp := Space{Free: free, Reserve: s.reserve}
	for _, m := range s.active {
		used, err := allocated(m.image)
		if err != nil {
			used = 0 // being made: nothing of it is allocated yet
		}
		sp.Promised += s.promise(m.size, used)
	}
	return sp, nil
}

// free is bounded by the file system around the pool as well: a pool in a sparse file grows there.
func (s *Store) free() (uint64, error) {
	free, err := freeBytes(s.dir)
	if err != nil || s.outer == "" {
		return free, err
	}
	outer, err := freeBytes(s.outer)
	return min(free, outer), err
}

// promise is what an image may still take. Its own metadata on the pool costs some as well. Where
// files share blocks, what an image shares with the template that it was cloned from is allocated
// already and yet costs its space once more when it is written; what it shares with clones of its
// own does not count, for clones are dropped before a promise is broken.
func (s *Store) promise(quota, used uint64) uint64 {
	if s.reflink {
		if n, err := allocated(s.template(quota)); err == nil {
			used -= min(used, n)
		}
	}
	quota += quota / 256
	if used >= quota {
		return 0
	}
	return quota - used
}

func (s *Store) template(size uint64) string {
	return filepath.Join(s.dir, "blanks", strconv.FormatUint(size, 10), "template")
}

// admit promises a disk of the size whose image is (or will be) the file, before anything is made:
// the pool must never answer a loop device with 'no space', which would corrupt the session's files
// in silence. If there is too little, what nobody needs goes first.
func (s *Store) admit(op string, k Key, size uint64, image string) error {
	for {
		short, sp, err := s.promiseIf(k, size, image)
		if err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
		if short == 0 {
			return nil
		}
		can, err := s.evictable()
		if err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
		if can < short || !s.makeRoom(k) {
			return errs.Errorf(op, errkind.NoCapacity,
				"no space for %s: it may grow to %s, the pool has %s free of which %s are promised and %s reserved",
				k, fmtBytes(size), fmtBytes(sp.Free), fmtBytes(sp.Promised), fmtBytes(sp.Reserve))
		}
	}
}

// promiseIf promises the space if it is there, and else says how much is short.
func (s *Store) promiseIf(k Key, size uint64, image string) (short uint64, sp Space, err error) {
	used, err := allocated(image)
	if err != nil {
		used = 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sp, err = s.space(); err != nil {
		return 0, sp, err
	}
	need := s.promise(size, used) + sp.Promised + sp.Reserve
	was, again := s.active[k]
	if again { // it grows: what it was promised before is in the account
		old, err := allocated(was.image)
		if err != nil {
			old = 0
		}
		need -= min(need, s.promise(was.size, old))
	}
	if need > sp.Free {
		return need - sp.Free, sp, nil
	}
	s.active[k] = mounting{size: size, image: image, device: was.device}
	return 0, sp, nil
}

// roomForClone refuses a clone that would at once be dropped again, and a copy that does not fit.
func (s *Store) roomForClone(op string, rec Record) error {
	k := rec.Key()
	need := int64(s.reserve / 4)
	if !s.reflink {
		used, err := allocated(s.image(k))
		if err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
		need += int64(used)
	}
	for {
		sp, err := s.account()
		if err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
		if sp.slack() >= need {
			return nil
		}
		if !s.makeRoom(k) {
			return errs.Errorf(op, errkind.NoCapacity, "the pool has no room for a copy of %s: %s are free of which %s are promised",
				k, fmtBytes(sp.Free), fmtBytes(sp.Promised))
		}
	}
}

func (s *Store) release(k Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.active, k)
	delete(s.saved, k)
	if h := s.holds[k]; h != nil && h.over() {
		delete(s.holds, k)
	}
}
