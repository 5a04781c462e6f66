package disk

import (
	"context"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// TestADiskAtRestIsSealedInALaterEpoch: its session was placed elsewhere in vain since it was last
// active here. Until the manifest is committed, it stands for the epoch that was last active all the
// same: whatever comes of the save, nothing that was written is called stale.
func TestADiskAtRestIsSealedInALaterEpoch(t *testing.T) {
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	a := attach(t, s, fresh(1, 1))
	if err := s.Activate(key(1), ep(1)); err != nil {
		t.Fatal(err)
	}
	put(t, a, "f", "mine")
	_, _, err := s.SealShot(context.Background(), key(1), ep(3))
	wantKind(t, err, errkind.StaleEpoch) // it is in use
	if err := s.Detach(context.Background(), key(1)); err != nil {
		t.Fatal(err)
	}
	sh, m, err := s.SealShot(context.Background(), key(1), ep(3))
	if err != nil || sh == nil || m != nil {
		t.Fatalf("%v %v %v", sh, m, err)
	}
	if rec, err := s.Get(key(1)); err != nil || !rec.Usable("", ep(1)) && rec.Epoch != ep(1) {
		t.Errorf("%+v %v", rec, err)
	}
	man := Manifest{ID: "m3", Session: key(1).Session, Generation: key(1).Generation, Epoch: ep(3), TakenAt: time.Now()}
	if err := s.Propose(sh, man, []byte("index")); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(sh); err != nil {
		t.Fatal(err)
	}
	rec, err := s.Get(key(1))
	if err != nil || !rec.Usable("m3", ep(1)) || rec.Epoch != ep(1) || rec.Attached != ep(1) {
		t.Errorf("while it is proposed: %+v %v", rec, err)
	}
	if err := s.CommitHead(key(1), "m3"); err != nil {
		t.Fatal(err)
	}
	if rec, _ := s.Get(key(1)); rec.State != Clean || rec.Base != "m3" {
		t.Errorf("%+v", rec)
	}
	b := attach(t, s, Want{Key: key(1), Epoch: ep(4), Head: "m3", LastActive: ep(1)})
	if get(t, b, "f") != "mine" {
		t.Error("the file is gone")
	}
}

// TestSavable: at rest an image is saved if it is the session's newest, also one that was never written.
func TestSavable(t *testing.T) {
	none := ids.Epoch{}
	for _, c := range []struct {
		name       string
		rec        Record
		head       string
		lastActive ids.Epoch
		want       bool
	}{
		{"blank, of the epoch that was last active", Record{State: Blank, Attached: ep(2)}, "", ep(2), true},
		{"blank, of an epoch before the last active one", Record{State: Blank, Attached: ep(2)}, "", ep(3), false},
		{"blank, of a session that has a head", Record{State: Blank, Attached: ep(2)}, "m1", ep(2), false},
		{"blank, and the scheduler does not say which epoch was last active", Record{State: Blank, Attached: ep(2)}, "", none, false},
		{"blank and ephemeral", Record{State: Blank, Attached: ep(2), Ephemeral: true}, "", ep(2), false},
		{"dirty by the last active epoch", Record{State: Dirty, Base: "m1", Epoch: ep(2), Attached: ep(2)}, "m1", ep(2), true},
		{"dirty, and another epoch was active since", Record{State: Dirty, Base: "m1", Epoch: ep(2), Attached: ep(2)}, "m1", ep(3), false},
		{"dirty, and the scheduler does not say which epoch was last active", Record{State: Dirty, Base: "m1", Epoch: ep(2), Attached: ep(2)}, "m1", none, true},
		{"dirty, and the pending manifest became the head", Record{State: Dirty, Epoch: ep(2), Attached: ep(2), Pending: Pending{ID: "m1", Epoch: ep(2)}}, "m1", ep(2), true},
		{"dirty, and the head is another", Record{State: Dirty, Base: "m1", Epoch: ep(2), Attached: ep(2)}, "m2", ep(2), false},
		{"clean and the head", Record{State: Clean, Base: "m1", Epoch: ep(2)}, "m1", ep(3), true},
		{"clean without a head", Record{State: Clean}, "", ep(3), false},
		{"attached in a later epoch", Record{State: Dirty, Base: "m1", Epoch: ep(9), Attached: ep(10)}, "m1", ep(9), false},
	} {
		if got := c.rec.Savable(ep(9), c.head, c.lastActive); got != c.want {
			t.Errorf("%s: got %v", c.name, got)
		}
	}
}

// TestABlankDiskAtRestIsSealedInALaterEpoch: the session was active and wrote nothing, and a later wake
// of it failed. The blank image is the session's all the same, until it is saved and after.
func TestABlankDiskAtRestIsSealedInALaterEpoch(t *testing.T) {
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	attach(t, s, fresh(1, 1))
	if err := s.Detach(context.Background(), key(1)); err != nil {
		t.Fatal(err)
	}
	sh, m, err := s.SealShot(context.Background(), key(1), ep(3))
	if err != nil || sh == nil || m != nil {
		t.Fatalf("%v %v %v", sh, m, err)
	}
	if rec, err := s.Get(key(1)); err != nil || !rec.Usable("", ep(1)) || rec.Usable("", ep(3)) {
		t.Errorf("%+v %v", rec, err)
	}
	man := Manifest{ID: "m3", Session: key(1).Session, Generation: key(1).Generation, Epoch: ep(3), TakenAt: time.Now()}
	if err := s.Propose(sh, man, []byte("index")); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(sh); err != nil {
		t.Fatal(err)
	}
	if err := s.CommitHead(key(1), "m3"); err != nil {
		t.Fatal(err)
	}
	attach(t, s, Want{Key: key(1), Epoch: ep(4), Head: "m3", LastActive: ep(1)})
}

// TestOnlyASupersededImageIsDropped: never one in use, never one with what was written in the epoch that
// is named or in a later one, never one that the store may lack part of.
func TestOnlyASupersededImageIsDropped(t *testing.T) {
	for name, c := range map[string]struct {
		rec  Record
		as   uint64
		kept bool
	}{
		"dirty of an earlier epoch":       {Record{State: Dirty, Epoch: ep(2), Attached: ep(2)}, 3, false},
		"dirty of this epoch":             {Record{State: Dirty, Epoch: ep(3), Attached: ep(3)}, 3, true},
		"dirty, attached in this epoch":   {Record{State: Dirty, Epoch: ep(2), Attached: ep(3)}, 3, true},
		"dirty of a later epoch":          {Record{State: Dirty, Epoch: ep(4), Attached: ep(4)}, 3, true},
		"clean of an earlier epoch":       {Record{State: Clean, Epoch: ep(2), Attached: ep(2), Base: "m"}, 3, false},
		"clean of this epoch":             {Record{State: Clean, Epoch: ep(3), Attached: ep(3), Base: "m"}, 3, false},
		"clean of a later epoch":          {Record{State: Clean, Epoch: ep(4), Attached: ep(4), Base: "m"}, 3, true},
		"the store may lack part of it":   {Record{State: Clean, Epoch: ep(2), Attached: ep(2), Base: "m", Doubtful: true}, 3, true},
		"dirty, the store may lack parts": {Record{State: Dirty, Epoch: ep(2), Attached: ep(2), Doubtful: true}, 3, true},
	} {
		if err := c.rec.Droppable(ep(c.as)); (err != nil) != c.kept {
			t.Errorf("%s: %v", name, err)
		}
	}
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	wantKind(t, s.Drop(context.Background(), key(1), ep(9)), errkind.NotFound)
	attach(t, s, fresh(1, 1))
	wantKind(t, s.Drop(context.Background(), key(1), ep(9)), errkind.Busy)
	if err := s.Detach(context.Background(), key(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Drop(context.Background(), key(1), ep(9)); err != nil {
		t.Fatal(err)
	}
	if inv, err := s.List(); err != nil || len(inv.Disks) != 0 || len(inv.Strays) != 0 {
		t.Errorf("%+v %v", inv, err)
	}
}
