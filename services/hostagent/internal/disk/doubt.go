package disk

import (
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Unchanged records that a shot holds exactly what its parent, the head, holds: a disk that was
// sealed is clean without a new manifest. Kinds: NoCapacity (the shot was lost), StaleEpoch.
func (s *Store) Unchanged(sh *Shot) error {
	const op = "keep manifest"
	k := sh.Key
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	switch {
	case sh.over():
		return errs.E(op, errkind.NoCapacity, k.String(), "the shot is gone: the pool needed its space, or the disk is used again")
	case rec.Base != sh.Parent || rec.Base == "" || rec.Attached != sh.attached || rec.Pending.ID != "":
		return errs.E(op, errkind.StaleEpoch, k.String(), "the disk has another head than the shot")
	case !sh.Sealed:
		s.remember(k, sh.written, sh.counted)
		return nil
	}
	rec.State, rec.Slept = Clean, time.Now().UTC().Truncate(time.Second)
	return errs.Wrap(op, k.String(), s.save(rec))
}

// Doubt notes that the store lacks part of what the image may hold, until a snapshot stored everything
// again. NotFound if this host has no image. Idempotent.
func (s *Store) Doubt(k Key) error {
	const op = "keep the image of a damaged manifest"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	if rec.Doubtful {
		return nil
	}
	rec.Doubtful = true
	return errs.Wrap(op, k.String(), s.save(rec))
}
