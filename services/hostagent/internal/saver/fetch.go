package saver

import (
	"context"
	"os"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// Wanted is the disk that a wake needs.
type Wanted struct {
	// Head of the session's manifests.
	Head string
	// LastActive is the last epoch that was ever active: a local image that may hold more than the head
	// is not replaced.
	LastActive ids.Epoch
	// Unsaved says that the session was active after Head: the only copy of what it wrote then may be an
	// image here that cannot be read as it is, which is not replaced.
	Unsaved bool
	// Snapshot to bring back; empty: the head itself.
	Snapshot string
	// Progress is told bytes done and in all, from any goroutine.
	Progress func(done, total uint64)
}

// Fetched is a local image that holds exactly Head.
type Fetched struct {
	// Head is the session's head now: another one than was wanted if a snapshot was brought back.
	Head string
	// AsOf is when the files were as they are.
	AsOf time.Time
}

// Fetch makes the local image of a session from the store, instead of a stale one if there is any.
// The session must be waking here in on.Epoch, and its disk not attached. A snapshot that is brought
// back becomes the head, after all of it was read and found whole.
func (s *Saver) Fetch(ctx context.Context, on Session, want Wanted) (Fetched, error) {
	const op = "restore disk"
	if want.Head == "" {
		return Fetched{}, errs.E(op, errkind.NotFound, on.Key.String(), "the session has no manifest")
	}
	j := s.job(on.Key)
	leave, err := j.enter(ctx, true)
	if err != nil {
		return Fetched{}, errs.Wrap(op, on.Key.String(), err)
	}
	defer leave()
	if _, err := s.disks.Get(on.Key); want.Unsaved && errs.Is(err, errkind.DataLoss) {
		return Fetched{}, errs.Wrap(op, on.Key.String(), err)
	}
	key, err := s.key(ctx, on, j)
	if err != nil {
		return Fetched{}, errs.Wrap(op, on.Key.String(), err)
	}
	ix, err := s.depot.Load(ctx, on.Disk(), key, want.Head)
	if err != nil {
		return Fetched{}, errs.Wrap(op, on.Key.String(), err)
	}
	out := Fetched{Head: want.Head, AsOf: ix.Info().TakenAt}
	if want.Snapshot != "" && want.Snapshot != want.Head {
		if ix, out, err = s.rewind(ctx, on, key, ix, want.Snapshot); err != nil {
			return Fetched{}, errs.Wrap(op, on.Key.String(), err)
		}
	}
	if err := s.out.Check("restore.image"); err != nil {
		return Fetched{}, errs.Wrap(op, on.Key.String(), err)
	}
	if err := s.local(ctx, on, want, key, ix); err != nil {
		return Fetched{}, errs.Wrap(op, on.Key.String(), err)
	}
	if out.Head == want.Head {
		return out, nil
	}
	// Only now is it certain that all of the snapshot can be read.
	if err := s.out.Check("restore.commit"); err != nil {
		return Fetched{}, errs.Wrap(op, on.Key.String(), err)
	}
	return out, errs.Wrap(op, on.Key.String(), s.out.Commit(ctx, on, ix.Info(), false))
}

// local makes the image of a manifest on this host.
func (s *Saver) local(ctx context.Context, on Session, want Wanted, key archive.Key, ix *archive.Index) error {
	i := ix.Info()
	rec := disk.Record{
		Format: disk.Format, Session: on.Session, Generation: on.Generation, State: disk.Clean,
		Epoch: want.LastActive, Base: i.ID, AsOf: i.TakenAt, Size: i.Size, Image: i.Image,
		VMWritten: i.VMWritten,
	}
	return s.disks.Restore(ctx, rec, ix.Encode(), func(ctx context.Context, dst *os.File) error {
		return s.depot.Restore(ctx, key, ix, dst, want.Progress)
	})
}

// rewind makes a manifest with the content of an earlier one. It is no head yet.
func (s *Saver) rewind(ctx context.Context, on Session, key archive.Key, head *archive.Index, snapshot string) (*archive.Index, Fetched, error) {
	old, err := s.depot.Load(ctx, on.Disk(), key, snapshot)
	if err != nil {
		return nil, Fetched{}, err
	}
	ix, err := s.depot.Rewind(ctx, on.Disk(), key, head, snapshot, archive.Meta{Epoch: on.Epoch, TakenAt: time.Now(), Keep: on.Keep})
	if err != nil {
		return nil, Fetched{}, err
	}
	return ix, Fetched{Head: ix.Info().ID, AsOf: old.Info().TakenAt}, nil
}
