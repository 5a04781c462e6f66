package disk

import (
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Space is the account of the pool, in bytes.
type Space struct {
	Free     uint64 // what the file system has
	Promised uint64 // what active sessions may still allocate
	Reserve  uint64 // what stays free in any case
}

// Room is what a further session may be promised.
func (s Space) Room() uint64 {
	if s.Free < s.Promised+s.Reserve {
		return 0
	}
	return s.Free - s.Promised - s.Reserve
}

// Space returns the account of the pool.
func (s *Store) Space() (Space, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sp, err := s.space()
	if err != nil {
		return sp, errs.E("measure disk pool", errkind.Internal, s.dir, err)
	}
	return sp, nil
}

func (s *Store) space() (Space, error) {
	free, err := freeBytes(s.dir)
	if err != nil {
		return Space{}, err
	}
	sp := Space{Free: free, Reserve: s.reserve}
	for k, quota := range s.active {
		used, err := allocated(s.image(k))
		if err != nil {
			used = 0 // being made: nothing of it is allocated yet
		}
		sp.Promised += promise(quota, used)
	}
	return sp, nil
}

// promise is what an image may still take. Its own metadata on the pool costs some as well.
func promise(quota, used uint64) uint64 {
	quota += quota / 256
	if used >= quota {
		return 0
	}
	return quota - used
}

// admit promises the rest of rec's quota, before anything is made: the pool must never answer a
// loop device with 'no space', which would corrupt the session's files in silence.
func (s *Store) admit(rec Record, exists bool) error {
	var used uint64
	if exists {
		var err error
		if used, err = allocated(s.image(rec.Key())); err != nil {
			return errs.E("attach disk", errkind.DataLoss, rec.Key().String(), err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sp, err := s.space()
	if err != nil {
		return errs.E("attach disk", errkind.Internal, rec.Key().String(), err)
	}
	need := promise(rec.Size, used)
	if need > sp.Room() {
		return errs.Errorf("attach disk", errkind.NoCapacity,
			"no space for %s: it may grow by %s, the pool has %s free of which %s are promised and %s reserved",
			rec.Key(), fmtBytes(need), fmtBytes(sp.Free), fmtBytes(sp.Promised), fmtBytes(sp.Reserve))
	}
	s.active[rec.Key()] = rec.Size
	return nil
}

func (s *Store) release(k Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.active, k)
}
