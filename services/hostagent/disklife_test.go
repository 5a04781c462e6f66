package hostagent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
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
	if _, err := h.eraseDisk(t.Context(), "acme", k); err == nil {
		t.Fatal("the delete went well")
	}
	if left := h.toErase(); len(left) != 1 || left[0].Session != k.Session || left[0].Generation != k.Generation {
		t.Errorf("noted: %v", left)
	}
}

type emptyVault struct{ vault }

// fakeVault is a store that fails or hangs.
type fakeVault struct {
	vault
	err   error
	hangs bool
	// deaf, if set: Erase ignores its context, as a file system that hangs does, and waits for deaf.
	deaf  chan struct{}
	asked atomic.Int32
}

func (v *fakeVault) Erase(ctx context.Context, _ archive.Disk) error {
	v.asked.Add(1)
	if v.deaf != nil {
		<-v.deaf
	}
	if v.hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return v.err
}

// TestADeleteSaysWhetherTheStoreIsClean: a store that fails or hangs does not hold up a delete, and the
// delete is reported as done only once the store is clean.
func TestADeleteSaysWhetherTheStoreIsClean(t *testing.T) {
	dir := t.TempDir()
	n, v := newNullDisks(), &fakeVault{}
	h := &host{cfg: Config{Dir: dir}, disks: n, vault: v, lease: newLease(0, false), erase: make(chan struct{}, 1), log: slog.New(slog.DiscardHandler)}
	h.saves = nullSaves{n, h}
	clock := time.Hour
	h.lease.now = func() time.Duration { return clock }
	if err := os.MkdirAll(h.eraseDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	k := disk.Key{Session: key("u"), Generation: ids.Generation{Incarnation: 1, Index: 2}}
	erase := func(what string, want bool, notes int, asked int32) {
		t.Helper()
		began := time.Now()
		clean, err := h.eraseDisk(t.Context(), "acme", k)
		if err != nil || clean != want || len(h.toErase()) != notes || v.asked.Load() != asked {
			t.Errorf("%s: clean %v, %v; %d notes, the store was asked %d times", what, clean, err, len(h.toErase()), v.asked.Load())
		}
		if took := time.Since(began); took > 10*eraseWait {
			t.Errorf("%s: took %s", what, took)
		}
	}
	v.hangs = true
	erase("the store hangs", false, 1, 1)
	if len(h.erase) != 1 {
		t.Error("the store is not cleaned later")
	}
	erase("it hung a moment ago", false, 1, 1)
	clock += eraseRest
	v.hangs, v.err = false, errors.New("away")
	erase("the store is away", false, 1, 2)
	clock += eraseRest
	v.err = nil
	erase("the store is back", true, 0, 3)
	erase("asked again", true, 0, 4)
}

// TestDeleteWaitsAtMostASecondForTheStore: also for a store that ignores its context. While an erasure hangs
// in it, no other delete waits.
func TestDeleteWaitsAtMostASecondForTheStore(t *testing.T) {
	for name, deaf := range map[string]bool{"the store hangs": false, "the store hangs and ignores its context": true} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				n, v := newNullDisks(), &fakeVault{hangs: true}
				if deaf {
					v.deaf = make(chan struct{})
				}
				h := &host{cfg: Config{Dir: dir}, disks: n, vault: v, lease: newLease(0, false), erase: make(chan struct{}, 1), log: slog.New(slog.DiscardHandler)}
				h.saves = nullSaves{n, h}
				start := time.Now()
				h.lease.now = func() time.Duration { return time.Since(start) + time.Hour }
				if err := os.MkdirAll(h.eraseDir(), 0o700); err != nil {
					t.Fatal(err)
				}
				erase := func(index uint64, wait time.Duration, asked int32) {
					t.Helper()
					began := time.Now()
					clean, err := h.eraseDisk(t.Context(), "acme", disk.Key{Session: key("u"), Generation: ids.Generation{Incarnation: 1, Index: index}})
					if took := time.Since(began); err != nil || clean || took != wait || v.asked.Load() != asked {
						t.Errorf("clean %v, %v; took %s, want %s; the store was asked %d times", clean, err, took, wait, v.asked.Load())
					}
				}
				erase(2, time.Second, 1)
				erase(3, 0, 1)
				time.Sleep(eraseRest)
				if deaf {
					erase(4, 0, 1) // the first erasure still hangs
					close(v.deaf)
					synctest.Wait()
				}
				erase(5, time.Second, 2)
			})
		})
	}
}
