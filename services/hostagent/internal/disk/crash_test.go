package disk

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// faultAt fails at one point; with crash it unwinds everything as a killed process would.
func faultAt(point string, crash bool) func(string) error {
	return func(step string) error {
		if step != point {
			return nil
		}
		if crash {
			panic(errCrash)
		}
		return errCrash
	}
}

// survive runs f and reports whether it crashed on purpose.
func survive(f func() error) (err error, crashed bool) {
	defer func() {
		if r := recover(); r != nil {
			if e, ok := r.(error); !ok || !errors.Is(e, errCrash) {
				panic(r)
			}
			crashed = true
		}
	}()
	return f(), false
}

var attachPoints = []string{
	"disk.claim", "claim.renamed", "disk.record", "record.written", "mount.loop", "mount.mounted", "disk.mount",
}

func TestAFailureAtAnyStepOfAFreshDiskLeavesNothing(t *testing.T) {
	needRoot(t)
	for _, point := range attachPoints {
		t.Run(point, func(t *testing.T) {
			s := openTest(t, t.TempDir(), nil)
			s.fault = faultAt(point, false)
			s.run.Fault, s.run.Twice = s.fault, true
			_, err := s.Attach(context.Background(), fresh(1, 1))
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

func TestACrashAtAnyStepOfAFreshDiskHeals(t *testing.T) {
	needRoot(t)
	for _, point := range attachPoints {
		t.Run(point, func(t *testing.T) {
			dir := t.TempDir()
			dead, err := open(context.Background(), Config{Dir: dir}, faultAt(point, true))
			if err != nil {
				t.Fatal(err)
			}
			defer dead.blanks.close()
			if err, crashed := survive(func() error { _, err := dead.Attach(context.Background(), fresh(1, 1)); return err }); !crashed {
				t.Fatalf("no crash: %v", err)
			}
			s := openTest(t, dir, nil)
			if _, err := s.Sweep(context.Background(), func(Disk) Verdict { return KeepDetached }); err != nil {
				t.Fatalf("sweep: %v", err)
			}
			if inv, _ := s.List(); len(inv.Strays) != 0 {
				t.Errorf("strays after the sweep: %v", inv.Strays)
			}
			a := attach(t, s, fresh(1, 2))
			if !a.Created {
				t.Error("not a fresh disk")
			}
		})
	}
}

// A session that was active never loses its newest disk to a crash of the wake, the sleep, or a
// wake that failed.
func TestACrashAtAnyStepOfAKnownDiskKeepsTheFiles(t *testing.T) {
	needRoot(t)
	points := append([]string{"seal.detached"}, attachPoints[2:]...)
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			ctx, dir := context.Background(), t.TempDir()
			first, err := open(ctx, Config{Dir: dir}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer first.blanks.close()
			a := attach(t, first, fresh(1, 1))
			if err := first.Activate(key(1), ep(1)); err != nil {
				t.Fatal(err)
			}
			put(t, a, "f", "mine")
			first.fault = faultAt(point, true)
			first.run.Fault = first.fault
			_, crashed := survive(func() error {
				if _, _, err := first.SealShot(ctx, key(1), ep(1)); err != nil {
					return err
				}
				_, err := first.Attach(ctx, Want{Key: key(1), Epoch: ep(2), LastActive: ep(1)})
				return err
			})
			if !crashed {
				t.Fatal("no crash")
			}
			s := openTest(t, dir, nil)
			if _, err := s.Sweep(ctx, func(Disk) Verdict { return KeepDetached }); err != nil {
				t.Fatal(err)
			}
			b := attach(t, s, Want{Key: key(1), Epoch: ep(3), LastActive: ep(1)})
			if get(t, b, "f") != "mine" {
				t.Error("the file is gone")
			}
		})
	}
}

func TestSealIsBusyWhileSomethingUsesTheDisk(t *testing.T) {
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	a := attach(t, s, fresh(1, 1))
	f, err := os.Create(filepath.Join(a.Root, Upper, "open"))
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = s.SealShot(context.Background(), key(1), ep(1))
	wantKind(t, err, errkind.Busy)
	_ = f.Close()
	if _, _, err = s.SealShot(context.Background(), key(1), ep(1)); err != nil {
		t.Fatal(err)
	}
	if _, _, err = s.SealShot(context.Background(), key(1), ep(0)); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("an earlier epoch was sealed: %v", err)
	}
}

func TestBeneathFollowsNothingThatASessionPlanted(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "secret")
	for _, err := range []error{
		os.WriteFile(outside, []byte("host"), 0o600),
		os.Symlink(outside, filepath.Join(dir, "link")),
		os.Symlink(filepath.Dir(outside), filepath.Join(dir, "folder")),
		os.WriteFile(filepath.Join(dir, "plain"), []byte("ok"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	root, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	for _, path := range []string{"link", "folder/secret", "../x", "/etc/passwd", "plain/../../x"} {
		if f, err := Beneath(root, path, unix.O_RDONLY, 0); err == nil {
			t.Errorf("%s was opened", path)
			_ = f.Close()
		}
	}
	f, err := Beneath(root, "plain", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
}

// Any process of the host may copy the mount table while a disk is mounted; the session falls asleep
// all the same.
func TestSealWhileAnotherProcessHasACopyOfTheMount(t *testing.T) {
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	attach(t, s, fresh(1, 1))
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if _, _, err := s.SealShot(context.Background(), key(1), ep(1)); err != nil {
		t.Error(err)
	}
}
