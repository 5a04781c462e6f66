package e2e

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestHostImageLostWhileAsleep: all disks of the host are gone, and every file comes back from the
// store, from the bus's own as from a folder, in each tier.
func TestHostImageLostWhileAsleep(t *testing.T) {
	for store, template := range map[string]string{"nats": "container", "file": "default"} {
		t.Run(store, func(t *testing.T) {
			o := sdk.OpenOptions{Template: template}
			var e *testenv.Env
			if store == "file" {
				_, url := fileStore(t)
				e = diskEnv(t, diskTerms{Store: url})
			} else {
				e = disks.For(t)
			}
			s := open(t, e.Client("acme", "ann"), o)
			key, want := s.Key(), tree(t, s)
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := e.Stop(); err != nil {
				t.Fatal(err)
			}
			e.LosePool()
			e.Up()
			s = open(t, e.Client("acme", "ann"), o)
			if s.Origin() != sdk.Resumed || s.Key() != key {
				t.Errorf("the wake says %s", s.Origin())
			}
			if got := sums(t, s); got != want {
				t.Errorf("the files are\n%s\nand were\n%s", got, want)
			}
		})
	}
}

// TestMachineDiesWhileActive: with its disk the newest files are there and it is resumed. Without it
// the files are those of the last snapshot, and everybody is told as of when.
func TestMachineDiesWhileActive(t *testing.T) {
	e := disks.For(t)
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{})
	key := s.Key()
	put(t, s, "/root/old", "old")
	m, err := s.Checkpoint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, "/root/new", "new")
	e.Crash()
	e.Up()
	s = open(t, e.Client("acme", "ann"), sdk.OpenOptions{})
	if s.Origin() != sdk.Resumed || content(t, s, "/root/old") != "old" || content(t, s, "/root/new") != "new" {
		t.Errorf("with its disk it is %s, old %q, new %q", s.Origin(), content(t, s, "/root/old"), content(t, s, "/root/new"))
	}
	if got := show(t, e, key); got.RestoredAsOf != nil {
		t.Errorf("with its disk session show says %+v", got)
	}

	put(t, s, "/root/newest", "newest")
	e.Crash()
	e.LosePool()
	e.Up()
	heard := listen(t, e.Client("acme", "ann"), key)
	s = open(t, e.Client("acme", "ann"), sdk.OpenOptions{})
	if s.Origin() != sdk.Restored {
		t.Fatalf("without its disk it is %s", s.Origin())
	}
	if content(t, s, "/root/old") != "old" || content(t, s, "/root/new") != "-" || content(t, s, "/root/newest") != "-" {
		t.Errorf("without its disk: old %q, new %q, newest %q", content(t, s, "/root/old"), content(t, s, "/root/new"), content(t, s, "/root/newest"))
	}
	asOf := s.RestoredAsOf()
	if off := asOf.Sub(m.TakenAt); off < -time.Second || off > time.Second {
		t.Errorf("restored as of %s, the checkpoint is of %s", asOf, m.TakenAt)
	}
	active := heard.await(t, "active", nil).Body.(*schedulerv1.Event).GetActive()
	if !active.GetRestoredAsOf().AsTime().Equal(asOf) {
		t.Errorf("the event says %s, the open %s", active.GetRestoredAsOf().AsTime(), asOf)
	}
	inside := placeInside(t, s)
	if inside.Origin != "restored" || inside.AsOf == nil || !inside.AsOf.Equal(asOf) || !strings.Contains(strings.Join(inside.Text, " "), asOf.UTC().Format(time.RFC3339)) {
		t.Errorf("session.json says %+v, the open %s", inside, asOf)
	}
	if got := show(t, e, key); got.Origin != "restored" || got.RestoredAsOf == nil || !got.RestoredAsOf.Equal(asOf) {
		t.Errorf("session show says %+v, the open %s", got, asOf)
	}
}

// TestAnEmptyDiskIsNeverHandedOut: a session that was never saved and whose disk is gone is refused,
// again and again, with a reason; it is not given a fresh disk.
func TestAnEmptyDiskIsNeverHandedOut(t *testing.T) {
	e := disks.For(t)
	s := open(t, e.Client("acme", "ann"), sdk.OpenOptions{})
	put(t, s, "/root/f", "precious")
	key := s.Key()
	e.Crash()
	e.LosePool()
	e.Up()
	c := e.Client("acme", "ann")
	for range 2 {
		s, err := c.Open(t.Context(), sdk.OpenOptions{Risk: sdk.OwnCode(), Wait: 20 * time.Second})
		if err == nil {
			t.Fatalf("it was opened, %s", s.Origin())
		}
		if !errors.Is(err, sdk.OfKind(errkind.DataLoss)) {
			t.Errorf("the open says: %v, want data loss", err)
		}
		if now := show(t, e, key); now.State != string(sdk.Failed) || !strings.Contains(now.Failure.Reason, "never saved") {
			t.Errorf("session show says %+v", now)
		}
	}
	if err := c.DeleteSession(t.Context(), sdk.UserSession{}); err != nil {
		t.Errorf("the session that cannot be opened cannot be deleted: %v", err)
	}
	if s := open(t, c, sdk.OpenOptions{}); s.Origin() != sdk.Created {
		t.Errorf("after the delete it is %s", s.Origin())
	}
}
