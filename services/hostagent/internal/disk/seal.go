package disk

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// SealShot ends an epoch on this host: it unmounts the disk, brings the image to stable storage and
// takes a shot of it. All compute must be gone: Busy otherwise. It returns a manifest and no shot
// where there is nothing to save: the disk is clean (ID is the head), or a manifest of exactly this
// state is pending (commit that one), or the session is ephemeral (no ID). The record stays dirty
// until CommitHead, so nothing is lost if no manifest is ever committed. A shot that was not proposed
// yet is lost. Idempotent for the same epoch. A disk at rest may be sealed in a later epoch than the
// one that it was attached for: the session rests since, and this is its newest disk. Kinds: NotFound, StaleEpoch, Busy, Conflict (a
// manifest of an earlier state is pending: CommitHead or Withdraw it), NoCapacity.
func (s *Store) SealShot(ctx context.Context, k Key, epoch ids.Epoch) (*Shot, *Manifest, error) {
	const op = "seal disk"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return nil, nil, errs.Wrap(op, k.String(), err)
	}
	if rec, err = s.sealable(op, rec, epoch); err != nil {
		return nil, nil, err
	}
	if rec.Pending.ID != "" && !rec.Pending.Sealed {
		return nil, nil, errs.E(op, errkind.Conflict, k.String(), "the manifest "+rec.Pending.ID+" is pending: commit or withdraw it first")
	}
	if err := s.quiet(op, k); err != nil {
		return nil, nil, err
	}
	rec.Raw = false
	if rec.State == Clean || rec.Ephemeral || rec.Pending.ID != "" {
		m, err := s.known(rec)
		return nil, m, errs.Wrap(op, k.String(), err)
	}
	if err := s.lose(k); err != nil {
		return nil, nil, errs.Wrap(op, k.String(), err)
	}
	sh := newShot(rec, epoch)
	sh.Sealed = true
	if err := s.quietShot(sh); err != nil {
		return nil, nil, errs.E(op, kindOf(err), k.String(), err)
	}
	s.hand(sh, rec)
	return sh, nil, nil
}

// sealable refuses every epoch but the one that the disk was attached for. A session that was
// active but wrote nothing has not been activated here: the disk is its epoch's all the same.
func (s *Store) sealable(op string, rec Record, epoch ids.Epoch) (Record, error) {
	if rec.Attached.Compare(epoch) < 0 && !s.isActive(rec.Key()) { // at rest
		if rec.State != Blank {
			return rec, nil // the record goes on to say which epochs it stands for, in case this is not committed
		}
		rec.State, rec.Epoch = Dirty, rec.Attached
		return rec, errs.Wrap(op, rec.Key().String(), s.save(rec))
	}
	if rec.Attached != epoch {
		return rec, errs.E(op, errkind.StaleEpoch, rec.Key().String(),
			fmt.Sprintf("the disk belongs to epoch %s, not %s", rec.Attached, epoch))
	}
	if rec.State == Clean {
		return rec, nil
	}
	next := rec
	if rec.State != Dirty { // a dirty one goes on to say who wrote last: this epoch may have written nothing
		next = rec.activated(epoch)
	}
	if old, err := s.load(rec.Key()); err == nil && next == old {
		return next, nil
	}
	return next, errs.Wrap(op, rec.Key().String(), s.save(next))
}

// quiet takes the disk from its session and brings the image to stable storage.
func (s *Store) quiet(op string, k Key) error {
	if err := s.thaw(k); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	if err := s.writeOut(k); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	if err := s.detach(op, k); err != nil {
		return err
	}
	if err := s.at("seal.detached"); err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	if err := syncFile(s.image(k)); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	return nil
}

// known describes a disk of which nothing is to be saved.
func (s *Store) known(rec Record) (*Manifest, error) {
	size, err := allocated(s.image(rec.Key()))
	if err != nil {
		return nil, err
	}
	m := &Manifest{
		Session: rec.Session, Generation: rec.Generation, Epoch: rec.Epoch, Image: rec.Image, Size: rec.Size, Allocated: size,
		VMWritten: rec.VMWritten,
	}
	switch {
	case rec.State == Clean:
		m.ID = rec.Base
		rec.Slept = time.Now().UTC().Truncate(time.Second)
		return m, s.save(rec)
	case rec.Pending.ID != "":
		p := rec.Pending
		m.ID, m.Epoch, m.Parent = p.ID, p.Epoch, rec.Base
		m.Allocated, m.TakenAt, m.CrashConsistent = p.Allocated, p.TakenAt, p.CrashConsistent
	}
	return m, nil
}

// quietShot clones an image that nobody writes. Without clones the image itself is the shot: it stays
// as it is until the disk is attached again.
func (s *Store) quietShot(sh *Shot) error {
	path := s.image(sh.Key)
	image, err := os.Open(path)
	if err != nil {
		return err
	}
	if !s.reflink {
		sh.Image, sh.direct = image, true
		return nil
	}
	defer func() { _ = image.Close() }()
	path = s.file(sh.Key, shotImageName)
	if err := s.cloneFile(image, path); err != nil {
		return err
	}
	if err := s.at("seal.cloned"); err != nil {
		return err
	}
	sh.Image, err = os.Open(path)
	return err
}

// cloneFile makes path a clone of src, on stable storage, or leaves nothing.
func (s *Store) cloneFile(src *os.File, path string) error {
	dst, err := os.OpenFile(path+making, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err = extents.Clone(dst, src); err == nil {
		err = dst.Sync()
	}
	if cerr := dst.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = s.at("clone.made")
	}
	if err == nil {
		err = os.Rename(path+making, path)
	}
	if err != nil {
		_ = discard(path + making)
	}
	return err
}

// syncMount writes everything that the session wrote into the image; nothing is mounted is fine.
func syncMount(point string) error {
	d, err := openMount(point)
	if err != nil || d == nil {
		return err
	}
	defer func() { _ = d.Close() }()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return fmt.Errorf("sync disk: %w", err)
	}
	return nil
}

// openMount opens what is mounted at point, nil if nothing is.
func openMount(point string) (*os.File, error) {
	mounted, err := mounts.IsMount(point)
	if err != nil || !mounted {
		return nil, err
	}
	d, err := os.Open(point)
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	return d, nil
}
