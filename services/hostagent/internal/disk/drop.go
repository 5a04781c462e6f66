package disk

import (
	"context"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Drop removes a local image that its owner says is older than the session, which was active elsewhere
// or is saved, as of epoch. Everything that might be the newest all the same is refused: Busy (attached,
// or being read), Refused (it has what was written in that epoch or a later one, or the store may lack
// part of it). NotFound if there is none.
func (s *Store) Drop(_ context.Context, k Key, epoch ids.Epoch) error {
	const op = "drop disk"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	s.mu.Lock()
	_, active := s.active[k]
	busy := active || s.shots[k] != nil || s.views[k] != nil || s.restoring[k] || s.cloning[k]
	s.mu.Unlock()
	if busy {
		return errs.E(op, errkind.Busy, k.String(), "the disk is in use")
	}
	if err := rec.Droppable(epoch); err != nil {
		return err
	}
	return s.erase(op, k)
}

// Droppable refuses an image that may be the newest although the session is said to live elsewhere as
// of epoch.
func (r Record) Droppable(epoch ids.Epoch) error {
	newest := r.Epoch
	if r.Attached.Compare(newest) > 0 {
		newest = r.Attached
	}
	switch {
	case r.State == Dirty && newest.Compare(epoch) >= 0:
		return errs.Errorf("drop disk", errkind.Refused, "the image %s has what was written in epoch %s, which is not older than %s", r.Key(), newest, epoch)
	case newest.Compare(epoch) > 0:
		return errs.Errorf("drop disk", errkind.Refused, "the image %s is of epoch %s, which is newer than %s", r.Key(), newest, epoch)
	case r.Doubtful:
		return errs.Errorf("drop disk", errkind.Refused, "the store may lack part of the image %s", r.Key())
	}
	return nil
}
