package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

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
