package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// guest stands for a virtual machine: its kernel is this one, through a mount of its own.
type guest struct {
	t     testing.TB
	point string
	image string

	mu     sync.Mutex
	calls  []string
	crash  bool          // it does not answer and is paused
	err    error         // of Still
	late   chan struct{} // Still waits for it
	lied   error         // of release
	closed bool
}

func boot(t testing.TB, a Attachment) *guest {
	t.Helper()
	g := &guest{t: t, point: t.TempDir(), image: a.File}
	dev, err := loopdev.Attach(a.File, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dev.Close() }()
	if err := unix.Mount(dev.Name(), g.point, "ext4", 0, "noinit_itable,discard"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.off)
	return g
}

// off ends the machine.
func (g *guest) off() {
	if g.closed {
		return
	}
	g.closed = true
	_ = freezeMount(g.point, false)
	if err := unix.Unmount(g.point, 0); err != nil {
		g.t.Error(err)
	}
	if loopdev.WaitFree(g.image, loopReclaim) != nil { // another process copied the mount table meanwhile
		mounts.Reclaim(g.point)
	}
}

func (g *guest) put(name, text string) {
	g.t.Helper()
	if err := os.WriteFile(filepath.Join(g.point, Upper, name), []byte(text), 0o644); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guest) sync() {
	g.t.Helper()
	if err := syncMount(g.point); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guest) note(what string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls = append(g.calls, what)
}

func (g *guest) heard() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.calls)
}

func (g *guest) Still(ctx context.Context) (func() error, bool, error) {
	g.note("still")
	if g.late != nil {
		<-g.late
	}
	if g.err != nil {
		return nil, false, g.err
	}
	if err := freezeMount(g.point, true); err != nil {
		return nil, false, err
	}
	return func() error {
		g.note("release")
		return errors.Join(freezeMount(g.point, false), g.lied)
	}, g.crash, nil
}

func (g *guest) Pause(context.Context) (func() error, error) {
	g.note("pause")
	if err := freezeMount(g.point, true); err != nil {
		return nil, err
	}
	return func() error { g.note("go on"); return freezeMount(g.point, false) }, nil
}

func raw(n int, epoch uint64) Want {
	w := fresh(n, epoch)
	w.Raw = true
	return w
}

func rawAgain(n int, epoch uint64, head string, last uint64) Want {
	return Want{Key: key(n), Epoch: ep(epoch), Head: head, LastActive: ep(last), Raw: true}
}

// running attaches a raw disk, activates it and boots a machine on it.
func running(t testing.TB, s *Store, n int, epoch uint64) (Attachment, *guest) {
	t.Helper()
	a := attach(t, s, raw(n, epoch))
	activate(t, s, n, epoch)
	g := boot(t, a)
	if err := s.SetWriters(key(n), ep(epoch), g); err != nil {
		t.Fatal(err)
	}
	return a, g
}

func TestARawDiskIsHandedOutAsAFileAndNeverMounted(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a, g := running(t, s, 1, 1)
		if a.Root != "" || a.File != s.image(key(1)) || !a.Created || !a.VMWritten {
			t.Errorf("got %+v", a)
		}
		if r := record(t, s, 1); !r.VMWritten || !r.Raw {
			t.Errorf("the record does not say who has it: %+v", r)
		}
		for _, name := range []string{Upper, Work} {
			if st, err := os.Stat(filepath.Join(g.point, name)); err != nil || !st.IsDir() {
				t.Errorf("no folder %s: %v", name, err)
			}
		}
		if m, _ := mounts.Below(filepath.Join(s.dir, "mnt")); len(m) > 1 {
			t.Errorf("mounted: %v", m)
		}
		if b := attach(t, s, raw(1, 1)); b.File != a.File {
			t.Errorf("a repeated attach gives %+v", b)
		}
		_, err := s.Attach(t.Context(), fresh(1, 1))
		wantKind(t, err, errkind.Busy)
		_, err = s.View(t.Context(), key(1), ep(1))
		wantKind(t, err, errkind.Refused)
		_, err = s.Usage(key(1))
		wantKind(t, err, errkind.Unimplemented)
		if inv, err := s.List(); err != nil || len(inv.Strays) != 0 || !inv.Disks[0].Mounted {
			t.Errorf("got %+v, %v", inv, err)
		}
		g.off()
		if err := s.Detach(t.Context(), key(1)); err != nil {
			t.Fatal(err)
		}
		if r := record(t, s, 1); !r.VMWritten || r.Raw {
			t.Errorf("after the detach: %+v", r)
		}
		_, err = s.Attach(t.Context(), Want{Key: key(1), Epoch: ep(2), LastActive: ep(1)})
		wantKind(t, err, errkind.Refused)
		if !strings.Contains(err.Error(), errkind.VMWritten) {
			t.Errorf("it does not say why: %v", err)
		}
		attach(t, s, rawAgain(1, 2, "", 1))
	})
}

// The image of a wake in a virtual machine that came to nothing binds no session that has no files.
func TestAFreshDiskIsBlankAgainAfterAMachineThatNeverRan(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := attach(t, s, raw(1, 1))
		g := boot(t, a)
		g.put("f", "of nobody")
		g.off()
		if err := s.Detach(t.Context(), key(1)); err != nil {
			t.Fatal(err)
		}
		b := attach(t, s, fresh(1, 2))
		if _, err := os.Stat(filepath.Join(b.Root, Upper, "f")); !errors.Is(err, os.ErrNotExist) || b.VMWritten || !b.Created {
			t.Errorf("the image was used again: %v, %+v", err, b)
		}
	})
}

var rawPoints = []string{"disk.claim", "claim.renamed", "disk.record", "record.written", "raw.recorded", "disk.hand"}

func TestAFailureAtAnyStepOfARawDiskLeavesNothing(t *testing.T) {
	needRoot(t)
	for _, point := range rawPoints {
		t.Run(point, func(t *testing.T) {
			s := openTest(t, t.TempDir(), nil)
			s.fault = faultAt(point, false)
			s.run.Fault, s.run.Twice = s.fault, true
			_, err := s.Attach(t.Context(), raw(1, 1))
			if !errors.Is(err, errCrash) {
				t.Fatalf("got %v", err)
			}
			if inv, err := s.List(); err != nil || len(inv.Disks)+len(inv.Strays) != 0 {
				t.Errorf("left %+v, %v", inv, err)
			}
			if sp, _ := s.Space(); sp.Promised != 0 {
				t.Errorf("space stays promised: %+v", sp)
			}
		})
	}
}

// A disk that containers wrote goes to a virtual machine: whatever crashes on the way, its files are
// there for the machine, and nobody else is given them once a machine may have had them.
func TestACrashOnTheWayToAMachineKeepsTheFiles(t *testing.T) {
	needRoot(t)
	for _, point := range append(rawPoints[2:], "mount.loop", "mount.mounted", "raw.prepared", "disk.prepare", "raw.back") {
		t.Run(point, func(t *testing.T) {
			ctx, dir := context.Background(), t.TempDir()
			first, err := open(ctx, Config{Dir: dir}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer first.blanks.close()
			a := attach(t, first, fresh(1, 1))
			activate(t, first, 1, 1)
			put(t, a, "f", "mine")
			first.fault = faultAt(point, true)
			first.run.Fault = first.fault
			handed := false
			if _, crashed := survive(func() error {
				if err := first.Detach(ctx, key(1)); err != nil {
					return err
				}
				if _, err := first.Attach(ctx, rawAgain(1, 2, "", 1)); err != nil {
					return err
				}
				handed = true
				return first.Detach(ctx, key(1))
			}); !crashed {
				t.Fatal("no crash")
			}
			s := openTest(t, dir, nil)
			if _, err := s.Sweep(ctx, func(Disk) Verdict { return KeepDetached }); err != nil {
				t.Fatal(err)
			}
			if handed {
				_, err := s.Attach(ctx, Want{Key: key(1), Epoch: ep(3), LastActive: ep(1)})
				wantKind(t, err, errkind.Refused)
			}
			b := attach(t, s, rawAgain(1, 3, "", 1))
			g := boot(t, b)
			if text, err := os.ReadFile(filepath.Join(g.point, Upper, "f")); err != nil || string(text) != "mine" {
				t.Errorf("got %q, %v", text, err)
			}
			g.off()
		})
	}
}

func TestADiskIsNotTakenBackWhileAMachineWritesIt(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a, g := running(t, s, 1, 1)
		vm, err := os.OpenFile(a.File, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = vm.Close() }()
		g.off()
		began := time.Now()
		_, _, err = s.SealShot(t.Context(), key(1), ep(1))
		wantKind(t, err, errkind.Busy)
		if time.Since(began) < loopGrace {
			t.Error("it did not wait for the machine's end")
		}
		_ = vm.Close()
		sh, _, err := s.SealShot(t.Context(), key(1), ep(1))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Release(sh); err != nil {
			t.Fatal(err)
		}
	})
}

func TestARestartFindsWhatAMachineHas(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		_, g := running(t, s, 1, 1)
		g.put("f", "one")
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		next := openWith(t, cfg, nil)
		if sp, err := next.Space(); err != nil || sp.Promised == 0 {
			t.Errorf("its space is not promised: %+v, %v", sp, err)
		}
		if err := next.SetWriters(key(1), ep(1), g); err != nil {
			t.Fatal(err)
		}
		wantKind(t, next.SetWriters(key(1), ep(2), g), errkind.StaleEpoch)
		sh := shoot(t, next, 1, 1)
		if got := inShot(t, sh, "f"); got != "one" || sh.CrashConsistent {
			t.Errorf("got %q, %+v", got, sh)
		}
		if err := next.Release(sh); err != nil {
			t.Fatal(err)
		}
		g.off()
		if err := next.Detach(t.Context(), key(1)); err != nil {
			t.Fatal(err)
		}
		s.release(key(1)) // the first store is dead
	})
}

func TestARawImageIsOnlyMadeLonger(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a, g := running(t, s, 1, 1)
		if n, err := s.Grow(t.Context(), key(1), testSize+32<<20); err != nil || n != testSize+32<<20 {
			t.Fatalf("got %d, %v", n, err)
		}
		g.off()
		if err := s.Detach(t.Context(), key(1)); err != nil {
			t.Fatal(err)
		}
		before := sumOf(t, a.File)
		w := rawAgain(1, 2, "", 1)
		w.Size = testSize + 64<<20
		b := attach(t, s, w)
		st, err := os.Stat(b.File)
		if err != nil || uint64(st.Size()) != w.Size || b.Size != w.Size {
			t.Fatalf("%d bytes, %v, record %d", st.Size(), err, b.Size)
		}
		if err := os.Truncate(a.File, testSize+32<<20); err != nil { // only its end was added
			t.Fatal(err)
		}
		if sumOf(t, a.File) != before {
			t.Error("the host changed what a machine had written")
		}
	})
}

// A sleep after the machine was killed has what was on the disk, and a restore says who wrote it.
func TestARawDiskIsSealedAndRestored(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a, g := running(t, s, 1, 1)
		g.put("f", "one")
		g.off()
		text := filepath.Join(t.TempDir(), "stored")
		sh, m, err := s.SealShot(t.Context(), key(1), ep(1))
		if err != nil || m != nil || !sh.Sealed || !sh.VMWritten {
			t.Fatalf("got %+v, %+v, %v", sh, m, err)
		}
		if err := os.Link(a.File, text); err != nil { // the same bytes from elsewhere
			b, rerr := os.ReadFile(a.File)
			if err = errors.Join(rerr, os.WriteFile(text, b, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		saved(t, s, sh, "m1")
		if _, m, err = s.SealShot(t.Context(), key(1), ep(1)); err != nil || m == nil || !m.VMWritten || m.ID != "m1" {
			t.Fatalf("a clean disk: %+v, %v", m, err)
		}
		rec := headOf(2, "m1", 1)
		rec.VMWritten = true
		st, err := os.Stat(text)
		if err != nil {
			t.Fatal(err)
		}
		rec.Size = uint64(st.Size())
		if err := s.Restore(t.Context(), rec, nil, fillFrom(text)); err != nil {
			t.Fatal(err)
		}
		_, err = s.Attach(t.Context(), Want{Key: key(2), Epoch: ep(2), Head: "m1", LastActive: ep(1)})
		wantKind(t, err, errkind.Refused)
		g = boot(t, attach(t, s, rawAgain(2, 2, "m1", 1)))
		if b, err := os.ReadFile(filepath.Join(g.point, Upper, "f")); err != nil || string(b) != "one" {
			t.Errorf("got %q, %v", b, err)
		}
		g.off()
	})
}

// What is older than the session is the store's to replace, whoever wrote it; and a machine that is gone
// when the host comes back has nothing any more.
func TestAStaleImageOfAMachineBindsNobody(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := attach(t, s, fresh(1, 1))
		activate(t, s, 1, 1)
		put(t, a, "f", "one")
		text := archived(t, "newer")
		slept(t, s, 1, 1, "m1")
		attach(t, s, rawAgain(1, 2, "m1", 1)) // and that machine never ran
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		next := openWith(t, cfg, nil)
		if r := record(t, next, 1); r.Raw || !r.VMWritten {
			t.Errorf("after a restart: %+v", r)
		}
		_, err := next.Attach(t.Context(), Want{Key: key(1), Epoch: ep(3), Head: "m1", LastActive: ep(1)})
		wantKind(t, err, errkind.Refused)
		// It was active elsewhere meanwhile, in a container.
		_, err = next.Attach(t.Context(), Want{Key: key(1), Epoch: ep(5), Head: "m2", LastActive: ep(4)})
		wantKind(t, err, errkind.StaleEpoch)
		rec := headOf(1, "m2", 4)
		st, err := os.Stat(text)
		if err != nil {
			t.Fatal(err)
		}
		rec.Size = uint64(st.Size())
		if err := next.Restore(t.Context(), rec, nil, fillFrom(text)); err != nil {
			t.Fatal(err)
		}
		attach(t, next, Want{Key: key(1), Epoch: ep(5), Head: "m2", LastActive: ep(4)})
		s.release(key(1)) // the first store is dead
	})
}

// What emulates a machine can do anything to the file that it has open. A file that it made longer holds
// no more than the disk once it is taken back, or found after a restart, or handed out again, and at once where
// room is short.
func TestAnImageThatItsMachineMadeLongerIsCutOff(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		for name, end := range map[string]func(*Store) error{
			"taken back": func(s *Store) error { return s.Detach(t.Context(), key(1)) },
			"found": func(s *Store) error {
				d, err := s.Get(key(1))
				return errors.Join(err, s.adoptRaw(Disk{ID: key(1), Record: d}))
			},
			"still written, and the pool is tight": func(s *Store) error {
				s.cutOff()
				return nil
			},
			"handed out": func(s *Store) error {
				rec, err := s.Get(key(1))
				return errors.Join(err, s.give(rec))
			},
		} {
			s := openWith(t, cfg, nil)
			a, g := running(t, s, 1, 1)
			g.off()
			if err := os.Truncate(a.File, 1<<40); err != nil {
				t.Fatal(err)
			}
			if err := end(s); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if st, err := os.Stat(a.File); err != nil || uint64(st.Size()) != a.Size {
				t.Errorf("%s: %d bytes, %v", name, st.Size(), err)
			}
			if err := errors.Join(s.Detach(t.Context(), key(1)), s.Delete(t.Context(), key(1))); err != nil {
				t.Fatal(err)
			}
		}
	})
}
