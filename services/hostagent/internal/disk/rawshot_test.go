package disk

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

func TestAShotOfARawDiskIsStillAndTheMachineGoesOn(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		_, g := running(t, s, 1, 1)
		g.put("f", "one")
		sh := shoot(t, s, 1, 1)
		if !slices.Equal(g.heard(), []string{"still", "release"}) || sh.CrashConsistent || !sh.VMWritten {
			t.Errorf("heard %v, got %+v", g.heard(), sh)
		}
		g.put("f", "two") // it goes on
		if got := inShot(t, sh, "f"); got != "one" {
			t.Errorf("the shot moved: %q", got)
		}
		saved(t, s, sh, "m1")
		if !dirty(t, s, 1) {
			t.Error("written to after the shot, yet not dirty")
		}
		g.crash = true
		sh = shoot(t, s, 1, 1)
		if !sh.CrashConsistent || sh.Parent != "m1" || (sh.Base != nil) != cfg.Reflink {
			t.Errorf("a paused machine gives %+v", sh)
		}
		saved(t, s, sh, "m2")
		if dirty(t, s, 1) == cfg.Reflink {
			t.Error("what a freeze itself writes counts as a change")
		}
		g.put("g", "three")
		g.sync()
		if !dirty(t, s, 1) {
			t.Error("written to, yet not dirty")
		}
	})
}

// Whatever a guest does not do, the shot is of one moment, or there is none.
func TestAMachineThatCannotBeStoppedIsClonedWhole(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		_, g := running(t, s, 1, 1)
		g.put("f", "one")
		g.sync()
		try := func(what string) {
			t.Helper()
			sh, err := s.Shoot(t.Context(), key(1), ep(1))
			if !cfg.Reflink && what != "lied" {
				if err == nil {
					t.Errorf("%s: a copy was made while it was written", what)
				}
				return
			}
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if got := inShot(t, sh, "f"); got != "one" || !sh.CrashConsistent {
				t.Errorf("%s: got %q, crash-consistent %v", what, got, sh.CrashConsistent)
			}
			if err := s.Release(sh); err != nil {
				t.Fatal(err)
			}
		}
		g.err = errs.E("freeze", errkind.Deadline, "", "the guest says nothing")
		try("refused")
		g.err, g.lied = nil, errors.New("it went on by itself")
		try("lied")
		g.lied = nil
		if err := s.SetWriters(key(1), ep(1), nil); err != nil {
			t.Fatal(err)
		}
		try("nobody")
	})
}

func TestAGuestThatAnswersLateIsReleased(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		s.freezeTime = 20 * time.Millisecond
		_, g := running(t, s, 1, 1)
		g.late = make(chan struct{})
		sh, err := s.Shoot(t.Context(), key(1), ep(1))
		if cfg.Reflink && (err != nil || !sh.CrashConsistent) {
			t.Fatalf("got %+v, %v", sh, err)
		}
		close(g.late)
		s.mu.Lock()
		h := s.holds[key(1)]
		s.mu.Unlock()
		<-h.done
		if !slices.Equal(g.heard(), []string{"still", "release"}) {
			t.Errorf("heard %v", g.heard())
		}
		g.put("f", "it runs")
		if err := s.Release(sh); err != nil {
			t.Fatal(err)
		}
	})
}

func TestAFullPoolPausesMachines(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		s.minder.close() // it would see that there is room
		_, g := running(t, s, 1, 1)
		s.freezeAll(Space{})
		if got := g.heard(); !slices.Equal(got, []string{"pause"}) {
			t.Errorf("heard %v", got)
		}
		_, err := s.Shoot(t.Context(), key(1), ep(1))
		wantKind(t, err, errkind.NoCapacity)
		s.thawAll()
		if got := g.heard(); !slices.Equal(got, []string{"pause", "go on"}) {
			t.Errorf("heard %v", got)
		}
		g.put("f", "it runs")
		s.freezeAll(Space{})
		if err := s.LetGo(key(1)); err != nil {
			t.Fatal(err)
		}
		g.put("f", "to its end")
		s.minder = startMinder(t.Context(), s)
	})
}
