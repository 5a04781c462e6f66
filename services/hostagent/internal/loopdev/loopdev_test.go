package loopdev

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func image(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: loop devices need root")
	}
	if _, err := os.Stat(Control); err != nil {
		t.Skip("skipped: ", err)
	}
	path := filepath.Join(t.TempDir(), "image")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<20)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := WaitFree(path, 20*time.Second); err != nil {
			t.Error(err)
		}
	})
	return path
}

func attach(t *testing.T, path string, readonly bool) *os.File {
	t.Helper()
	dev, err := Attach(path, readonly)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	return dev
}

// A file that is bound must be found, by every path to it, or it is bound and mounted twice.
func TestABoundFileIsFound(t *testing.T) {
	path := image(t)
	if dev, ok, err := Device(path); ok || err != nil {
		t.Fatalf("got %s, %v before it was bound", dev, err)
	}
	if _, ok, err := Device(path + "-missing"); ok || err != nil {
		t.Errorf("a missing file: %v, %v", ok, err)
	}
	dev := attach(t, path, false)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(filepath.Dir(path), link); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, filepath.Join(link, "image")} {
		if got, ok, err := Device(p); got != dev.Name() || !ok || err != nil {
			t.Errorf("got %q, %v, %v for %s", got, ok, err, p)
		}
	}
	got, err := Bound(filepath.Dir(path))
	if err != nil || len(got) != 1 || got[0] != (Loop{dev.Name(), path}) {
		t.Errorf("got %v, %v", got, err)
	}
	if err := WaitFree(path, 0); !errors.Is(err, unix.EBUSY) {
		t.Errorf("got %v while it is bound", err)
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	if err := WaitFree(path, 20*time.Second); err != nil {
		t.Errorf("it does not free itself at the last close: %v", err)
	}
}

// What was written must be counted, or a dirty disk is taken for a clean one.
func TestWritesAreCounted(t *testing.T) {
	dev := attach(t, image(t), false)
	before, err := Written(dev.Name())
	if err != nil {
		t.Fatal(err)
	}
	if same, err := Written(dev.Name()); err != nil || same != before {
		t.Errorf("%d, then %d: %v", before, same, err)
	}
	if _, err := dev.WriteAt(bytes.Repeat([]byte{1}, 2*Block), 0); err != nil {
		t.Fatal(err)
	}
	if err := dev.Sync(); err != nil {
		t.Fatal(err)
	}
	if got, err := Written(dev.Name()); err != nil || got != before+2*Block/512 {
		t.Errorf("%d, then %d: %v", before, got, err)
	}
	if _, err := Written("/dev/loop-that-is-missing"); err == nil {
		t.Error("a missing device counts")
	}
}

func TestReadOnlyKeepsTheFile(t *testing.T) {
	dev := attach(t, image(t), true)
	w, err := os.OpenFile(dev.Name(), os.O_RDWR, 0)
	if err == nil {
		_, err = w.WriteAt(make([]byte, Block), 0)
		_ = w.Close()
	}
	if err == nil {
		t.Error("a read-only device was written")
	}
}

func TestADeviceGrowsWithItsFile(t *testing.T) {
	path := image(t)
	dev := attach(t, path, false)
	if err := errors.Join(os.Truncate(path, 2<<20), SetCapacity(dev.Name())); err != nil {
		t.Fatal(err)
	}
	if end, err := dev.Seek(0, 2); err != nil || end != 2<<20 {
		t.Errorf("it has %d bytes: %v", end, err)
	}
	for range 2 {
		if err := Free(dev.Name()); err != nil {
			t.Error(err)
		}
	}
}

func FuzzStat(f *testing.F) {
	f.Add("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17")
	f.Add("1 2 3 4 5 6 7")
	f.Add("")
	f.Fuzz(func(t *testing.T, s string) {
		if _, err := parseStat(s); err == nil && len(s) < 2*writeSectors+1 {
			t.Errorf("%q was taken", s)
		}
	})
}
