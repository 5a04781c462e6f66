package disk

import (
	"fmt"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Propose records, before m is offered to the scheduler, that m may become the session's head. From
// then on the disk is usable with either head. plain is the manifest's plain index. Kinds: NoCapacity
// (the shot was lost to the pool's pressure, or the disk is used again: take another), StaleEpoch,
// Conflict (another manifest is pending). Idempotent.
func (s *Store) Propose(sh *Shot, m Manifest, plain []byte) error {
	const op = "propose manifest"
	k := sh.Key
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	switch {
	case rec.Pending.ID == m.ID && m.ID != "":
		return nil
	case sh.over():
		return errs.E(op, errkind.NoCapacity, k.String(), "the shot is gone: the pool needed its space, or the disk is used again")
	case !ids.IsToken(m.ID) || m.Parent != sh.Parent || m.Epoch != sh.Epoch || m.ID == m.Parent:
		return errs.E(op, errkind.Invalid, k.String(), fmt.Sprintf("the manifest %q (parent %q, epoch %s) is not of this shot", m.ID, m.Parent, m.Epoch))
	case rec.Pending.ID != "":
		return errs.E(op, errkind.Conflict, k.String(), "the manifest "+rec.Pending.ID+" is pending")
	case rec.Attached != sh.attached || rec.Base != sh.Parent || rec.State != Dirty:
		return errs.E(op, errkind.StaleEpoch, k.String(), fmt.Sprintf("the disk is %s, attached for epoch %s, with base %q", rec.State, rec.Attached, rec.Base))
	}
	if err := s.writeIndex(k, shotIndexName, index{m.ID, sh.Size, plain}); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	if err := s.at("propose.index"); err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	rec.Pending = Pending{
		ID: m.ID, Epoch: sh.Epoch, Sealed: sh.Sealed, TakenAt: sh.TakenAt.Truncate(time.Millisecond).UTC(), Allocated: m.Allocated, CrashConsistent: sh.CrashConsistent,
		Anew: sh.Anew,
	}
	if err := s.save(rec); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	return errs.Wrap(op, k.String(), s.at("propose.record"))
}

// CommitHead records that the session's head is the manifest id, which was pending: its clone becomes
// the base of what comes, and a disk that was sealed is clean. StaleEpoch if id is neither pending nor
// the base. Idempotent.
func (s *Store) CommitHead(k Key, id string) error {
	const op = "commit manifest"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	if id != "" && rec.Base == id {
		return nil
	}
	if id == "" || rec.Pending.ID != id {
		return errs.E(op, errkind.StaleEpoch, k.String(), fmt.Sprintf("the manifest %q is not pending: that is %q, and the base %q", id, rec.Pending.ID, rec.Base))
	}
	_, err = s.takeOver(rec)
	return errs.Wrap(op, k.String(), err)
}

// takeOver makes the pending manifest the base.
func (s *Store) takeOver(rec Record) (Record, error) {
	k := rec.Key()
	next := rec.committed(time.Now())
	if err := s.promote(next); err != nil {
		return rec, err
	}
	s.mu.Lock()
	sh := s.shots[k]
	s.mu.Unlock()
	if sh != nil && !rec.Pending.Sealed {
		s.remember(k, sh.written, sh.counted)
	}
	return next, nil
}

// Withdraw forgets a pending manifest of which it is certain that it never becomes the head: the
// scheduler refused it for good. Idempotent; StaleEpoch if another one is pending.
func (s *Store) Withdraw(k Key, id string) error {
	const op = "withdraw manifest"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	if rec.Pending.ID == "" {
		return nil
	}
	if rec.Pending.ID != id {
		return errs.E(op, errkind.StaleEpoch, k.String(), fmt.Sprintf("the manifest %q is not pending, %q is", id, rec.Pending.ID))
	}
	rec.Pending = Pending{}
	if err := s.save(rec); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	return errs.Wrap(op, k.String(), s.tidyFolder(rec))
}
