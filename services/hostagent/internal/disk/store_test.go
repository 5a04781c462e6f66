package disk

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

const testSize = 64 << 20

func needRoot(t testing.TB) {
	t.Helper()
	if err := Preflight(t.TempDir(), 0); err != nil {
		t.Skipf("skipped: disks need root and loop devices: %v", err)
	}
}

func key(n int) Key {
	return Key{ids.DeriveSessionKey([]byte("k"), "i", "t", fmt.Sprint(n), "default"), ids.Generation{Incarnation: 1, Index: uint64(n)}}
}

func fresh(n int, epoch uint64) Want {
	return Want{Key: key(n), Epoch: ep(epoch), Fresh: true, Size: testSize, Image: "sha256:image"}
}

// openTest opens a store and takes everything away again at the end of the test.
func openTest(t testing.TB, dir string, fault func(string) error) *Store {
	t.Helper()
	s, err := open(context.Background(), Config{Dir: dir}, fault)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.fault, s.run.Fault = nil, nil
		if _, err := s.Sweep(context.Background(), func(Disk) Verdict { return Remove }); err != nil {
			t.Errorf("sweep: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		noTrace(t, dir)
	})
	return s
}

func noTrace(t testing.TB, dir string) {
	t.Helper()
	if m, _ := mounts.Below(filepath.Join(dir, "mnt")); len(m) > 0 {
		t.Errorf("mounts are left: %v", m)
	}
	if l, _ := loopdev.Bound(dir); len(l) > 0 {
		t.Errorf("loop devices are left: %v", l)
	}
}

func attach(t testing.TB, s *Store, w Want) Attachment {
	t.Helper()
	a, err := s.Attach(context.Background(), w)
	if err != nil {
		t.Fatalf("attach: %v", err)
	}
	return a
}

func put(t testing.TB, a Attachment, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(a.Root, Upper, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func get(t testing.TB, a Attachment, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(a.Root, Upper, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func wantKind(t testing.TB, err error, kind errkind.Kind) {
	t.Helper()
	if errs.Kind(err) != kind {
		t.Fatalf("got %v (%v), want kind %v", err, errs.Kind(err), kind)
	}
}

func TestSleepAndWakeKeepTheFiles(t *testing.T) {
	needRoot(t)
	ctx := context.Background()
	dir := t.TempDir()
	s := openTest(t, dir, nil)
	a := attach(t, s, fresh(1, 1))
	if !a.Created || a.State != Blank {
		t.Errorf("got %+v", a)
	}
	if err := s.Activate(key(1), ep(1)); err != nil {
		t.Fatal(err)
	}
	put(t, a, "f", "one")
	slept(t, s, 1, 1, "m1")
	if m, _ := mounts.IsMount(s.mountPoint(key(1))); m {
		t.Error("the disk of a sleeping session is mounted")
	}
	if _, err := s.Attach(ctx, Want{Key: key(1), Epoch: ep(5), Head: "another", LastActive: ep(4)}); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("an older disk was handed out: %v", err)
	}
	a = attach(t, s, Want{Key: key(1), Epoch: ep(2), Head: "m1", LastActive: ep(1)})
	if a.Created || get(t, a, "f") != "one" {
		t.Errorf("woke with another disk: %+v", a)
	}
	// Sealed without a write, it is still the same manifest.
	sh, same, err := s.SealShot(ctx, key(1), ep(2))
	if err != nil || sh != nil || same.ID != "m1" {
		t.Errorf("got %v, %v, want m1", same, err)
	}
}

func TestAttachIsIdempotentAndExclusive(t *testing.T) {
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := s.Attach(context.Background(), fresh(1, 1)); err != nil {
				t.Errorf("attach: %v", err)
			}
		})
	}
	wg.Wait()
	_, err := s.Attach(context.Background(), fresh(1, 2))
	wantKind(t, err, errkind.Busy)
	inv, err := s.List()
	if err != nil || len(inv.Disks) != 1 || !inv.Disks[0].Mounted || inv.Disks[0].Device == "" || len(inv.Strays) != 0 {
		t.Errorf("got %+v, %v", inv, err)
	}
}

func TestAbsurdWantsAreRefusedAndChangeNothing(t *testing.T) {
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	ok := fresh(1, 1)
	for name, change := range map[string]func(*Want){
		"no epoch":        func(w *Want) { w.Epoch = ids.Epoch{} },
		"no generation":   func(w *Want) { w.Generation = ids.Generation{} },
		"path as key":     func(w *Want) { w.Session = "../../etc" },
		"tiny":            func(w *Want) { w.Size = 4096 },
		"odd size":        func(w *Want) { w.Size++ },
		"huge":            func(w *Want) { w.Size = 1 << 60 },
		"no image":        func(w *Want) { w.Image = "" },
		"fresh but slept": func(w *Want) { w.Head = "m1" },
	} {
		w := ok
		change(&w)
		_, err := s.Attach(context.Background(), w)
		if !errs.Is(err, errkind.Invalid) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	_, err := s.Attach(context.Background(), Want{Key: key(1), Epoch: ep(4), LastActive: ep(3)})
	wantKind(t, err, errkind.NotFound)
	if inv, _ := s.List(); len(inv.Disks)+len(inv.Strays) != 0 {
		t.Errorf("something was made: %+v", inv)
	}
}

func TestAnEmptyImageIsNeverHandedOutAsTheUsers(t *testing.T) {
	needRoot(t)
	ctx := context.Background()
	s := openTest(t, t.TempDir(), nil)
	attach(t, s, fresh(1, 1))
	if err := s.Activate(key(1), ep(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Detach(ctx, key(1)); err != nil {
		t.Fatal(err)
	}
	if err := mkfs(ctx, s.image(key(1)), testSize); err != nil { // the image was lost and re-made
		t.Fatal(err)
	}
	_, err := s.Attach(ctx, Want{Key: key(1), Epoch: ep(2), LastActive: ep(1)})
	wantKind(t, err, errkind.DataLoss)
	if err := os.Remove(s.image(key(1))); err != nil {
		t.Fatal(err)
	}
	_, err = s.Attach(ctx, Want{Key: key(1), Epoch: ep(2), LastActive: ep(1)})
	wantKind(t, err, errkind.DataLoss)
}

func TestAnImageThatAVMWroteIsNeverMounted(t *testing.T) {
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	attach(t, s, fresh(1, 1))
	if err := s.Detach(context.Background(), key(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.MarkVMWritten(key(1)); err != nil {
		t.Fatal(err)
	}
	_, err := s.Attach(context.Background(), Want{Key: key(1), Epoch: ep(2), LastActive: ep(1)})
	wantKind(t, err, errkind.Refused)
}

func TestRestartAdoptsWhatIsMounted(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	s := openTest(t, dir, nil)
	a := attach(t, s, fresh(1, 1))
	put(t, a, "f", "x")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s2 := openTest(t, dir, nil)
	b := attach(t, s2, fresh(1, 1))
	if get(t, b, "f") != "x" {
		t.Error("another disk")
	}
	if sp, err := s2.Space(); err != nil || sp.Promised == 0 {
		t.Errorf("the adopted disk is not promised its space: %+v, %v", sp, err)
	}
	if err := s2.Delete(context.Background(), key(1)); err != nil {
		t.Fatal(err)
	}
	s.release(key(1)) // the first store is dead
}

func TestDeleteReturnsSpaceAndIsIdempotent(t *testing.T) {
	needRoot(t)
	s := openTest(t, tmpfsPool(t, 400), nil)
	a := attach(t, s, fresh(1, 1))
	before, _ := freeBytes(s.dir)
	big := filepath.Join(a.Root, Upper, "big")
	if err := os.WriteFile(big, make([]byte, 30<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	unix.Sync()
	full, _ := freeBytes(s.dir)
	if err := os.Remove(big); err != nil {
		t.Fatal(err)
	}
	var after uint64
	for end := time.Now().Add(20 * time.Second); after < full+(20<<20) && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		unix.Sync() // ext4 discards in the background, some time after its journal commits
		after, _ = freeBytes(s.dir)
	}
	if full > before-(25<<20) || after < full+(20<<20) {
		t.Errorf("free before %d, with the file %d, after its removal %d", before, full, after)
	}
	for range 2 {
		if err := s.Delete(context.Background(), key(1)); err != nil {
			t.Fatal(err)
		}
	}
	if inv, err := s.List(); err != nil || len(inv.Disks)+len(inv.Strays) != 0 {
		t.Errorf("got %+v, %v", inv, err)
	}
}

// tmpfsPool is a pool of its own with so many MiB.
func tmpfsPool(t testing.TB, mib int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", mib)); err != nil {
		t.Skipf("skipped: no tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount pool: %v", err)
		}
	})
	return dir
}

func TestSpaceIsAdmittedBeforeAnythingIsMade(t *testing.T) {
	needRoot(t)
	s := openTest(t, tmpfsPool(t, 180), nil)
	attach(t, s, fresh(1, 1))
	attach(t, s, fresh(2, 1))
	_, err := s.Attach(context.Background(), fresh(3, 1))
	wantKind(t, err, errkind.NoCapacity)
	if !strings.Contains(err.Error(), "no space for") {
		t.Errorf("unclear: %v", err)
	}
	if inv, _ := s.List(); len(inv.Disks) != 2 || len(inv.Strays) != 0 {
		t.Errorf("the refusal made something: %+v", inv)
	}
	if err := s.Delete(context.Background(), key(2)); err != nil {
		t.Fatal(err)
	}
	attach(t, s, fresh(3, 1))
}

func TestNoSpaceToFormatLeavesNothing(t *testing.T) {
	needRoot(t)
	s := openTest(t, tmpfsPool(t, 80), nil)
	if err := os.WriteFile(filepath.Join(s.dir, "ballast"), make([]byte, 81<<20), 0o600); err == nil {
		t.Fatal("the pool is larger than asked")
	}
	w := fresh(1, 1)
	err := s.claim(context.Background(), w.Key, w.Size) // past admission, as if space vanished meanwhile
	wantKindOf(t, err, errkind.NoCapacity)
	if err := s.unclaim(key(1)); err != nil {
		t.Fatal(err)
	}
	if inv, _ := s.List(); len(inv.Disks)+len(inv.Strays) != 0 {
		t.Errorf("left: %+v", inv)
	}
}

func wantKindOf(t testing.TB, err error, kind errkind.Kind) {
	t.Helper()
	if kindOf(err) != kind {
		t.Fatalf("got %v (%v), want kind %v", err, kindOf(err), kind)
	}
}

func TestBlanksAreKeptReadyUpToTheCeilingAndBackOff(t *testing.T) {
	needRoot(t)
	s := openTest(t, t.TempDir(), nil)
	ctx, cancel := context.WithCancel(context.Background())
	tries := make(chan struct{}, 100)
	b := &blanks{store: s, ready: 2, log: s.log, sizes: []uint64{testSize}, wake: make(chan struct{}, 1), done: make(chan struct{}), cancel: cancel}
	fail := true
	b.mkfs = func(ctx context.Context, path string, size uint64) error {
		tries <- struct{}{}
		if fail {
			fail = false
			return unix.ENOSPC
		}
		return mkfs(ctx, path, size)
	}
	go b.fillForEver(ctx)
	for range 3 { // one failure, then two blanks
		select {
		case <-tries:
		case <-time.After(20 * time.Second):
			t.Fatal("the refill gave up")
		}
	}
	b.nudge(testSize)
	if err := b.claim(ctx, testSize, filepath.Join(s.dir, "claimed")); err != nil {
		t.Fatal(err)
	}
	<-tries // the claimed one is replaced
	b.close()
	if len(tries) != 0 {
		t.Errorf("%d blanks too many", len(tries))
	}
}

// BenchmarkAttach is a wake with a blank ready: claim, record, loop, mount; and Detach.
func BenchmarkAttach(b *testing.B) {
	needRoot(b)
	s := openTest(b, b.TempDir(), nil)
	s.blanks.ready = 1
	for n := range b.N {
		s.blanks.nudge(testSize)
		for {
			if inv, _ := s.List(); inv.Blanks[testSize] > 0 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		began := time.Now()
		a := attach(b, s, fresh(n+1, 1))
		b.ReportMetric(float64(time.Since(began).Microseconds())/1000, "attach-ms")
		for _, st := range a.Steps {
			b.ReportMetric(float64(st.Took.Microseconds())/1000, st.Name+"-ms")
		}
		began = time.Now()
		if err := s.Detach(context.Background(), key(n+1)); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(time.Since(began).Microseconds())/1000, "detach-ms")
	}
}
