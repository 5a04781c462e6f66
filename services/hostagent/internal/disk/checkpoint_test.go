package disk

import (
	"context"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

func TestCheckpointsChainAndTheSessionGoesOn(t *testing.T) {
	needRoot(t)
	ctx := context.Background()
	s := openTest(t, t.TempDir(), nil)
	a := attach(t, s, fresh(1, 1))
	if err := s.Activate(key(1), ep(1)); err != nil {
		t.Fatal(err)
	}
	put(t, a, "f", "one")
	first, err := s.Checkpoint(ctx, key(1), ep(1))
	if err != nil {
		t.Fatal(err)
	}
	put(t, a, "f", "two") // the disk is thawed
	if same, err := s.Checkpoint(ctx, key(1), ep(1)); err != nil || same.ID != first.ID {
		t.Errorf("not committed, yet another manifest: %v, %v", same, err)
	}
	for range 2 {
		if err := s.Checkpointed(first); err != nil {
			t.Fatal(err)
		}
	}
	second, err := s.Checkpoint(ctx, key(1), ep(1))
	if err != nil || second.ID == first.ID || second.Parent != first.ID {
		t.Errorf("got %v, %v", second, err)
	}
	if _, err := s.Checkpoint(ctx, key(1), ep(2)); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("another epoch: %v", err)
	}
	last, err := s.Seal(ctx, key(1), ep(1))
	if err != nil || last.Parent != first.ID {
		t.Errorf("got %v, %v", last, err)
	}
	// A crash after the first checkpoint: the head is older, the dirty disk is newer and is used.
	b := attach(t, s, Want{Key: key(1), Epoch: ep(2), Head: first.ID, LastActive: ep(1)})
	if get(t, b, "f") != "two" {
		t.Error("an older file")
	}
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
