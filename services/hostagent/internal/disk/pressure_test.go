package disk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	fullSize   = 128 << 20
	fullFiles  = 12
	fullFile   = 8 << 20
	fullRounds = 3
)

// scribe writes nearly all of a session's quota, and all of it again, and knows what it wrote.
type scribe struct {
	a    Attachment
	n    int
	sums [fullFiles][32]byte
	done [fullRounds]chan struct{} // closed after each round
}

func newScribe(a Attachment, n int) *scribe {
	w := &scribe{a: a, n: n}
	for i := range w.done {
		w.done[i] = make(chan struct{})
	}
	return w
}

// roundEnds is closed at the end of the round that runs now.
func (w *scribe) roundEnds() chan struct{} {
	for _, c := range w.done {
		select {
		case <-c:
		default:
			return c
		}
	}
	return w.done[fullRounds-1]
}

func (w *scribe) path(i int) string {
	return filepath.Join(w.a.Root, Upper, fmt.Sprintf("file%d", i))
}

func (w *scribe) round(round int) error {
	defer close(w.done[round])
	for i := range fullFiles {
		var seed [32]byte
		binary.LittleEndian.PutUint64(seed[:], uint64(w.n)<<32|uint64(round)<<16|uint64(i))
		noise := io.LimitReader(rand.NewChaCha8(seed), fullFile)
		f, err := os.OpenFile(w.path(i), os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		h := sha256.New()
		_, err = io.Copy(f, io.TeeReader(noise, h))
		if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
			return fmt.Errorf("round %d, file %d: %w", round, i, err)
		}
		w.sums[i] = [32]byte(h.Sum(nil))
	}
	return nil
}

// snapshots takes one shot after another and commits those that are not lost, until stop is closed.
func snapshots(t *testing.T, s *Store, w *scribe, stop chan struct{}) (taken, lost int) {
	k := key(w.n)
	for i := 0; ; i++ {
		select {
		case <-stop:
			return taken, lost
		default:
		}
		sh, err := s.Shoot(context.Background(), k, ep(1))
		if errs.Is(err, errkind.NoCapacity) { // others have clones, or are about to
			lost++
			select {
			case <-stop:
			case <-w.roundEnds():
			}
			continue
		}
		if err != nil {
			t.Errorf("shoot: %v", err)
			return taken, lost
		}
		select { // the upload takes until everything is written once more
		case <-sh.Lost():
		case <-w.roundEnds():
		}
		id := fmt.Sprintf("m%d-%d", w.n, i)
		err = s.Propose(sh, manifestOf(sh, id), []byte("i"))
		if err == nil {
			err = s.CommitHead(k, id)
			taken++
		} else if errs.Is(err, errkind.NoCapacity) {
			lost, err = lost+1, nil
		}
		if err = errors.Join(err, s.Release(sh)); err != nil {
			t.Errorf("commit: %v", err)
			return taken, lost
		}
	}
}

func quotaOf(n int, size uint64) Want {
	w := fresh(n, 1)
	w.Size = size
	return w
}

// The pool never answers a loop device with 'no space': sessions that were admitted write all their
// quota, again and again, with base clones and shots beside them, and every byte is there afterwards.
func TestAPoolThatIsFullLosesNothing(t *testing.T) {
	p := ownPool(t, 620)
	var frozen atomic.Int32
	s := openWith(t, Config{
		Dir: p.point, Outer: p.dir, Reflink: true, Reserve: 96 << 20, Frozen: func(Key, string) { frozen.Add(1) },
	}, nil)
	// A sleeper whose image fills what the others need.
	sleeper := newScribe(attach(t, s, quotaOf(9, fullSize)), 9)
	activate(t, s, 9, 1)
	if err := sleeper.round(0); err != nil {
		t.Fatal(err)
	}
	slept(t, s, 9, 1, "m9")
	var scribes []*scribe
	for n := 1; ; n++ {
		a, err := s.Attach(t.Context(), quotaOf(n, fullSize))
		if errs.Is(err, errkind.NoCapacity) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		activate(t, s, n, 1)
		scribes = append(scribes, newScribe(a, n))
	}
	if _, err := s.Get(key(9)); !errs.Is(err, errkind.NotFound) || len(scribes) < 3 {
		t.Errorf("%d sessions were admitted, the sleeper: %v", len(scribes), err)
	}
	stop := make(chan struct{})
	var writers, shooters sync.WaitGroup
	var taken, lost atomic.Int32
	for _, w := range scribes {
		shooters.Go(func() {
			a, b := snapshots(t, s, w, stop)
			taken.Add(int32(a))
			lost.Add(int32(b))
		})
		writers.Go(func() {
			for round := range fullRounds {
				if err := w.round(round); err != nil {
					t.Errorf("session %d: %v", w.n, err)
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	shooters.Wait()
	sp, err := s.Space()
	t.Logf("%d sessions, %d snapshots, %d given up, frozen %d times; %+v, %v", len(scribes), taken.Load(), lost.Load(), frozen.Load(), sp, err)
	if taken.Load() == 0 {
		t.Error("no snapshot was taken")
	}
	if frozen.Load() != 0 {
		t.Error("writers were stopped although the pool keeps its promises")
	}
	verify(t, s, scribes)
}

// verify reads everything again from the pool.
func verify(t *testing.T, s *Store, scribes []*scribe) {
	t.Helper()
	for _, w := range scribes {
		if err := s.Detach(t.Context(), key(w.n)); err != nil {
			t.Fatal(err)
		}
	}
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		t.Logf("caches stay: %v", err)
	}
	for _, w := range scribes {
		w.a = wake(t, s, w.n, 2, record(t, s, w.n).Base, 1)
		for i, want := range w.sums {
			if sumOf(t, w.path(i)) != want {
				t.Errorf("session %d, file %d is not what was written", w.n, i)
			}
		}
	}
}

// Whoever else fills the pool stops the writers, with a reason; they go on when there is room.
func TestWritersAreStoppedBeforeThePoolIsFull(t *testing.T) {
	p := ownPool(t, 500)
	frozen, thawed := make(chan string, 10), make(chan Key, 10)
	s := openWith(t, Config{
		Dir: p.point, Reflink: true, Reserve: 64 << 20,
		Frozen: func(_ Key, reason string) { frozen <- reason }, Thawed: func(k Key) { thawed <- k },
	}, nil)
	w := newScribe(attach(t, s, quotaOf(1, 256<<20)), 1)
	activate(t, s, 1, 1)
	if err := w.round(0); err != nil {
		t.Fatal(err)
	}
	saved(t, s, shoot(t, s, 1, 1), "m1")
	sp, err := s.account()
	if err != nil {
		t.Fatal(err)
	}
	alien, err := os.Create(filepath.Join(p.point, "alien"))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(int(alien.Fd()), 0, 0, int64(sp.Free-(16<<20))); err != nil {
		t.Fatal(err)
	}
	if reason := <-frozen; !strings.Contains(reason, "disk pool is full") {
		t.Errorf("got %q", reason)
	}
	if inv, err := s.List(); err != nil || !inv.Disks[0].Frozen || inv.Disks[0].HasBase {
		t.Errorf("got %+v, %v", inv, err)
	}
	if u, err := s.Usage(key(1)); err != nil || u.Size == 0 {
		t.Errorf("got %+v, %v", u, err)
	}
	_, err = s.Shoot(t.Context(), key(1), ep(1))
	wantKind(t, err, errkind.NoCapacity)
	done := make(chan error, 1)
	go func() { done <- w.round(1) }()
	if err := errors.Join(alien.Truncate(0), alien.Close()); err != nil {
		t.Fatal(err)
	}
	if k := <-thawed; k != key(1) {
		t.Errorf("got %v", k)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	verify(t, s, []*scribe{w})
}

// A disk that is frozen for the pool's sake can be taken away and deleted.
func TestAFrozenDiskSleepsAndIsDeleted(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		for n := 1; n <= 2; n++ {
			awake(t, s, n, 1)
			s.freezeAll(Space{})
		}
		slept(t, s, 1, 1, "m1")
		if err := s.Delete(t.Context(), key(2)); err != nil {
			t.Fatal(err)
		}
		if inv, err := s.List(); err != nil || len(inv.Disks) != 1 || inv.Disks[0].Mounted || len(s.frozen) != 0 {
			t.Errorf("got %+v, %v", inv, err)
		}
	})
}

// What sleeps longest goes first; what is not known to be saved elsewhere never goes.
func TestSleepersAreEvictedInTheOrderInWhichTheySlept(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		for n := 1; n <= 5; n++ {
			put(t, awake(t, s, n, 1), "f", strings.Repeat("x", 8<<20))
		}
		for i, n := range []int{2, 1, 3} {
			slept(t, s, n, 1, fmt.Sprintf("m%d", n))
			r := record(t, s, n)
			r.Slept = time.Date(2026, 1, 1, i, 0, 0, 0, time.UTC)
			if err := s.save(r); err != nil {
				t.Fatal(err)
			}
		}
		// 4 is dirty, 5 is clean by a manifest that no store has.
		if err := s.Detach(t.Context(), key(4)); err != nil {
			t.Fatal(err)
		}
		slept(t, s, 5, 1, "m5")
		if err := os.Remove(s.file(key(5), baseIndexName)); err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{4, 5} {
			wantKind(t, s.Evict(t.Context(), key(n)), errkind.Refused)
		}
		wantKind(t, s.Evict(t.Context(), key(7)), errkind.NotFound)
		sp, err := s.Space()
		if err != nil || sp.Evictable < 24<<20 {
			t.Errorf("got %+v, %v", sp, err)
		}
		wake(t, s, 3, 2, "m3", 1)
		wantKind(t, s.Evict(t.Context(), key(3)), errkind.Busy)
		for _, n := range []int{2, 1} {
			if !s.evictOne() {
				t.Fatal("nothing was evicted")
			}
			if _, err := s.Get(key(n)); !errs.Is(err, errkind.NotFound) || len(names(t, s, n)) != 0 {
				t.Errorf("%d is still there: %v", n, err)
			}
		}
		if s.evictOne() {
			t.Error("a disk was evicted that nobody else has")
		}
		if err := s.Detach(t.Context(), key(3)); err != nil {
			t.Fatal(err)
		}
		s.highWater = 1e-9
		s.evictAbove(sp)
		if inv, err := s.List(); err != nil || len(inv.Disks) != 2 {
			t.Errorf("above the mark: %+v, %v", inv, err)
		}
	})
}

// A shot or a view that is lost to the pool's pressure says so, and gives its space back at once.
func TestWhatIsLostToPressureSaysSo(t *testing.T) {
	dir := xfsDir(t)
	s := openWith(t, Config{Dir: dir, Reflink: true}, nil)
	a := awake(t, s, 1, 1)
	put(t, a, "f", strings.Repeat("x", 16<<20))
	sh := shoot(t, s, 1, 1)
	v, err := s.View(t.Context(), key(1), ep(1))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(a.Root, Upper, "f")); err != nil {
		t.Fatal(err)
	}
	for s.loseOne() {
	}
	<-sh.Lost()
	<-v.Lost()
	wantKind(t, s.Propose(sh, Manifest{ID: "m1", Epoch: ep(1)}, nil), errkind.NoCapacity)
	wantKind(t, v.Close(), errkind.NoCapacity)
	if err := s.Release(sh); err != nil {
		t.Error(err)
	}
	if got := names(t, s, 1); len(got) != 2 {
		t.Errorf("left: %v", got)
	}
	saved(t, s, shoot(t, s, 1, 1), "m1") // and the next one goes well
}
