package saver

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// TestTheLastGoodCopyIsKeptAndSavedAgain: after a verification found the store damaged, the image on the
// host is not evicted, also not by a process that starts later, until a snapshot stored all of it again.
func TestTheLastGoodCopyIsKeptAndSavedAgain(t *testing.T) {
	w := newWorld(t)
	w.mustWake(1)
	w.write(1)
	w.mustSeal(1)
	k := session(1).Key
	if err := w.disks.Doubt(k); err != nil {
		t.Fatal(err)
	}
	w.end()
	w.begin()
	if err := w.disks.Evict(t.Context(), k); !errs.Is(err, errkind.Refused) {
		t.Fatalf("the image was evicted: %v", err)
	}
	w.mustWake(2)
	r, err := w.saver.Seal(t.Context(), session(2))
	if err != nil || r.Chunks == 0 || r.Reused != 0 {
		t.Fatalf("%d of %d chunks lean on what is damaged; error %v", r.Reused, r.Chunks, err)
	}
	if err := w.disks.Evict(t.Context(), k); err != nil {
		t.Errorf("after a whole snapshot the image stays: %v", err)
	}
	w.mustWake(3)
	if got := w.holds(); got != 1 {
		t.Errorf("the disk holds state %d, want 1", got)
	}
}

// TestUnsavedFilesUnderAnUnreadableRecordAreNotReplaced: the only copy of what was written after the head
// may be an image whose record this version cannot read.
func TestUnsavedFilesUnderAnUnreadableRecordAreNotReplaced(t *testing.T) {
	w := newWorld(t)
	w.mustWake(1)
	w.write(1)
	if _, err := w.saver.Save(t.Context(), session(1)); err != nil {
		t.Fatal(err)
	}
	w.write(2)
	w.end()
	folder := filepath.Join(w.dir, "sessions", session(1).Key.String())
	if err := os.WriteFile(filepath.Join(folder, "record.json"), []byte(`{"format":9}`), 0o600); err != nil {
		t.Fatal(err)
	}
	w.begin()
	w.sched.epoch = session(2).Epoch
	want := Wanted{Head: w.sched.head, LastActive: w.sched.lastActive, Unsaved: true}
	if _, err := w.saver.Fetch(t.Context(), session(2), want); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("the wake ended with %v", err)
	}
	if _, err := os.Stat(filepath.Join(folder, "disk.img")); err != nil {
		t.Errorf("the image is gone: %v", err)
	}
	want.Unsaved = false // all of it is in the store
	if _, err := w.saver.Fetch(t.Context(), session(2), want); err != nil {
		t.Errorf("a saved session does not come back: %v", err)
	}
}
