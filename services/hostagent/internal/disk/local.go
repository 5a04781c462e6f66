package disk

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Snapshotter turns an image into a manifest. Snapshot is called with the image quiet (unmounted, or
// frozen for a checkpoint, so it must be quick) and on stable storage, and must not write to it; it
// must be idempotent: the same record gives the same manifest id. An error leaves the disk as it
// was, dirty and usable on this host.
type Snapshotter interface {
	Snapshot(ctx context.Context, rec Record, image *os.File) (Manifest, error)
}

// Local is the Snapshotter of a host without object storage: the manifest names the image itself.
type Local struct{}

// Snapshot implements Snapshotter.
func (Local) Snapshot(_ context.Context, rec Record, image *os.File) (Manifest, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil {
		return Manifest{}, fmt.Errorf("stat image: %w", err)
	}
	m := Manifest{
		Session: rec.Session, Generation: rec.Generation, Epoch: rec.Epoch, Parent: rec.Base,
		Image: rec.Image, Size: rec.Size, Allocated: uint64(st.Blocks) * 512,
	}
	if rec.State == Clean { // sealed before, or never written in this epoch: still the same disk
		m.Parent, m.ID = "", rec.Base
		return m, nil
	}
	m.ID = manifestID(m)
	return m, nil
}

// Seal ends an epoch on this host: it unmounts the disk, brings the image to stable storage and
// returns its manifest. All compute must be gone: Busy otherwise. The record stays dirty until
// Commit, so nothing is lost if the manifest is never committed. Idempotent for the same epoch.
func (s *Store) Seal(ctx context.Context, k Key, epoch ids.Epoch) (Manifest, error) {
	const op = "seal disk"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return Manifest{}, errs.Wrap(op, k.String(), err)
	}
	if rec, err = s.sealable(op, rec, epoch); err != nil {
		return Manifest{}, err
	}
	if err := syncMount(s.mountPoint(k)); err != nil {
		return Manifest{}, errs.E(op, kindOf(err), k.String(), err)
	}
	if err := s.detach(op, k); err != nil {
		return Manifest{}, err
	}
	if err := s.at("seal.detached"); err != nil {
		return Manifest{}, errs.Wrap(op, k.String(), err)
	}
	image, err := os.Open(s.image(k))
	if err != nil {
		return Manifest{}, errs.E(op, kindOf(err), k.String(), err)
	}
	defer func() { _ = image.Close() }()
	if err := image.Sync(); err != nil {
		return Manifest{}, errs.E(op, kindOf(err), k.String(), err)
	}
	m, err := s.snap.Snapshot(ctx, rec, image)
	return m, errs.Wrap(op, k.String(), errors.Join(err, s.notePending(rec, m, err == nil, true)))
}

// notePending keeps a disk usable whose manifest the scheduler may or may not have taken.
func (s *Store) notePending(rec Record, m Manifest, ok, sealed bool) error {
	if !ok || m.ID == "" || m.ID == rec.Base || m.ID == rec.Pending.ID && sealed == rec.Pending.Sealed {
		return nil
	}
	rec.Pending = Pending{ID: m.ID, Epoch: m.Epoch, Sealed: sealed, Allocated: m.Allocated}
	return s.save(rec)
}

// Checkpoint describes the disk as it is while the session goes on: it freezes the file system for
// the time of the snapshot. Everything written before is on stable storage of this host. The head
// moves with Checkpointed. Kinds as Activate.
func (s *Store) Checkpoint(ctx context.Context, k Key, epoch ids.Epoch) (m Manifest, err error) {
	const op = "checkpoint disk"
	defer s.lock(k)()
	rec, err := s.attachedRecord(op, k, epoch)
	if err != nil {
		return Manifest{}, err
	}
	if rec, err = s.sealable(op, rec.activated(epoch), epoch); err != nil {
		return Manifest{}, err
	}
	image, err := os.Open(s.image(k))
	if err != nil {
		return Manifest{}, errs.E(op, kindOf(err), k.String(), err)
	}
	defer func() { _ = image.Close() }()
	if err := freezeMount(s.mountPoint(k), true); err != nil {
		return Manifest{}, errs.E(op, kindOf(err), k.String(), err)
	}
	defer func() {
		if terr := freezeMount(s.mountPoint(k), false); terr != nil && err == nil {
			m, err = Manifest{}, errs.E(op, kindOf(terr), k.String(), terr)
		}
	}()
	if err := s.at("checkpoint.frozen"); err != nil {
		return Manifest{}, errs.Wrap(op, k.String(), err)
	}
	if err := image.Sync(); err != nil {
		return Manifest{}, errs.E(op, kindOf(err), k.String(), err)
	}
	m, err = s.snap.Snapshot(ctx, rec, image)
	return m, errs.Wrap(op, k.String(), errors.Join(err, s.notePending(rec, m, err == nil, false)))
}

// Checkpointed records that m is the session's head; the disk stays dirty. Idempotent.
func (s *Store) Checkpointed(m Manifest) error {
	const op = "checkpoint disk"
	k := Key{m.Session, m.Generation}
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	if rec.Base == m.ID {
		return nil
	}
	if rec.State != Dirty || rec.Epoch != m.Epoch || rec.Base != m.Parent {
		return errs.E(op, errkind.StaleEpoch, k.String(), fmt.Sprintf("the disk is %s in epoch %s with base %q", rec.State, rec.Epoch, rec.Base))
	}
	rec.Base, rec.Pending = m.ID, Pending{}
	return errs.Wrap(op, k.String(), s.save(rec))
}

// sealable refuses every epoch but the one that the disk was attached for. A session that was
// active but wrote nothing has not been activated here: the disk is its epoch's all the same.
func (s *Store) sealable(op string, rec Record, epoch ids.Epoch) (Record, error) {
	if rec.Attached != epoch {
		return rec, errs.E(op, errkind.StaleEpoch, rec.Key().String(),
			fmt.Sprintf("the disk belongs to epoch %s, not %s", rec.Attached, epoch))
	}
	if rec.State == Clean {
		return rec, nil
	}
	next := rec.activated(epoch)
	if old, err := s.load(rec.Key()); err == nil && next == old {
		return next, nil
	}
	return next, errs.Wrap(op, rec.Key().String(), s.save(next))
}

// Commit marks the disk clean: m is the session's committed head. Idempotent.
func (s *Store) Commit(m Manifest) error {
	const op = "commit disk"
	k := Key{m.Session, m.Generation}
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	if rec.State == Clean && rec.Base == m.ID {
		return nil
	}
	if rec.State != Dirty || rec.Epoch != m.Epoch || s.isActive(k) {
		return errs.E(op, errkind.StaleEpoch, k.String(), fmt.Sprintf("the disk is %s in epoch %s, not as sealed in %s", rec.State, rec.Epoch, m.Epoch))
	}
	rec.State, rec.Base, rec.Pending = Clean, m.ID, Pending{}
	return errs.Wrap(op, k.String(), s.save(rec))
}
