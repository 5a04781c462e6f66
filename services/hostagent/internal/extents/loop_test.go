package extents

import (
	"bytes"
	"math/rand"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// The writes of a session reach its image by a loop device, also while it is cloned.
func TestNothingIsLeftOutBelowALoopDevice(t *testing.T) {
	dir := xfs(t)
	const size = 16 << 20
	disk := create(t, dir, size)
	dev, err := loopdev.Attach(disk.Name(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	stop := make(chan struct{})
	var writers sync.WaitGroup
	for n := range 2 {
		writers.Go(func() {
			r := rand.New(rand.NewSource(int64(n)))
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if err := scribble(dev, r, size); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var base *os.File
	var held []byte
	for shot := range 40 {
		now := cloned(t, dir, disk)
		got, err := content(now)
		if err != nil {
			t.Fatal(err)
		}
		if base != nil {
			changed, err := Changed(base, now)
			if err != nil {
				t.Fatal(err)
			}
			if at := unequal(got, held, changed); at >= 0 {
				t.Fatalf("shot %d: byte %d changed, and is outside of %v", shot, at, changed)
			}
			if still, err := content(base); err != nil || !bytes.Equal(still, held) {
				t.Fatalf("shot %d: the base itself changed: %v", shot, err)
			}
			if err := os.Remove(base.Name()); err != nil { // its blocks go to whoever writes next
				t.Fatal(err)
			}
			_ = base.Close()
		}
		base, held = now, got
	}
	close(stop)
	writers.Wait()
	if held, err := loopdev.Bound(filepath.Dir(disk.Name())); err != nil || len(held) != 1 {
		t.Errorf("got %v, %v", held, err)
	}
}

// scribble writes, discards or zeroes some blocks of a device, and brings them to its file.
func scribble(dev *os.File, r *rand.Rand, size int64) error {
	off, n := r.Int63n(size/block)*block, (1+r.Int63n(8))*block
	n = min(n, size-off)
	switch r.Intn(8) {
	case 0:
		return unix.Fallocate(int(dev.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	case 1:
		return unix.Fallocate(int(dev.Fd()), unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	}
	b := make([]byte, n)
	_, _ = r.Read(b)
	if _, err := dev.WriteAt(b, off); err != nil {
		return err
	}
	return dev.Sync()
}
