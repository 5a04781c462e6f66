package disk

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// inShot reads a file of the session out of a shot, through a copy: a shot is read-only.
func inShot(t *testing.T, sh *Shot, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "copy")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(extents.CopySparse(context.Background(), f, sh.Image), f.Close()); err != nil {
		t.Fatal(err)
	}
	point := t.TempDir()
	dev, err := loopdev.Attach(path, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dev.Close() }()
	if err := unix.Mount(dev.Name(), point, "ext4", unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(point, 0) }()
	b, err := os.ReadFile(filepath.Join(point, Upper, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func dirty(t *testing.T, s *Store, n int) bool {
	t.Helper()
	d, err := s.Dirty(key(n))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestCheckpointsChainAndTheSessionGoesOn(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := attach(t, s, fresh(1, 1))
		if dirty(t, s, 1) {
			t.Error("dirty before anything was written")
		}
		activate(t, s, 1, 1)
		put(t, a, "f", "one")
		if !dirty(t, s, 1) {
			t.Error("written to, yet not dirty")
		}
		sh := shoot(t, s, 1, 1)
		put(t, a, "f", "two") // the disk is thawed
		if sh.Parent != "" || sh.Base != nil || sh.BaseIndex != nil || sh.CrashConsistent || sh.Sealed {
			t.Errorf("got %+v", sh)
		}
		if _, err := s.Shoot(t.Context(), key(1), ep(1)); !errs.Is(err, errkind.Busy) {
			t.Errorf("two shots at a time: %v", err)
		}
		if got := inShot(t, sh, "f"); got != "one" {
			t.Errorf("the shot moved: %q", got)
		}
		saved(t, s, sh, "m1")
		if !dirty(t, s, 1) {
			t.Error("written to after the shot, yet not dirty")
		}
		sh = shoot(t, s, 1, 1)
		if sh.Parent != "m1" || string(sh.BaseIndex) != "index of m1" || (sh.Base != nil) != cfg.Reflink {
			t.Errorf("got parent %q, index %q, base %v", sh.Parent, sh.BaseIndex, sh.Base)
		}
		saved(t, s, sh, "m2")
		if dirty(t, s, 1) {
			t.Error("dirty without a write after the shot")
		}
		if r := record(t, s, 1); r.Base != "m2" || r.State != Dirty || r.Pending.ID != "" {
			t.Errorf("got %+v", r)
		}
		if inv, err := s.List(); err != nil || len(inv.Strays) != 0 || inv.Disks[0].HasBase != cfg.Reflink {
			t.Errorf("got %+v, %v", inv, err)
		}
	})
}

func TestACrashBetweenManifestAndMarkKeepsTheDisk(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		for _, head := range []string{"m1", "m2"} {
			dir := filepath.Join(cfg.Dir, head)
			s := openWith(t, Config{Dir: dir, Reflink: cfg.Reflink}, nil)
			a := awake(t, s, 1, 1)
			saved(t, s, shoot(t, s, 1, 1), "m1")
			put(t, a, "f", "mine")
			sh := shoot(t, s, 1, 1)
			if err := s.Propose(sh, manifestOf(sh, "m2"), nil); err != nil {
				t.Fatal(err)
			}
			if err := s.Release(sh); err != nil {
				t.Fatal(err)
			}
			put(t, a, "g", "later")
			if _, err := s.Shoot(t.Context(), key(1), ep(1)); !errs.Is(err, errkind.Conflict) {
				t.Errorf("a shot beside a pending manifest: %v", err)
			}
			if _, _, err := s.SealShot(t.Context(), key(1), ep(1)); !errs.Is(err, errkind.Conflict) {
				t.Errorf("sealed beside a pending manifest: %v", err)
			}
			if err := s.Detach(t.Context(), key(1)); err != nil {
				t.Fatal(err)
			}
			a = wake(t, s, 1, 2, head, 1)
			if get(t, a, "f") != "mine" || get(t, a, "g") != "later" {
				t.Error("an older file")
			}
			r := record(t, s, 1)
			if r.Base != head || r.Pending.ID != "" || r.State != Dirty {
				t.Errorf("with head %s: %+v", head, r)
			}
			if names(t, s, 1)[baseImageName] != (cfg.Reflink && head != "") || names(t, s, 1)[shotImageName] {
				t.Errorf("with head %s: %v", head, names(t, s, 1))
			}
		}
	})
}

func TestCommitTellsWhatItIsGiven(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		awake(t, s, 1, 1)
		sh := shoot(t, s, 1, 1)
		m := manifestOf(sh, "m1")
		for _, bad := range []Manifest{{}, {ID: "../x", Epoch: ep(1)}, {ID: "m1", Epoch: ep(2)}, {ID: "m1", Epoch: ep(1), Parent: "m0"}} {
			wantKind(t, s.Propose(sh, bad, nil), errkind.Invalid)
		}
		wantKind(t, s.CommitHead(key(1), "m1"), errkind.StaleEpoch)
		wantKind(t, s.CommitHead(key(1), ""), errkind.StaleEpoch)
		for range 2 {
			if err := s.Propose(sh, m, nil); err != nil {
				t.Fatal(err)
			}
		}
		wantKind(t, s.CommitHead(key(1), "m2"), errkind.StaleEpoch)
		wantKind(t, s.Withdraw(key(1), "m2"), errkind.StaleEpoch)
		for range 2 {
			if err := s.Withdraw(key(1), "m1"); err != nil {
				t.Fatal(err)
			}
		}
		wantKind(t, s.CommitHead(key(1), "m1"), errkind.StaleEpoch)
		for range 2 {
			if err := s.Release(sh); err != nil {
				t.Fatal(err)
			}
		}
		wantKind(t, s.Propose(sh, m, nil), errkind.NoCapacity)
		if got := names(t, s, 1); len(got) != 2 {
			t.Errorf("left: %v", got)
		}
	})
}

func TestSleepIsSavedOnceAndWakes(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := awake(t, s, 1, 1)
		put(t, a, "f", "one")
		sh, m, err := s.SealShot(t.Context(), key(1), ep(1))
		if err != nil || m != nil || !sh.Sealed || inShot(t, sh, "f") != "one" {
			t.Fatalf("got %v, %v, %v", sh, m, err)
		}
		if err := s.Propose(sh, manifestOf(sh, "m1"), []byte("i")); err != nil {
			t.Fatal(err)
		}
		if err := s.Release(sh); err != nil {
			t.Fatal(err)
		}
		// Whoever proposed it died: the same manifest is offered again, nothing is read.
		sh, m, err = s.SealShot(t.Context(), key(1), ep(1))
		if err != nil || sh != nil || m.ID != "m1" || m.Epoch != ep(1) || m.Parent != "" || m.Allocated == 0 {
			t.Fatalf("got %v, %+v, %v", sh, m, err)
		}
		for range 2 {
			if err := s.CommitHead(key(1), "m1"); err != nil {
				t.Fatal(err)
			}
		}
		if r := record(t, s, 1); r.State != Clean || r.Base != "m1" || r.Slept.IsZero() {
			t.Errorf("got %+v", r)
		}
		a = wake(t, s, 1, 2, "m1", 1)
		if get(t, a, "f") != "one" || dirty(t, s, 1) {
			t.Error("woke with another disk, or a dirty one")
		}
		sh, m, err = s.SealShot(t.Context(), key(1), ep(2))
		if err != nil || sh != nil || m.ID != "m1" {
			t.Errorf("nothing was written: %v, %v, %v", sh, m, err)
		}
		_, _, err = s.SealShot(t.Context(), key(1), ep(1))
		wantKind(t, err, errkind.StaleEpoch)
	})
}

// A shot of a disk that is attached again is of no use to anybody: it must not become a head.
func TestAWakeEndsTheShotOfASleepThatWasGivenUp(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		awake(t, s, 1, 1)
		sh, _, err := s.SealShot(t.Context(), key(1), ep(1))
		if err != nil {
			t.Fatal(err)
		}
		wake(t, s, 1, 1, "", 1)
		<-sh.Lost()
		wantKind(t, s.Propose(sh, manifestOf(sh, "m1"), nil), errkind.NoCapacity)
		if names(t, s, 1)[shotImageName] {
			t.Error("its clone stays")
		}
	})
}

// A disk that was written to and holds the same again is clean without another manifest.
func TestAShotThatHoldsNothingNewSettlesTheDisk(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := awake(t, s, 1, 1)
		first := shoot(t, s, 1, 1)
		wantKind(t, s.Unchanged(first), errkind.StaleEpoch) // there is no head yet
		saved(t, s, first, "m1")
		put(t, a, "f", "x")
		sh := shoot(t, s, 1, 1)
		for _, err := range []error{s.Unchanged(sh), s.Release(sh)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		wantKind(t, s.Unchanged(sh), errkind.NoCapacity)
		if dirty(t, s, 1) {
			t.Error("dirty")
		}
		sh, _, err := s.SealShot(t.Context(), key(1), ep(1))
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{s.Unchanged(sh), s.Unchanged(sh), s.Release(sh)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		if r := record(t, s, 1); r.State != Clean || r.Base != "m1" {
			t.Errorf("got %+v", r)
		}
	})
}

// What is read after somebody else let the writers go on is not of one moment.
func TestAThawFromElsewhereMakesAShotCrashConsistent(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		awake(t, s, 1, 1)
		s.fault = func(step string) error {
			if step == "shot.frozen" {
				return freezeMount(s.mountPoint(key(1)), false)
			}
			return nil
		}
		if sh := shoot(t, s, 1, 1); !sh.CrashConsistent {
			t.Errorf("got %+v", sh)
		}
	})
}

func TestAnEphemeralSessionHasNoSnapshots(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		w := fresh(1, 1)
		w.Ephemeral = true
		attach(t, s, w)
		activate(t, s, 1, 1)
		_, err := s.Shoot(t.Context(), key(1), ep(1))
		wantKind(t, err, errkind.Refused)
		sh, m, err := s.SealShot(t.Context(), key(1), ep(1))
		if err != nil || sh != nil || m.ID != "" {
			t.Errorf("got %v, %v, %v", sh, m, err)
		}
	})
}

// A file system that does not freeze in time delays nobody, and is thawed whenever the kernel answers.
func TestAFreezeThatHangsIsLeftToItselfAndThawed(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		marks := make(chan string, 10)
		cfg.MarkFrozen = func(Key, string) (func(), error) {
			marks <- "mark"
			return func() { marks <- "unmark" }, nil
		}
		s := openWith(t, cfg, nil)
		a := awake(t, s, 1, 1)
		put(t, a, "f", "synced")
		goOn := make(chan struct{})
		s.freezeTime = time.Millisecond
		s.freezeFile = func(f *os.File) error { <-goOn; return freezeFile(f) }
		sh := shoot(t, s, 1, 1)
		if !sh.CrashConsistent || inShot(t, sh, "f") != "synced" {
			t.Errorf("got %+v", sh)
		}
		if err := s.Release(sh); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Shoot(t.Context(), key(1), ep(1)); !errs.Is(err, errkind.Busy) {
			t.Errorf("a shot while the kernel still freezes: %v", err)
		}
		close(goOn)
		if got := <-marks + <-marks; got != "markunmark" {
			t.Errorf("got %s", got)
		}
		s.freezeTime, s.freezeFile = freezeTime, freezeFile
		put(t, a, "g", "written") // hangs for ever if it is frozen
	})
}

func TestADiskIsThawedAfterEveryFailure(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := awake(t, s, 1, 1)
		points := []string{"shot.settled", "shot.frozen", "shot.cloned", "shot.synced", "shot.named"}
		if cfg.Reflink {
			points = append(points, "shot.followed", "shot.caughtup")
		}
		for _, point := range points {
			for _, crash := range []bool{false, true} {
				s.fault = faultAt(point, crash)
				err, crashed := survive(func() error { _, err := s.Shoot(t.Context(), key(1), ep(1)); return err })
				if crashed != crash || !crash && !errors.Is(err, errCrash) {
					t.Fatalf("%s: %v, %v", point, err, crashed)
				}
				s.fault = nil
				put(t, a, "f", strings.Repeat(point, 100))
			}
		}
		s.markFrozen = func(Key, string) (func(), error) { return nil, errCrash }
		_, err := s.Shoot(t.Context(), key(1), ep(1))
		wantKind(t, err, errkind.Unavailable)
		put(t, a, "f", "x")
	})
}

// Frozen for under 100 ms with much to write: what is dirty is written before, while the session goes on.
func TestLittleIsLeftToWriteWhenTheDiskFreezes(t *testing.T) {
	dir := xfsDir(t)
	s := openWith(t, Config{Dir: dir, Reflink: true}, nil)
	w := fresh(1, 1)
	w.Size = 256 << 20
	a := attach(t, s, w)
	activate(t, s, 1, 1)
	saved(t, s, shoot(t, s, 1, 1), "m1")
	put(t, a, "big", strings.Repeat("0123456789abcdef", 4<<20))
	sh := shoot(t, s, 1, 1)
	t.Logf("64 MiB were dirty: frozen for %v", sh.Frozen)
	var sum uint64
	changed, err := extents.Changed(sh.Base, sh.Image)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range changed {
		sum += r.Len
	}
	if sum < 64<<20 || sum > 80<<20 {
		t.Errorf("%d bytes changed", sum)
	}
	saved(t, s, sh, "m2")
}

func sumOf(t testing.TB, path string) [32]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return [32]byte(h.Sum(nil))
}

func TestADeathInACheckpointLeavesNoFrozenDisk(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	dead, err := open(context.Background(), Config{Dir: dir}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer dead.blanks.close()
	a := attach(t, dead, fresh(1, 1))
	if err := freezeMount(a.Root, true); err != nil {
		t.Fatal(err)
	}
	openTest(t, dir, nil)
	done := make(chan struct{})
	go func() { put(t, a, "f", "x"); close(done) }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("the disk is still frozen")
		_ = freezeMount(a.Root, false)
	}
}
