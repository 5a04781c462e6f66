package router

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/null"
)

func warm(t testing.TB, r *Driver, tier driver.Tier) ids.SandboxID {
	t.Helper()
	s := spec(t, 1, 1, tier)
	w := driver.WarmSpec{ID: ids.NewWarmID(), Tier: tier, Limits: s.Limits}
	sb, err := r.Prepare(t.Context(), w)
	if err != nil || sb.ID != w.ID {
		t.Fatalf("prepare: %+v, %v", sb, err)
	}
	return w.ID
}

// TestAClaimedSessionIsInOneTierAtATime: whether the other tier's sandbox runs, is being claimed, or comes
// after the claim.
func TestAClaimedSessionIsInOneTierAtATime(t *testing.T) {
	dir := t.TempDir()
	a, b := open(t, dir+"/a", &null.World{}, "a"), open(t, dir+"/b", &null.World{}, "b")
	r := join(t, a, b)
	one, two := warm(t, r, "b"), warm(t, r, "b")
	cold, err := r.Create(t.Context(), spec(t, 1, 1, "a"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Claim(t.Context(), one, spec(t, 1, 2, "b")); !errs.Is(err, errkind.Busy) {
		t.Errorf("claimed for a session that is awake in another tier: %v", err)
	}
	if err := r.Stop(t.Context(), cold.ID); err != nil {
		t.Fatal(err)
	}
	b.hold = make(chan struct{})
	done := make(chan error, 1)
	want := spec(t, 1, 2, "b")
	go func() { _, err := r.Claim(t.Context(), one, want); done <- err }()
	for r.maker(want.ID()) == nil {
		time.Sleep(time.Millisecond)
	}
	if _, err := r.Create(t.Context(), spec(t, 1, 3, "a")); !errs.Is(err, errkind.Busy) {
		t.Errorf("created while it is claimed in another tier: %v", err)
	}
	close(b.hold)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for range 2 { // by the note of the claim, and by what a list tells
		if _, err := r.Create(t.Context(), spec(t, 1, 3, "a")); !errs.Is(err, errkind.Busy) {
			t.Errorf("created after the claim: %v", err)
		}
		if found, err := r.List(t.Context()); err != nil || len(found) != 2 {
			t.Errorf("list: %+v, %v", found, err)
		}
	}
	if err := r.Stop(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Create(t.Context(), spec(t, 1, 3, "a")); err != nil {
		t.Errorf("after its end: %v", err)
	}
	if _, err := r.Claim(t.Context(), two, spec(t, 2, 1, "b")); err != nil {
		t.Errorf("another session: %v", err)
	}
}

// TestAWarmOneIsItsOwnDrivers: a neighbour that finds its cgroup must not have it swept, while it waits or
// after a restart; and nobody else claims it.
func TestAWarmOneIsItsOwnDrivers(t *testing.T) {
	dir := t.TempDir()
	var wa, wb null.World
	a, b := open(t, dir+"/a", &wa, "a"), open(t, dir+"/b", &wb, "b")
	r := join(t, a, b)
	id := warm(t, r, "b")
	a.strays = []ids.SandboxID{id}
	shown := func(r *Driver, state driver.State) {
		t.Helper()
		found, err := r.List(t.Context())
		if err != nil || len(found) != 1 || found[0].State != state || found[0].Tier != "b" {
			t.Errorf("list: %+v, %v", found, err)
		}
	}
	shown(r, driver.Waiting)
	if why := r.Fits(driver.WarmSpec{Tier: "c"}, spec(t, 1, 1, "c")); why == "" {
		t.Error("a tier that is not there fits")
	}
	a = open(t, dir+"/a", &wa, "a")
	b = open(t, dir+"/b", &wb, "b")
	a.strays = []ids.SandboxID{id}
	r = join(t, a, b)
	if _, err := r.Claim(t.Context(), id, spec(t, 1, 1, "b")); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a claim of what an earlier driver prepared: %v", err)
	}
	shown(r, driver.Partial)
	if err := r.Stop(t.Context(), id); err != nil || b.stopped.Load() != 1 {
		t.Errorf("stop: %v, its driver was asked %d times", err, b.stopped.Load())
	}
}
