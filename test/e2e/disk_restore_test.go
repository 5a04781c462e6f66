package e2e

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// snapshot is one line of `berth disk snapshots`.
type snapshot struct {
	ID           string    `json:"id"`
	TakenAt      time.Time `json:"taken_at"`
	Head         bool      `json:"head"`
	RestoredFrom string    `json:"restored_from"`
	Added        uint64    `json:"added_bytes"`
}

func snapshotsOf(t *testing.T, e *testenv.Env, key string) []snapshot {
	t.Helper()
	text, err := e.CLI("disk", "snapshots", key, "--json")
	if err != nil {
		t.Fatal(err)
	}
	var out struct{ Snapshots []snapshot }
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out.Snapshots
}

func has(all []snapshot, id string) bool {
	return slices.ContainsFunc(all, func(s snapshot) bool { return s.ID == id })
}

// TestRestoreToAnEarlierSnapshot goes back, forth and back again between three states. Nothing is
// lost on the way: what was the newest state before is a snapshot itself.
func TestRestoreToAnEarlierSnapshot(t *testing.T) { restoreToEarlier(t, disks.For(t)) }

func restoreToEarlier(t *testing.T, e *testenv.Env) {
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{})
	key := s.Key()
	var saved []sdk.Manifest
	for _, state := range []string{"one", "two", "three"} {
		put(t, s, "/root/state", state)
		put(t, s, "/root/only-"+state, strings.Repeat(state, 100_000))
		if state == "two" {
			sh(t, s, "rm /root/only-one")
		}
		m, err := s.Checkpoint(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		saved = append(saved, m)
		time.Sleep(1100 * time.Millisecond) // --at has seconds
	}
	if _, err := e.CLI("disk", "restore", key, "--snapshot", saved[0].ID); status(err) != 1 {
		t.Errorf("a restore of an awake session: %v", err)
	}
	put(t, s, "/root/state", "four")
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := e.CLI("disk", "restore", key, "--snapshot", "m"+strings.Repeat("a", 32)); status(err) != 1 {
		t.Errorf("a restore of an unknown snapshot: %v", err)
	}
	four := snapshotsOf(t, e, key)[0]
	if !four.Head || !has(snapshotsOf(t, e, key), saved[0].ID) {
		t.Fatalf("snapshots: %+v", snapshotsOf(t, e, key))
	}

	heard := listen(t, c, key)
	restore := func(args ...string) {
		t.Helper()
		if out, err := e.CLI(append([]string{"disk", "restore", key}, args...)...); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	check := func(state, alsoThere, notThere string, asOf time.Time) {
		t.Helper()
		s = open(t, c, sdk.OpenOptions{})
		if off := s.RestoredAsOf().Sub(asOf); s.Origin() != sdk.Restored || off < -time.Second || off > time.Second {
			t.Errorf("%s: it is %s as of %s, want %s", state, s.Origin(), s.RestoredAsOf(), asOf)
		}
		there, gone := content(t, s, "/root/only-"+alsoThere), content(t, s, "/root/only-"+notThere)
		if content(t, s, "/root/state") != state || there != strings.Repeat(alsoThere, 100_000) || gone != "-" {
			t.Errorf("%s: it says %q; only-%s has %d bytes, only-%s has %d", state, content(t, s, "/root/state"), alsoThere, len(there), notThere, len(gone))
		}
		if inside := placeInside(t, s); inside.Origin != "restored" || !inside.AsOf.Equal(s.RestoredAsOf()) {
			t.Errorf("%s: session.json says %+v", state, inside)
		}
		if all := snapshotsOf(t, e, key); !has(all, four.ID) || !has(all, saved[0].ID) || !has(all, saved[2].ID) {
			t.Errorf("%s: a state of before is no snapshot any more: %+v", state, all)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	restore("--snapshot", saved[0].ID)
	heard.await(t, "rewound", nil)
	check("one", "one", "two", saved[0].TakenAt)
	restore("--at", saved[1].TakenAt.Add(time.Second).UTC().Format(time.RFC3339Nano))
	check("two", "two", "one", saved[1].TakenAt)
	restore("--snapshot", four.ID)
	check("four", "three", "one", four.TakenAt)
	restore("--snapshot", saved[0].ID)
	restore("--snapshot", "head") // taken back
	if s = open(t, c, sdk.OpenOptions{}); s.Origin() != sdk.Resumed || content(t, s, "/root/state") != "four" {
		t.Errorf("after a restore that was taken back it is %s and says %q", s.Origin(), content(t, s, "/root/state"))
	}
	verified(t, e, key)
}

// TestRestoreOfAHeadThatMovedIsRefused: who asks for a restore saw a state that is not the newest any more.
func TestRestoreOfAHeadThatMovedIsRefused(t *testing.T) {
	restoreOfMovedHead(t, disks.For(t))
}

func restoreOfMovedHead(t *testing.T, e *testenv.Env) {
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{})
	put(t, s, "/root/f", "one")
	first, err := s.Checkpoint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, "/root/f", "two")
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	op, show := e.Operator(), &schedulerv1.ShowReply{}
	if err := op.Call(t.Context(), "scheduler", "show", &schedulerv1.ShowRequest{Session: s.Key()}, show); err != nil {
		t.Fatal(err)
	}
	ref := show.GetRecord().GetSession()
	ask := func(generation *corev1.Stamp, head string) error {
		return op.Call(t.Context(), "scheduler", "restore", &schedulerv1.RestoreRequest{Tenant: ref.GetTenant(), Session: ref.GetSession(),
			Generation: generation, Head: head, Snapshot: first.ID, AsOf: timestamppb.New(first.TakenAt)}, &schedulerv1.RestoreReply{})
	}
	if err := ask(ref.GetGeneration(), first.ID); !errors.Is(err, sdk.OfKind(errkind.Conflict)) {
		t.Errorf("a restore on a head that moved: %v", err)
	}
	if err := ask(&corev1.Stamp{Incarnation: ref.GetGeneration().GetIncarnation(), Index: ref.GetGeneration().GetIndex() + 1}, show.GetRecord().GetManifest()); err == nil {
		t.Error("a restore of another generation was taken")
	}
	if s = open(t, c, sdk.OpenOptions{}); s.Origin() != sdk.Resumed || content(t, s, "/root/f") != "two" {
		t.Errorf("it is %s and says %q", s.Origin(), content(t, s, "/root/f"))
	}
}
