package saver

import (
	"context"
	"errors"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

// sweepEvery is how often the store is swept of what no snapshot of an awake session needs.
const sweepEvery = 10 * time.Minute

// Save makes the disk of an awake session, as it is now, the session's head. What a session sleeps
// or is deleted for ends it with Superseded.
func (s *Saver) Save(ctx context.Context, on Session) (Result, error) {
	const op = "save disk"
	began := time.Now()
	j := s.job(on.Key)
	leave, err := j.enter(ctx, false)
	if err != nil {
		return Result{}, errs.Wrap(op, on.Key.String(), err)
	}
	defer leave()
	ctx, done := j.interruptible(ctx)
	defer done()
	if ctx.Err() != nil {
		return Result{}, errs.Wrap(op, on.Key.String(), context.Cause(ctx))
	}
	if err := s.settle(ctx, on); err != nil {
		return Result{}, errs.Wrap(op, on.Key.String(), cause(ctx, err))
	}
	shot, err := s.disks.Shoot(ctx, on.Key, on.Epoch)
	if err != nil {
		return Result{}, errs.Wrap(op, on.Key.String(), cause(ctx, err))
	}
	shot.CrashConsistent = shot.CrashConsistent || on.Unflushed
	r, err := s.keep(ctx, on, j, shot)
	r.Took = time.Since(began)
	if err != nil {
		return r, errs.Wrap(op, on.Key.String(), cause(ctx, err))
	}
	if !r.Same && time.Since(j.swept) > sweepEvery {
		s.sweep(ctx, on, j, r.ID)
	}
	return r, nil
}

// Seal ends an epoch: it unmounts the disk and makes what it holds the session's head. All compute
// must be gone. A save under way is ended first. Idempotent for the same epoch.
func (s *Saver) Seal(ctx context.Context, on Session) (Result, error) {
	const op = "seal disk"
	began := time.Now()
	j := s.job(on.Key)
	leave, err := j.enter(ctx, true)
	if err != nil {
		return Result{}, errs.Wrap(op, on.Key.String(), err)
	}
	defer leave()
	if err := s.settle(ctx, on); err != nil {
		return Result{}, errs.Wrap(op, on.Key.String(), err)
	}
	shot, m, err := s.disks.SealShot(ctx, on.Key, on.Epoch)
	if err != nil {
		return Result{}, errs.Wrap(op, on.Key.String(), err)
	}
	if m != nil { // nothing was written, or all of it is in the store already
		r := Result{Info: infoOf(*m), Same: true}
		rec, err := s.disks.Get(on.Key)
		if err == nil && m.ID != "" && rec.Pending.ID == m.ID {
			err = s.commitPending(ctx, on, r.Info, rec.Pending.Sealed)
		}
		r.Took = time.Since(began)
		return r, errs.Wrap(op, on.Key.String(), err)
	}
	shot.CrashConsistent = shot.CrashConsistent || on.Unflushed
	r, err := s.keep(ctx, on, j, shot)
	r.Took = time.Since(began)
	return r, errs.Wrap(op, on.Key.String(), err)
}

// keep brings a shot to the store and makes it the head. It lets go of the shot.
func (s *Saver) keep(ctx context.Context, on Session, j *job, shot *disk.Shot) (r Result, err error) {
	defer func() { err = errors.Join(err, s.disks.Release(shot)) }()
	ctx, stop := lostWith(ctx, shot)
	defer stop()
	r.Frozen = shot.Frozen
	key, err := s.key(ctx, on, j)
	if err != nil {
		return r, err
	}
	src, err := s.source(ctx, on, key, shot)
	if err != nil {
		return r, err
	}
	ix, stats, err := s.depot.Save(ctx, on.Disk(), key, src, archive.Meta{
		Epoch: on.Epoch, TakenAt: shot.TakenAt, Image: shot.ImageDigest, CrashConsistent: shot.CrashConsistent, Keep: on.Keep,
		VMWritten: shot.VMWritten,
	})
	r.Stats = stats
	if err != nil {
		return r, cause(ctx, err)
	}
	r.Info = ix.Info()
	if r.Same = src.Base != nil && r.ID == src.Base.Info().ID; r.Same {
		return r, s.disks.Unchanged(shot)
	}
	if err := s.out.Check("save.propose"); err != nil {
		return r, err
	}
	if err := s.disks.Propose(shot, manifestOf(on, r.Info), ix.Encode()); err != nil {
		return r, err
	}
	return r, s.commitPending(ctx, on, r.Info, shot.Sealed)
}

// lostWith ends the context when the pool needs the shot's space back.
func lostWith(ctx context.Context, shot *disk.Shot) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-shot.Lost():
			cancel(errs.E("save disk", errkind.NoCapacity, shot.Key.String(), "the host's disk pool has no room for a snapshot now"))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// source says what of a shot must be looked at. What the host does not remember of the parent is
// read from the store; then everything is read, and only what is new is uploaded.
func (s *Saver) source(ctx context.Context, on Session, key archive.Key, shot *disk.Shot) (archive.Source, error) {
	src := archive.Source{Image: shot.Image, Size: shot.Size, Anew: shot.Anew}
	var err error
	if src.Data, err = extents.Data(shot.Image); err != nil {
		return src, errs.E("look at a disk", errkind.Internal, on.Key.String(), err)
	}
	if shot.Parent == "" {
		return src, nil
	}
	if base, err := archive.DecodeIndex(shot.BaseIndex); err == nil && base.Info().ID == shot.Parent {
		src.Base = base
		if src.Changed = s.changed(on, shot); src.Changed == nil {
			s.log.Debug("everything of a disk is read again", "disk", on.Key)
		}
		return src, nil
	}
	src.Base, err = s.depot.Load(ctx, on.Disk(), key, shot.Parent)
	return src, err
}

// changed says where a shot may differ from its parent; nil: nobody knows.
func (s *Saver) changed(on Session, shot *disk.Shot) []extents.Range {
	if shot.Base == nil {
		return nil
	}
	out, err := extents.Changed(shot.Base, shot.Image)
	if err != nil {
		if !errors.Is(err, extents.ErrUnknown) {
			s.log.Warn("cannot compare two clones of a disk", "disk", on.Key, "error", err)
		}
		return nil
	}
	if out == nil {
		out = []extents.Range{} // nothing changed, which is not "unknown"
	}
	return out
}

// commitPending makes a proposed manifest the head, or finds out that it never can be. sealed: the disk
// has not been written to since it was taken.
func (s *Saver) commitPending(ctx context.Context, on Session, m archive.Info, sealed bool) error {
	if err := s.out.Check("save.commit"); err != nil {
		return err
	}
	err := s.out.Commit(ctx, on, m, sealed)
	switch {
	case err == nil:
		return s.disks.CommitHead(on.Key, m.ID)
	case errs.Is(err, errkind.Conflict):
		return errors.Join(err, s.disks.Withdraw(on.Key, m.ID))
	}
	// Also a refusal as stale says nothing of an earlier try whose answer was lost: the proposal stays,
	// so that this image is known to stand for that head if the session comes back to it.
	return err
}

// settle finds out what became of a proposal that an earlier save left open. Its objects are in the
// store, so committing it again is right whether or not it was committed before.
func (s *Saver) settle(ctx context.Context, on Session) error {
	rec, err := s.disks.Get(on.Key)
	if err != nil {
		return err
	}
	p := rec.Pending
	switch {
	case p.ID == "" || p.Sealed && p.Epoch == on.Epoch: // a sealed one is what SealShot answers with
		return nil
	case p.ID == on.Head: // committed; the answer was lost
		return s.disks.CommitHead(on.Key, p.ID)
	case p.Epoch != on.Epoch:
		return s.disks.Withdraw(on.Key, p.ID) // nobody can commit it any more
	}
	info := archive.Info{ID: p.ID, Parent: rec.Base, Epoch: p.Epoch, TakenAt: p.TakenAt, Size: rec.Size, Allocated: p.Allocated,
		Image: rec.Image, CrashConsistent: p.CrashConsistent, VMWritten: rec.VMWritten}
	if err := s.commitPending(ctx, on, info, p.Sealed); err != nil && !errs.Is(err, errkind.Conflict) {
		return err
	}
	return nil // it is the head, or withdrawn
}

// cause says why a save ended rather than that it was cancelled.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); err != nil && c != nil && errors.Is(err, context.Canceled) {
		return c
	}
	return err
}

// sweep removes what no snapshot needs. It may fail: the next one goes on.
func (s *Saver) sweep(ctx context.Context, on Session, j *job, head string) {
	swept, err := s.depot.Sweep(ctx, on.Disk(), on.Epoch, head, func() error { return s.out.Check("save.sweep") })
	if err != nil {
		if ctx.Err() == nil {
			s.log.Warn("the store was not swept", "disk", on.Key, "error", err)
		}
		return
	}
	j.swept = time.Now()
	if swept.Packs+swept.Manifests > 0 {
		s.log.Debug("swept the store", "disk", on.Key, "packs", swept.Packs, "manifests", swept.Manifests, "bytes", swept.Bytes)
	}
}

func manifestOf(on Session, i archive.Info) disk.Manifest {
	return disk.Manifest{
		ID: i.ID, Session: on.Session, Generation: on.Generation, Epoch: i.Epoch, Parent: i.Parent, Image: i.Image,
		Size: i.Size, Allocated: i.Allocated, TakenAt: i.TakenAt, CrashConsistent: i.CrashConsistent,
		VMWritten: i.VMWritten,
	}
}

func infoOf(m disk.Manifest) archive.Info {
	return archive.Info{ID: m.ID, Parent: m.Parent, Epoch: m.Epoch, TakenAt: m.TakenAt, Size: m.Size, Allocated: m.Allocated,
		Image: m.Image, CrashConsistent: m.CrashConsistent, VMWritten: m.VMWritten}
}
