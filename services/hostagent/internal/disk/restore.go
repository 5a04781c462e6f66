package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Restore makes the local image of the manifest rec.Base, which is the session's head, from what fill
// writes; plain is the manifest's plain index. Afterwards the disk is clean and Attach takes it. rec
// names session, generation, Base, Size, Image; rec.Epoch is the last epoch that was ever active. An
// image that is stale against Base and Epoch is replaced, and only once the new one is whole. Kinds:
// Invalid, Busy (attached), Conflict (the local image is the newest: attach it), NoCapacity, and those
// of fill. After an error or a crash nothing of the attempt stays.
func (s *Store) Restore(ctx context.Context, rec Record, plain []byte, fill func(context.Context, *os.File) error) error {
	const op = "restore disk"
	k := rec.Key()
	if err := checkRestore(op, rec); err != nil {
		return err
	}
	defer s.lock(k)()
	if s.isActive(k) {
		return errs.E(op, errkind.Busy, k.String(), "the disk is attached")
	}
	rec, known, err := s.replaces(op, rec)
	if err != nil {
		return err
	}
	path := s.file(k, restoringName)
	defer s.restoreOf(k)()
	if err := s.admit(op, k, rec.Size, path); err != nil {
		return err
	}
	defer s.release(k)
	if err := os.MkdirAll(s.folder(k), 0o700); err != nil {
		return errs.E(op, errkind.Internal, k.String(), err)
	}
	if err = s.lose(k); err == nil {
		err = s.restore(ctx, rec, known, index{rec.Base, rec.Size, plain}, fill)
	}
	if err == nil {
		return nil
	}
	err = errs.E(op, kindOf(err), k.String(), err)
	if known {
		return errors.Join(err, discard(path))
	}
	return errors.Join(err, discard(path), s.unclaim(k))
}

func checkRestore(op string, rec Record) error {
	if _, err := ids.ParseSessionKey(string(rec.Session)); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	if rec.Generation.IsZero() || !ids.IsToken(rec.Base) || rec.Image == "" || rec.Ephemeral {
		return errs.E(op, errkind.Invalid, rec.Key().String(), "generation, manifest and image digest of a session that is kept must be given")
	}
	return checkSize(rec.Size)
}

// replaces completes the record of a restored disk, and refuses to replace one that may not be lost.
// known is true if this host has a record of the disk.
func (s *Store) replaces(op string, rec Record) (next Record, known bool, err error) {
	k := rec.Key()
	old, err := s.load(k)
	known = !errs.Is(err, errkind.NotFound)
	if _, ierr := os.Lstat(s.image(k)); err == nil && ierr == nil && old.Usable(rec.Base, rec.Epoch) {
		return rec, known, errs.Errorf(op, errkind.Conflict, "the local disk %s is the newest (%s, epoch %s): it is not replaced", k, old.State, old.Epoch)
	}
	return Record{
		Format: Format, Session: rec.Session, Generation: rec.Generation, State: Clean, Epoch: rec.Epoch,
		Base: rec.Base, AsOf: rec.AsOf, Size: rec.Size, Image: rec.Image, VMWritten: rec.VMWritten,
		Slept: time.Now().UTC().Truncate(time.Second),
	}, known, nil
}

// restoreOf keeps a sweep away from the folder until the returned function is called.
func (s *Store) restoreOf(k Key) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restoring[k] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.restoring, k)
	}
}

// restore fills the image and puts it in the place of the old one. The image goes before its record: in
// between, the record is one that no head and no epoch makes usable. The old one would not do: when a
// snapshot is brought back it may stand for what still is the head.
func (s *Store) restore(ctx context.Context, rec Record, known bool, x index, fill func(context.Context, *os.File) error) error {
	k := rec.Key()
	path := s.file(k, restoringName)
	image, err := s.filled(ctx, path, rec.Size, fill)
	if err != nil {
		return err
	}
	defer func() { _ = image.Close() }()
	if err := s.at("restore.filled"); err != nil {
		return err
	}
	for _, name := range []string{baseImageName, shotImageName} {
		if err := s.dropClone(k, name); err != nil {
			return err
		}
	}
	if err := s.writeIndex(k, baseIndexName, x); err != nil {
		return err
	}
	if err := s.at("restore.index"); err != nil {
		return err
	}
	if known {
		if err := s.save(rec.void()); err != nil {
			return err
		}
	}
	if err := s.at("restore.void"); err != nil {
		return err
	}
	if err := os.Rename(path, s.image(k)); err != nil {
		return fmt.Errorf("replace image: %w", err)
	}
	if err := errors.Join(syncDir(s.folder(k)), syncDir(filepath.Join(s.dir, "sessions"))); err != nil {
		return err
	}
	if err := s.at("restore.renamed"); err != nil {
		return err
	}
	if err := s.save(rec); err != nil {
		return err
	}
	if err := s.at("restore.record"); err != nil || !s.reflink {
		return err
	}
	if err := s.cloneFile(image, s.file(k, baseImageName)); err != nil {
		s.log.Warn("no clone of a restored disk; its next snapshot reads all of it", "session", k.Session, "error", err)
	}
	return nil
}

// filled makes a whole image on stable storage.
func (s *Store) filled(ctx context.Context, path string, size uint64, fill func(context.Context, *os.File) error) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err = f.Truncate(int64(size)); err == nil {
		err = s.at("restore.began")
	}
	if err == nil {
		err = fill(ctx, f)
	}
	if err == nil {
		err = f.Sync()
	}
	var st os.FileInfo
	if err == nil {
		st, err = f.Stat()
	}
	if err == nil && uint64(st.Size()) != size {
		err = errs.Errorf("restore disk", errkind.DataLoss, "the restored image has %d bytes, the manifest says %d", st.Size(), size)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
