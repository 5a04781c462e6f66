package hostagent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// TestAFullPoolIsToldOfBeforeTheHostServes: the pool is minded from its opening on, and one that is
// full then must not end the process, which would never get to serve.
func TestAFullPoolIsToldOfBeforeTheHostServes(t *testing.T) {
	r := newRig(t, nil)
	h, err := open(t.Context(), r.cfg, bustest.Connect(t, r.bus, subjects.Host(testHost)), nil, testLog())
	if err != nil {
		t.Fatal(err)
	}
	h.tell(ref("u", 1, 1), telling{what: "quota", reason: "the pool is full", again: true})
	h.cancel()
	if err := h.close(); err != nil {
		t.Error(err)
	}
}

// brokenDisks cannot delete anything.
type brokenDisks struct{ *nullDisks }

func (brokenDisks) Delete(context.Context, disk.Key) error { return errors.New("it ended here") }

// TestADeleteThatEndsHalfWayStillCleansTheStore: once the disk is gone from the host nobody asks this
// host for it again, so the store's part is noted before.
func TestADeleteThatEndsHalfWayStillCleansTheStore(t *testing.T) {
	dir := t.TempDir()
	n := brokenDisks{newNullDisks()}
	h := &host{cfg: Config{Dir: dir}, disks: n, vault: emptyVault{}, erase: make(chan struct{}, 1), log: slog.New(slog.DiscardHandler)}
	h.saves = nullSaves{n.nullDisks, h}
	if err := os.MkdirAll(filepath.Join(dir, "erase"), 0o700); err != nil {
		t.Fatal(err)
	}
	k := disk.Key{Session: key("u"), Generation: ids.Generation{Incarnation: 1, Index: 2}}
	if err := h.eraseDisk(t.Context(), "acme", k); err == nil {
		t.Fatal("the delete went well")
	}
	if left := h.toErase(); len(left) != 1 || left[0].Session != k.Session || left[0].Generation != k.Generation {
		t.Errorf("noted: %v", left)
	}
}

type emptyVault struct{ vault }
