package saver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"gocloud.dev/blob"
	"gocloud.dev/blob/memblob"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/diskpool"
)

var errKilled = errors.New("killed here")

// world is a host with a real pool and store of images, a store of objects in memory, and a
// scheduler that knows one head.
type world struct {
	t      *testing.T
	dir    string
	pool   *diskpool.Pool
	disks  *disk.Store
	bucket *blob.Bucket
	sched  *heads
	at     func(step string) error // fails where this life of the host is to end
	saver  *Saver
	check  func(place string) error // the lease; nil: it holds
	first  string                   // a snapshot that was the head
	raw    bool                     // it wakes in a virtual machine
}

// heads is scheduler's compare-and-swap of one session.
type heads struct {
	mu         sync.Mutex
	head       string
	epoch      ids.Epoch
	lastActive ids.Epoch
}

func (h *heads) commit(on Session, m archive.Info) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.head == m.ID:
		return nil
	case on.Epoch != h.epoch || m.Epoch != h.epoch:
		return errs.E("commit", errkind.StaleEpoch, "", "another epoch owns the session")
	case h.head != m.Parent:
		return errs.E("commit", errkind.Conflict, "", "the head is another one")
	}
	h.head = m.ID
	return nil
}

func newWorld(t *testing.T) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("not root: disks cannot be mounted")
	}
	if testing.Short() {
		t.Skip("-short: no disks are made")
	}
	w := &world{t: t, dir: filepath.Join(t.TempDir(), "disks"), bucket: memblob.OpenBucket(nil), sched: &heads{}}
	var err error
	if w.pool, err = diskpool.Open(t.Context(), diskpool.Config{Dir: w.dir, Mode: diskpool.Loop, Bytes: 2 << 30}); err != nil {
		t.Fatal(err)
	}
	w.begin()
	t.Cleanup(func() {
		w.end()
		if err := w.pool.Close(); err != nil {
			t.Errorf("close the pool: %v", err)
		}
		_ = w.bucket.Close()
	})
	return w
}

// begin is the start of a hostagent on what is there.
func (w *world) begin() {
	w.t.Helper()
	w.at = nil
	var err error
	w.disks, err = disk.Open(context.Background(), disk.Config{Dir: w.dir, Reflink: w.pool.Reflink(), Outer: w.pool.Outer()})
	if err != nil {
		w.t.Fatal(err)
	}
	fault := func(step string) error {
		if w.at != nil {
			return w.at(step)
		}
		return nil
	}
	depot := archive.Open(w.bucket, archive.Options{Fault: fault, Attempts: 1})
	w.saver = New(killable{w.disks, fault}, depot, Outside{
		Key: func(context.Context, Session) (archive.Key, error) { return archive.Key{7}, fault("key") },
		Check: func(place string) error {
			if w.check != nil {
				return w.check(place)
			}
			return nil
		},
		Commit: func(_ context.Context, on Session, m archive.Info, _ bool) error {
			if err := fault("commit"); err != nil {
				return err
			}
			if err := w.sched.commit(on, m); err != nil {
				return err
			}
			return fault("committed") // scheduler did it; its answer is lost
		},
	}, slog.New(slog.DiscardHandler))
}

// end is the end of a hostagent, orderly or not: what is on the disk is all that stays.
func (w *world) end() {
	w.t.Helper()
	k := session(0).Key
	if err := w.disks.Detach(context.Background(), k); err != nil {
		w.t.Errorf("detach: %v", err)
	}
	if err := w.disks.Close(); err != nil {
		w.t.Errorf("close the disks: %v", err)
	}
}

func session(epoch uint64) Session {
	return Session{
		Key:    disk.Key{Session: ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", "u", "default"), Generation: ids.Generation{Incarnation: 1, Index: 1}},
		Tenant: "acme", Epoch: ids.Epoch{Incarnation: 1, Index: epoch}, Keep: archive.Keep{All: 1 << 62},
	}
}

// wake attaches the session's newest disk, or fetches it. It fails as a wake would.
func (w *world) wake(epoch uint64) error {
	on := session(epoch)
	w.sched.epoch = on.Epoch
	want := disk.Want{
		Key: on.Key, Epoch: on.Epoch, Head: w.sched.head, LastActive: w.sched.lastActive,
		Fresh: w.sched.head == "" && w.sched.lastActive.IsZero(), Size: 64 << 20, Image: "sha256:x",
		Raw: w.raw,
	}
	_, err := w.disks.Attach(context.Background(), want)
	if errs.Is(err, errkind.NotFound) || errs.Is(err, errkind.StaleEpoch) {
		if _, err = w.saver.Fetch(context.Background(), on, Wanted{Head: want.Head, LastActive: want.LastActive}); err == nil {
			_, err = w.disks.Attach(context.Background(), want)
		}
	}
	if err != nil {
		return err
	}
	if err := w.disks.Activate(on.Key, on.Epoch); err != nil {
		return err
	}
	w.sched.lastActive = on.Epoch
	return nil
}

func (w *world) mustWake(epoch uint64) {
	w.t.Helper()
	if err := w.wake(epoch); err != nil {
		w.t.Fatalf("wake in epoch %d: %v", epoch, err)
	}
}

func (w *world) file() string {
	return filepath.Join(w.dir, "mnt", session(0).Key.String(), disk.Upper, "file")
}

// write writes a file as a user does who syncs it.
func (w *world) write(n int) {
	w.t.Helper()
	f, err := os.Create(w.file())
	if err != nil {
		w.t.Fatal(err)
	}
	_, err = f.Write(content(n))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		w.t.Fatal(err)
	}
}

// content is different in every part for every n.
func content(n int) []byte { return bytes.Repeat([]byte(fmt.Sprintf("state %8d\n", n)), 60000) }

// holds tells which state the file is in, 0 if it is not there.
func (w *world) holds() int {
	w.t.Helper()
	f, err := os.Open(w.file())
	if errors.Is(err, os.ErrNotExist) {
		return 0
	}
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	var n int
	if _, serr := fmt.Sscanf(string(b[:min(len(b), 15)]), "state %d", &n); err != nil || serr != nil || !bytes.Equal(b, content(n)) {
		w.t.Fatalf("the file is no state that was ever written: %v %v", err, serr)
	}
	return n
}

// killable ends the life of a host before and after each change of its disks.
type killable struct {
	*disk.Store
	at func(step string) error
}

func (k killable) step(name string, do func() error) error {
	if err := k.at("before " + name); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return k.at("after " + name)
}

func (k killable) Shoot(ctx context.Context, key disk.Key, e ids.Epoch) (sh *disk.Shot, err error) {
	err = k.step("shoot", func() (err error) { sh, err = k.Store.Shoot(ctx, key, e); return err })
	if err != nil && sh != nil {
		_ = k.Store.Release(sh)
	}
	return sh, err
}

func (k killable) SealShot(ctx context.Context, key disk.Key, e ids.Epoch) (sh *disk.Shot, m *disk.Manifest, err error) {
	err = k.step("seal", func() (err error) { sh, m, err = k.Store.SealShot(ctx, key, e); return err })
	if err != nil && sh != nil {
		_ = k.Store.Release(sh)
	}
	return sh, m, err
}

func (k killable) Propose(sh *disk.Shot, m disk.Manifest, index []byte) error {
	return k.step("propose", func() error { return k.Store.Propose(sh, m, index) })
}

func (k killable) CommitHead(key disk.Key, id string) error {
	return k.step("commit head", func() error { return k.Store.CommitHead(key, id) })
}

func (k killable) Restore(ctx context.Context, rec disk.Record, index []byte, fill func(context.Context, *os.File) error) error {
	return k.step("restore", func() error { return k.Store.Restore(ctx, rec, index, fill) })
}
