package disk

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/errkind"
)

func TestAViewIsStillAndReadOnlyAndLeavesNothing(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := awake(t, s, 1, 1)
		put(t, a, "f", "one")
		v, err := s.View(t.Context(), key(1), ep(1))
		if err != nil {
			t.Fatal(err)
		}
		put(t, a, "f", "two")
		if b, err := os.ReadFile(filepath.Join(v.Root, Upper, "f")); err != nil || string(b) != "one" {
			t.Errorf("got %q, %v", b, err)
		}
		if err := os.WriteFile(filepath.Join(v.Root, Upper, "g"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("written: %v", err)
		}
		_, err = s.View(t.Context(), key(1), ep(1))
		wantKind(t, err, errkind.Busy)
		if inv, err := s.List(); err != nil || len(inv.Strays) != 0 {
			t.Errorf("got %+v, %v", inv, err)
		}
		if _, err := s.Sweep(t.Context(), func(Disk) Verdict { return Keep }); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(v.Root, Upper, "f")); err != nil {
			t.Errorf("a sweep took an open view: %v", err)
		}
		for range 2 {
			if err := v.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if left, err := os.ReadDir(filepath.Join(s.dir, "views")); err != nil || len(left) != 0 {
			t.Errorf("left %v, %v", left, err)
		}
		if err := s.MarkVMWritten(key(1)); err != nil {
			t.Fatal(err)
		}
		_, err = s.View(t.Context(), key(1), ep(1))
		wantKind(t, err, errkind.Refused)
	})
}

// A deleted session leaves no clone and no evidence, whatever was open.
func TestDeleteTakesEveryCloneAndView(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		awake(t, s, 1, 1)
		saved(t, s, shoot(t, s, 1, 1), "m1")
		v, err := s.View(t.Context(), key(1), ep(1))
		if err != nil {
			t.Fatal(err)
		}
		sh := shoot(t, s, 1, 1)
		if err := s.Delete(t.Context(), key(1)); err != nil {
			t.Fatal(err)
		}
		<-sh.Lost()
		<-v.Lost()
		wantKind(t, v.Close(), errkind.NoCapacity)
		for _, dir := range []string{"sessions", "views"} {
			if left, err := os.ReadDir(filepath.Join(s.dir, dir)); err != nil || len(left) != 0 {
				t.Errorf("%s: left %v, %v", dir, left, err)
			}
		}
		if err := s.Release(sh); err != nil {
			t.Error(err)
		}
		if err := s.Propose(sh, manifestOf(sh, "m2"), nil); err == nil {
			t.Error("proposed after the delete")
		}
	})
}
