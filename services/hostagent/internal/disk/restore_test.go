package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

// archived makes a copy of what a store would have of a disk with one file in it.
func archived(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "archived")
	s := openWith(t, Config{Dir: t.TempDir()}, nil)
	put(t, awake(t, s, 99, 1), "f", text)
	sh, _, err := s.SealShot(t.Context(), key(99), ep(1))
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(extents.CopySparse(t.Context(), f, sh.Image), f.Close(), s.Release(sh)); err != nil {
		t.Fatal(err)
	}
	return path
}

// fillFrom copies an archived disk as a store would write it.
func fillFrom(path string) func(context.Context, *os.File) error {
	return func(ctx context.Context, dst *os.File) error {
		src, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = src.Close() }()
		return extents.CopySparse(ctx, dst, src)
	}
}

func headOf(n int, base string, last uint64) Record {
	return Record{
		Session: key(n).Session, Generation: key(n).Generation, Base: base, Epoch: ep(last), Size: testSize, Image: "sha256:image",
	}
}

func TestARestoredDiskWakesAndItsNextSnapshotReadsOnlyWhatChanged(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		from := archived(t, "saved")
		if err := s.Restore(t.Context(), headOf(1, "m7", 3), []byte("i7"), fillFrom(from)); err != nil {
			t.Fatal(err)
		}
		if r := record(t, s, 1); r.State != Clean || r.Base != "m7" {
			t.Errorf("got %+v", r)
		}
		a := wake(t, s, 1, 5, "m7", 3)
		if get(t, a, "f") != "saved" || a.Created {
			t.Error("another disk")
		}
		wantKind(t, s.Restore(t.Context(), headOf(1, "m7", 3), nil, fillFrom(from)), errkind.Busy)
		activate(t, s, 1, 5)
		put(t, a, "g", "x")
		sh := shoot(t, s, 1, 5)
		if sh.Parent != "m7" || string(sh.BaseIndex) != "i7" || (sh.Base != nil) != cfg.Reflink {
			t.Errorf("got %+v", sh)
		}
		saved(t, s, sh, "m8")
	})
}

func TestARestoreReplacesWhatIsStaleAndNothingElse(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		from := archived(t, "saved")
		put(t, awake(t, s, 1, 1), "f", "unsaved")
		if err := s.Detach(t.Context(), key(1)); err != nil {
			t.Fatal(err)
		}
		wantKind(t, s.Restore(t.Context(), headOf(1, "", 1), nil, fillFrom(from)), errkind.Invalid)
		// The dirty disk grew from no manifest; with m1 as head it is stale.
		failed := errors.New("a chunk is missing")
		err := s.Restore(t.Context(), headOf(1, "m1", 1), nil, func(_ context.Context, f *os.File) error {
			_, _ = f.WriteAt([]byte("half"), 0)
			return failed
		})
		if !errors.Is(err, failed) {
			t.Fatal(err)
		}
		if got := names(t, s, 1); len(got) != 2 {
			t.Errorf("left: %v", got)
		}
		if a := wake(t, s, 1, 2, "", 1); get(t, a, "f") != "unsaved" {
			t.Error("a failed restore harmed the disk that was there")
		}
		slept2(t, s, 1, 2, "m1")
		wantKind(t, s.Restore(t.Context(), headOf(1, "m1", 2), nil, fillFrom(from)), errkind.Conflict)
		if err := s.Restore(t.Context(), headOf(1, "m2", 2), nil, fillFrom(from)); err != nil { // restored to an earlier time
			t.Fatal(err)
		}
		if a := wake(t, s, 1, 3, "m2", 2); get(t, a, "f") != "saved" {
			t.Error("the stale disk woke")
		}
	})
}

func slept2(t testing.TB, s *Store, n int, epoch uint64, id string) {
	t.Helper()
	activate(t, s, n, epoch)
	slept(t, s, n, epoch, id)
}

func TestARestoreThatIsNotWholeIsRefused(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		err := s.Restore(t.Context(), headOf(1, "m1", 1), nil, func(_ context.Context, f *os.File) error { return f.Truncate(testSize / 2) })
		wantKind(t, err, errkind.DataLoss)
		err = s.Restore(t.Context(), headOf(1, "m1", 1), nil, func(context.Context, *os.File) error { return unix.ENOSPC })
		wantKind(t, err, errkind.NoCapacity)
		big := headOf(1, "m1", 1)
		big.Size = MaxSize
		wantKind(t, s.Restore(t.Context(), big, nil, nil), errkind.NoCapacity)
		if inv, err := s.List(); err != nil || len(inv.Disks)+len(inv.Strays) != 0 {
			t.Errorf("left %+v, %v", inv, err)
		}
		if sp, err := s.Space(); err != nil || sp.Promised != 0 {
			t.Errorf("space stays promised: %+v, %v", sp, err)
		}
	})
}

// TestAnEarlierSnapshotThatWasBroughtBackInPartIsNotTakenForTheHead: the head moves only after all of
// the snapshot is here. Until then the image that is there stands for the head, or for nothing.
func TestAnEarlierSnapshotThatWasBroughtBackInPartIsNotTakenForTheHead(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		from := archived(t, "earlier")
		for _, step := range []string{"restore.filled", "restore.index", "restore.void", "restore.renamed", "restore.record"} {
			t.Run(step, func(t *testing.T) {
				s := openWith(t, Config{Dir: filepath.Join(cfg.Dir, step), Reflink: cfg.Reflink}, nil)
				put(t, awake(t, s, 1, 1), "f", "newest")
				slept(t, s, 1, 1, "m1")
				ended := errors.New("it ended here")
				s.fault = func(at string) error {
					if at == step {
						return ended
					}
					return nil
				}
				if err := s.Restore(t.Context(), headOf(1, "m2", 1), []byte("i2"), fillFrom(from)); !errors.Is(err, ended) {
					t.Fatal(err)
				}
				s.fault = nil
				a, err := s.Attach(t.Context(), Want{Key: key(1), Epoch: ep(2), Head: "m1", LastActive: ep(1)})
				if err == nil && get(t, a, "f") != "newest" {
					t.Fatal("an older disk was handed out as the newest")
				}
				if err != nil {
					wantKind(t, err, errkind.StaleEpoch)
				}
			})
		}
	})
}

// TestARestoredDiskSaysOfWhenItIsUntilItIsWritten: a wake that failed after the restore is followed by
// one that finds the image here, and must say the same.
func TestARestoredDiskSaysOfWhenItIsUntilItIsWritten(t *testing.T) {
	s := openWith(t, Config{Dir: t.TempDir()}, nil)
	want := headOf(1, "m7", 3)
	want.AsOf = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	if err := s.Restore(t.Context(), want, nil, fillFrom(archived(t, "saved"))); err != nil {
		t.Fatal(err)
	}
	for epoch := uint64(4); epoch <= 5; epoch++ {
		if a := wake(t, s, 1, epoch, "m7", 3); !a.AsOf.Equal(want.AsOf) {
			t.Errorf("epoch %d: as of %s", epoch, a.AsOf)
		}
		if err := s.Detach(t.Context(), key(1)); err != nil {
			t.Fatal(err)
		}
	}
	wake(t, s, 1, 6, "m7", 3)
	activate(t, s, 1, 6)
	if r := record(t, s, 1); !r.AsOf.IsZero() {
		t.Errorf("a disk that was written is still as of %s", r.AsOf)
	}
}
