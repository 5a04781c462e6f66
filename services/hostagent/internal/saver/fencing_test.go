package saver

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// TestNothingIsSavedWithoutALease: at each place that changes what others see, or the disk's record, the
// lease is asked; without one nothing is committed, and the next try goes on. It fails when a new place
// has no row.
func TestNothingIsSavedWithoutALease(t *testing.T) {
	rows := map[string]func(t *testing.T, w *world) error{
		"save.propose":   func(t *testing.T, w *world) error { _, err := w.saver.Save(t.Context(), session(1)); return err },
		"save.commit":    func(t *testing.T, w *world) error { _, err := w.saver.Seal(t.Context(), session(1)); return err },
		"restore.image":  func(t *testing.T, w *world) error { return w.bringBack(t, false) },
		"restore.commit": func(t *testing.T, w *world) error { return w.bringBack(t, true) },
		"save.sweep":     nil, // a sweep removes only what no snapshot needs; archive asks before each removal
	}
	for _, place := range placesIn(t, ".") {
		if _, ok := rows[place]; !ok {
			t.Errorf("%s has no row", place)
		}
	}
	for place, act := range rows {
		if act == nil {
			continue
		}
		t.Run(place, func(t *testing.T) {
			w := newWorld(t)
			w.mustWake(1)
			w.write(1)
			if _, err := w.saver.Save(t.Context(), session(1)); err != nil {
				t.Fatal(err)
			}
			w.write(2)
			lost := errors.New("no lease")
			w.check = func(at string) error {
				if at == place {
					return lost
				}
				return nil
			}
			head := w.sched.head
			if err := act(t, w); !errors.Is(err, lost) {
				t.Fatalf("without a lease: %v", err)
			}
			if !strings.HasPrefix(place, "restore") && w.sched.head != head {
				t.Errorf("the head moved from %s to %s", head, w.sched.head)
			}
			w.check = nil
			if err := act(t, w); err != nil {
				t.Errorf("with a lease again: %v", err)
			}
		})
	}
}

// bringBack has the session sleep and fetches its head, or its first snapshot.
func (w *world) bringBack(t *testing.T, earlier bool) error {
	if w.sched.epoch == session(1).Epoch {
		w.first = w.sched.head
		if _, err := w.saver.Seal(t.Context(), session(1)); err != nil {
			return err
		}
		w.sched.epoch = session(2).Epoch
		if !earlier {
			w.forget()
		}
	}
	want := Wanted{Head: w.sched.head, LastActive: w.sched.lastActive}
	if earlier {
		want.Snapshot = w.first
	}
	_, err := w.saver.Fetch(t.Context(), session(2), want)
	return err
}

// TestAProposalOfAnEarlierEpochIsSettledByTheHead: a disk at rest has a proposal of an epoch that is over; the head
// says what became of it.
func TestAProposalOfAnEarlierEpochIsSettledByTheHead(t *testing.T) {
	for _, committed := range []bool{true, false} {
		w := newWorld(t)
		w.mustWake(1)
		w.write(1)
		passed := w.killAt(map[bool]string{true: "committed", false: "commit"}[committed])
		if _, err := w.saver.Seal(t.Context(), session(1)); err == nil || !*passed {
			t.Fatalf("%v %v", err, *passed)
		}
		w.end()
		w.begin()
		w.sched.epoch = session(3).Epoch
		on := session(3)
		on.Head = w.sched.head
		r, err := w.saver.Seal(t.Context(), on)
		if err != nil || r.ID == "" || r.ID != w.sched.head {
			t.Fatalf("committed %v: %+v %v, head %q", committed, r.Info, err, w.sched.head)
		}
		if rec, err := w.disks.Get(on.Key); err != nil || rec.State != disk.Clean || rec.Base != w.sched.head {
			t.Errorf("committed %v: %+v %v", committed, rec, err)
		}
		w.elsewhere(4, 1)
	}
}

// TestACommittedSnapshotOfAnEarlierEpochBecomesTheBase: the answer to a commit of an awake session was
// lost, and the session is saved at rest in a later epoch. The snapshot is the head, so the next manifest
// has it as its parent; if it were withdrawn, every commit would be refused as a conflict.
func TestACommittedSnapshotOfAnEarlierEpochBecomesTheBase(t *testing.T) {
	w := newWorld(t)
	w.mustWake(1)
	w.write(1)
	passed := w.killAt("committed")
	if _, err := w.saver.Save(t.Context(), session(1)); err == nil || !*passed {
		t.Fatalf("%v %v", err, *passed)
	}
	w.at = nil
	w.write(2)
	w.end()
	w.begin()
	w.sched.epoch = session(3).Epoch
	on := session(3)
	on.Head = w.sched.head
	r, err := w.saver.Seal(t.Context(), on)
	if err != nil || r.ID != w.sched.head || r.Parent != on.Head {
		t.Fatalf("%+v %v, head %q after %q", r.Info, err, w.sched.head, on.Head)
	}
	w.elsewhere(4, 2)
}

// placesIn lists the places that this package's code asks its lease for.
func placesIn(t *testing.T, dir string) (out []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`out\.Check\("([^"]+)"\)`).FindAllStringSubmatch(string(b), -1) {
			out = append(out, m[1])
		}
	}
	if len(out) < 5 {
		t.Fatalf("only %v were found", out)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
