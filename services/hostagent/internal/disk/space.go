package disk

import (
	"maps"
	"os"
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
	Clones    uint64 // what attached disks may still take again because clones share it
	Evictable uint64 // what comes back if clones and the images of clean sleepers go
}

// Room is what a further session may be promised.
func (s Space) Room() uint64 {
	if s.Free+s.Evictable < s.Promised+s.Reserve {
		return 0
	}
	return s.Free + s.Evictable - s.Promised - s.Reserve
}

// slack is what is free beyond all promises; clones live from it.
func (s Space) slack() int64 { return int64(s.Free) - int64(s.Promised) }

// kept says that every promise is kept even if all that clones share is written again, with a margin
// for what the file system needs itself. Nothing may have to be given up in time for it: a busy pool
// fills faster than anybody reacts.
func (s Space) kept() bool { return s.slack() >= int64(s.Clones+s.Reserve/4) }

// mounting is a disk that is attached, or whose space is promised for another reason.
type mounting struct {
	size   uint64
	image  string // file that the promise is about
	device string // loop device, empty until it is mounted
	raw    bool   // handed to a virtual machine
	// writers are those of a raw disk, nil: nobody can stop them.
	writers Writers
}

// Space returns the account of the pool.
func (s *Store) Space() (Space, error) {
	sp, err := s.precise()
	if err != nil {
		return sp, errs.E("measure disk pool", errkind.Internal, s.dir, err)
	}
	sp.Evictable, err = s.evictable()
	if err != nil {
		return sp, errs.E("measure disk pool", errkind.Internal, s.dir, err)
	}
	return sp, nil
}

// account is Space without what is evictable: it is cheap, and counts all of a disk that has clones as
// shared with them.
func (s *Store) account() (Space, error) { return s.space(false) }

// precise is account with every extent looked at.
func (s *Store) precise() (Space, error) { return s.space(true) }

func (s *Store) space(exact bool) (Space, error) {
	s.mu.Lock()
	active, cloning := maps.Clone(s.active), maps.Clone(s.cloning)
	s.mu.Unlock()
	sp := Space{Reserve: s.reserve}
	for k, m := range active {
		used, err := allocated(m.image)
		if err != nil {
			used = 0 // being made: nothing of it is allocated yet
		}
		sp.Promised += s.promise(m.size, used)
		sp.Clones += s.debt(k, m, cloning[k], exact)
	}
	// What is written meanwhile is counted as promised and as not free: after, not before.
	free, err := s.free()
	sp.Free = free
	return sp, err
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
	s.room.Lock()
	defer s.room.Unlock()
	return s.untilRoom(op, k, func() (bool, uint64, error) { return s.promiseIf(k, size, image) })
}

// attempt is asked whether there is room. least is what must be free for it in any case.
type attempt func() (ok bool, least uint64, err error)

// untilRoom gives up what only saves work, one after another, until try is content; nothing if that
// would not do either.
func (s *Store) untilRoom(op string, k Key, try attempt) error {
	for {
		ok, least, err := try()
		if err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
		if ok {
			return nil
		}
		free, err := s.free()
		if err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
		more, err := s.evictable()
		if err != nil {
			return errs.E(op, errkind.Internal, k.String(), err)
		}
		if free+more < least || !s.makeRoom(k) {
			sp, _ := s.account()
			return errs.Errorf(op, errkind.NoCapacity,
				"no space for %s: %s must be free; the pool has %s free, of which %s are promised, %s may be taken again because of clones, and %s are reserved",
				k, fmtBytes(least), fmtBytes(sp.Free), fmtBytes(sp.Promised), fmtBytes(sp.Clones), fmtBytes(sp.Reserve))
		}
	}
}

// promiseIf promises the space if it is there. Room has to be there beside the reserve, and beside
// what clones share.
func (s *Store) promiseIf(k Key, size uint64, image string) (ok bool, least uint64, err error) {
	s.mu.Lock()
	was, again := s.active[k]
	next := was
	next.size, next.image = size, image
	s.active[k] = next
	s.mu.Unlock()
	sp, err := s.account()
	if err == nil && !sp.kept() {
		sp, err = s.precise()
	}
	if err == nil && sp.slack() >= int64(sp.Reserve) && sp.kept() {
		return true, 0, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.active, k)
	if again {
		s.active[k] = was
	}
	return false, sp.Promised + sp.Reserve, err
}

// allowClone notes that a clone of an attached disk is about to be made, if the pool can bear that all
// of it is written again. The caller ends the note once the clone is there, or is not.
func (s *Store) allowClone(op string, k Key) (end func(), err error) {
	s.room.Lock()
	defer s.room.Unlock()
	s.mu.Lock()
	s.cloning[k] = true
	s.mu.Unlock()
	end = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.cloning, k)
	}
	used, err := allocated(s.image(k))
	if err == nil {
		err = s.untilRoom(op, k, func() (bool, uint64, error) {
			ok, sp, err := s.bears()
			return ok, sp.Promised + sp.Reserve/4 + used, err
		})
	}
	if err != nil {
		end()
		return nil, err
	}
	return end, nil
}

// bears says that the pool bears the clones that there are and that are noted.
func (s *Store) bears() (bool, Space, error) {
	sp, err := s.account()
	if err == nil && !sp.kept() {
		sp, err = s.precise()
	}
	return err == nil && sp.kept(), sp, err
}

// debt is what an attached disk may take again because of its clones: at most all that is allocated.
// exact looks at every extent of the image.
func (s *Store) debt(k Key, m mounting, cloning, exact bool) uint64 {
	if !cloning && (!s.reflink || !s.cloned(k)) {
		return 0
	}
	used, err := allocated(m.image)
	if err != nil || cloning || !exact {
		return used
	}
	if n, err := alone(m.image); err == nil {
		used -= min(used, n)
	}
	return used
}

// cloned says that something shares blocks with the image.
func (s *Store) cloned(k Key) bool {
	view := s.viewPoint(k.String()) + viewSuffix
	for _, path := range []string{s.file(k, baseImageName), s.file(k, shotImageName), view, s.file(k, shotImageName+making), view + making} {
		if _, err := os.Lstat(path); err == nil {
			return true
		}
	}
	return false
}

func (s *Store) release(k Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.active, k)
	delete(s.saved, k)
	delete(s.ending, k)
	if h := s.holds[k]; h != nil && h.over() {
		delete(s.holds, k)
	}
}
