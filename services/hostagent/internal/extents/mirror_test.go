package extents

import (
	"bytes"
	"context"
	"errors"
	"math/rand"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

func follow(t testing.TB, dst, src *os.File) *Mirror {
	t.Helper()
	m, err := Follow(dst, src)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func update(t testing.TB, m *Mirror) int {
	t.Helper()
	n, err := m.Update(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A byte that an update leaves out is an old one in the snapshot, in silence.
func TestAMirrorIsWhatItFollows(t *testing.T) {
	dir := xfs(t)
	rapid.Check(t, func(rt *rapid.T) {
		room, err := os.MkdirTemp(dir, "m")
		if err != nil {
			rt.Fatal(err)
		}
		defer func() { _ = os.RemoveAll(room) }()
		open := func(name string) *os.File {
			f, err := os.OpenFile(filepath.Join(room, name), os.O_RDWR|os.O_CREATE, 0o600)
			if err != nil {
				rt.Fatal(err)
			}
			return f
		}
		disk, base, dst := open("disk"), open("base"), open("dst")
		defer func() { _, _, _ = disk.Close(), base.Close(), dst.Close() }()
		size := rapid.Int64Range(1, 1<<20).Draw(rt, "size")
		changes := func(of string) {
			for range rapid.IntRange(0, 8).Draw(rt, of) {
				if err := errors.Join(change(rt, disk), disk.Truncate(size)); err != nil {
					rt.Fatal(err)
				}
			}
		}
		changes("before")
		if err := disk.Truncate(size); err != nil {
			rt.Fatal(err)
		}
		if rapid.Bool().Draw(rt, "base") { // another clone shares some of it
			if err := Clone(base, disk); err != nil {
				rt.Fatal(err)
			}
			changes("since the base")
		}
		m, err := Follow(dst, disk)
		if err != nil {
			rt.Fatal(err)
		}
		for range rapid.IntRange(1, 4).Draw(rt, "rounds") {
			if _, err := m.Update(context.Background()); err != nil {
				rt.Fatal(err)
			}
			equal(rt, dst, disk)
			if rapid.Bool().Draw(rt, "note") {
				if err := m.Note(); err != nil {
					rt.Fatal(err)
				}
			}
			changes("changes")
		}
	})
}

// equal compares two files by reading, and what they hold.
func equal(t rapid.TB, a, b *os.File) {
	t.Helper()
	is, err := content(a)
	want, werr := content(b)
	if err := errors.Join(err, werr); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(is, want) {
		t.Fatalf("byte %d of %d differs, the other has %d", unequal(is, want, nil), len(is), len(want))
	}
}

// Writers go on while most is cloned; what they wrote until they stopped must be there, and the mirror
// must not move once they go on.
func TestAMirrorOfALoopDeviceInUse(t *testing.T) {
	dir := xfs(t)
	const size = 16 << 20
	disk := create(t, dir, size)
	dev, err := loopdev.Attach(disk.Name(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	var quiet sync.RWMutex
	stop := make(chan struct{})
	var writers sync.WaitGroup
	for n := range 2 {
		writers.Go(func() {
			r := rand.New(rand.NewSource(int64(n)))
			for {
				select {
				case <-stop:
					return
				default:
				}
				quiet.RLock()
				err := scribble(dev, r, size)
				quiet.RUnlock()
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	defer writers.Wait()
	defer close(stop)
	for range 30 {
		dst := create(t, dir, 0)
		m := follow(t, dst, disk)
		for range 3 {
			update(t, m)
		}
		if err := m.Note(); err != nil {
			t.Fatal(err)
		}
		quiet.Lock()
		n, err := m.Update(t.Context())
		want, rerr := os.ReadFile(disk.Name())
		quiet.Unlock()
		if err := errors.Join(err, rerr, os.Remove(dst.Name())); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, size)
		if _, err := dst.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("byte %d differs after the last %d ranges: %v", unequal(got, want, nil), n, err)
		}
		_ = dst.Close()
	}
}

// A hole that an update does not carry over is data that was deleted, or space that is held twice.
func TestAMirrorHasTheHolesOfItsFile(t *testing.T) {
	dir := xfs(t)
	disk, dst := create(t, dir, 64<<20+100), create(t, dir, 80<<20)
	write(t, dst, 0, 80<<20) // goes, also after the end
	write(t, disk, 0, 32<<20)
	write(t, disk, 64<<20, 100)
	m := follow(t, dst, disk)
	if n := update(t, m); n != 2 {
		t.Errorf("%d ranges", n)
	}
	fd := int(disk.Fd())
	punch := func(mode uint32, off, n int64) {
		t.Helper()
		if err := unix.Fallocate(fd, mode|unix.FALLOC_FL_KEEP_SIZE, off, n); err != nil {
			t.Fatal(err)
		}
	}
	punch(unix.FALLOC_FL_PUNCH_HOLE, 1<<20, 9<<20)
	punch(unix.FALLOC_FL_ZERO_RANGE, 20<<20, 1<<20)
	punch(0, 40<<20, 1<<20)
	write(t, disk, 50<<20, 3)
	if n := update(t, m); n != 3 {
		t.Errorf("%d ranges", n)
	}
	if n := update(t, m); n != 0 {
		t.Errorf("%d ranges differ still", n)
	}
	equal(t, dst, disk)
	var st unix.Stat_t
	if err := unix.Stat(dst.Name(), &st); err != nil || st.Blocks*512 > 23<<20 {
		t.Errorf("%d blocks, %v", st.Blocks, err)
	}
}

// A map that is too long for the memory is read again instead.
func TestAMapIsNotNotedWithoutEnd(t *testing.T) {
	dir := xfs(t)
	disk := create(t, dir, 1<<20)
	for i := range int64(10) {
		write(t, disk, 2*i*block, block)
	}
	if l, err := note(disk, 9); l != nil || err != nil {
		t.Errorf("got %v, %v", l, err)
	}
	if l, err := note(disk, 10); err != nil || len(l.held) != 10 {
		t.Errorf("got %v, %v", l, err)
	}
}

func TestAMirrorRefusesWhatItCannotFollow(t *testing.T) {
	dir, plain := xfs(t), ext4(t)
	if _, err := Follow(create(t, plain, 1<<20), create(t, plain, 1<<20)); !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
	disk := create(t, dir, 1<<20)
	write(t, disk, 0, block)
	m := follow(t, create(t, dir, 0), disk)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.Update(ctx); !errs.Is(err, errkind.Canceled) {
		t.Errorf("got %v", err)
	}
	if n := update(t, m); n != 1 {
		t.Errorf("what was given up is not made up for: %d ranges", n)
	}
	if err := disk.Truncate(2 << 20); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Update(t.Context()); !errs.Is(err, errkind.Internal) {
		t.Errorf("another size: %v", err)
	}
}
