package disk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/schemas/ids"
)

func ep(n uint64) ids.Epoch { return ids.Epoch{Incarnation: 1, Index: n} }

func TestUsable(t *testing.T) {
	none := ids.Epoch{}
	for _, c := range []struct {
		name       string
		rec        Record
		head       string
		lastActive ids.Epoch
		want       bool
	}{
		{"clean and the head", Record{State: Clean, Base: "m3", Epoch: ep(3)}, "m3", ep(3), true},
		{"clean and the head, active again elsewhere without a write", Record{State: Clean, Base: "m3", Epoch: ep(3)}, "m3", ep(9), true},
		{"clean, but the head moved on elsewhere", Record{State: Clean, Base: "m3", Epoch: ep(3)}, "m4", ep(9), false},
		{"clean without a manifest", Record{State: Clean, Epoch: ep(3)}, "", ep(3), false},
		{"restored to an earlier manifest", Record{State: Clean, Base: "m3", Epoch: ep(3)}, "m2", ep(12), false},
		{"dirty by the last active epoch", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(7)}, "m3", ep(7), true},
		{"dirty, and another epoch was active since", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(7)}, "m3", ep(8), false},
		{"dirty, and a later wake here failed before it was active", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(8)}, "m3", ep(7), true},
		{"dirty, and a later wake here became active but wrote nothing", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(8)}, "m3", ep(8), true},
		{"dirty, and the session was restored to an earlier time", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(7)}, "m4", ep(7), false},
		{"dirty, and the head came after what this host knows", Record{State: Dirty, Epoch: ep(7), Attached: ep(7)}, "m1", ep(7), false},
		{"dirty, and the pending manifest became the head", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(7), Pending: Pending{ID: "m4", Epoch: ep(7)}}, "m4", ep(7), true},
		{"dirty, and the pending manifest did not become the head", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(7), Pending: Pending{ID: "m4", Epoch: ep(7)}}, "m3", ep(7), true},
		{"dirty, the pending manifest is the head, but another epoch was active", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(7), Pending: Pending{ID: "m4", Epoch: ep(7)}}, "m4", ep(8), false},
		{"sealed, the manifest is the head, and it was active elsewhere without a write", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(7), Pending: Pending{ID: "m4", Epoch: ep(7), Sealed: true}}, "m4", ep(9), true},
		{"sealed, but the head is neither", Record{State: Dirty, Base: "m3", Epoch: ep(7), Attached: ep(7), Pending: Pending{ID: "m4", Epoch: ep(7), Sealed: true}}, "m5", ep(7), false},
		{"dirty by an epoch of another incarnation", Record{State: Dirty, Epoch: ep(7)}, "", ids.Epoch{Incarnation: 2, Index: 7}, false},
		{"dirty, never active by the control plane", Record{State: Dirty, Epoch: ep(7), Attached: ep(7)}, "", none, false},
		{"blank, attached for the epoch that became active", Record{State: Blank, Attached: ep(2)}, "", ep(2), true},
		{"blank, but another epoch was active", Record{State: Blank, Attached: ep(2)}, "", ep(1), false},
		{"blank, but there is a manifest", Record{State: Blank, Attached: ep(2)}, "m1", ep(2), false},
		{"blank, never active", Record{State: Blank}, "", none, false},
		{"unknown state", Record{State: "odd", Epoch: ep(2), Attached: ep(2)}, "", ep(2), false},
	} {
		if got := c.rec.Usable(c.head, c.lastActive); got != c.want {
			t.Errorf("%s: got %v", c.name, got)
		}
	}
}

// A wake that failed any number of times before it was active never makes the newest disk stale.
func TestFailedWakesNeverMakeADiskStale(t *testing.T) {
	rec := Record{State: Dirty, Epoch: ep(3), Attached: ep(3)}
	last := ep(3)
	for n := uint64(4); n < 40; n++ {
		if !rec.Usable("", last) {
			t.Fatalf("stale at %d: %+v, last active %s", n, rec, last)
		}
		rec = rec.attachedFor(Want{Epoch: ep(n), LastActive: last})
		switch n % 3 {
		case 0: // active was committed, the host died before it knew
			last = ep(n)
		case 1:
			last, rec = ep(n), rec.activated(ep(n))
		}
	}
}

var errCrash = errors.New("crash")

// Between the write and the rename the old record is still there, whole.
func TestCrashBetweenRecordWriteAndRename(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record.json")
	ok := func(string) error { return nil }
	if err := writeRecord(path, Record{Base: "old"}, ok); err != nil {
		t.Fatal(err)
	}
	if err := writeRecord(path, Record{Base: "new"}, func(string) error { return errCrash }); !errors.Is(err, errCrash) {
		t.Fatalf("got %v", err)
	}
	b, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(b), "old") {
		t.Fatalf("got %s, %v", b, err)
	}
	if err := writeRecord(path, Record{Base: "newer"}, ok); err != nil {
		t.Fatal(err)
	}
	if b, _ = os.ReadFile(path); !strings.Contains(string(b), "newer") {
		t.Fatalf("got %s", b)
	}
}

// A record that an older version wrote is read, and one of a newer version with more in it.
func TestRecordsOfOtherVersionsAreRead(t *testing.T) {
	s := &Store{dir: t.TempDir()}
	for name, more := range map[string]string{"older": "", "newer": `, "tint": {"of": "blue"}`} {
		k := key(1)
		if err := os.MkdirAll(s.folder(k), 0o700); err != nil {
			t.Fatal(err)
		}
		text := `{"format": 1, "session": "` + k.Session.String() + `", "generation": "1-1", "state": "clean", "epoch": "1-2", "attached": "1-2",
			"base": "m1", "size": 67108864, "image": "sha256:image"` + more + "}"
		if err := os.WriteFile(s.file(k, recordName), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := s.load(k)
		if err != nil || !r.Usable("m1", ep(2)) || r.Pending != (Pending{}) || !r.Slept.IsZero() {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
}
