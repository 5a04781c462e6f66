package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/errkind"
)

func usage(t testing.TB, s *Store, n int) Usage {
	t.Helper()
	u, err := s.Usage(key(n))
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// fill writes until the disk has no byte left.
func fill(t testing.TB, a Attachment) {
	t.Helper()
	for i, unit := 0, 1<<20; unit >= SizeUnit; i++ {
		err := os.WriteFile(filepath.Join(a.Root, Upper, fmt.Sprintf("ballast%d", i)), bytes.Repeat([]byte{byte(i) | 1}, unit), 0o644)
		if errors.Is(err, unix.ENOSPC) {
			unit /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// mountOverlay mounts what a runtime mounts: it makes folders on the disk.
func mountOverlay(a Attachment, point string) error {
	lower := filepath.Join(point, "lower")
	root := filepath.Join(point, "root")
	if err := errors.Join(os.MkdirAll(lower, 0o755), os.MkdirAll(root, 0o755)); err != nil {
		return err
	}
	return unix.Mount("overlay", root, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s,userxattr,index=off,metacopy=off",
		lower, filepath.Join(a.Root, Upper), filepath.Join(a.Root, Work)))
}

// A full disk that can no longer start: it wakes, also with the overlay of a runtime on it, there is
// room to delete, and writing goes on afterwards.
func TestAFullDiskWakesWithRoomToDelete(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := awake(t, s, 1, 1)
		before := usage(t, s, 1)
		point := t.TempDir()
		if err := mountOverlay(a, point); err != nil {
			t.Skipf("skipped: no overlay: %v", err)
		}
		if err := unix.Unmount(filepath.Join(point, "root"), 0); err != nil {
			t.Fatal(err)
		}
		fill(t, a)
		full := usage(t, s, 1)
		if before.Free < testSize/2 || full.Free != 0 || full.Used <= before.Used || full.Size != before.Size {
			t.Errorf("before %+v, full %+v", before, full)
		}
		slept(t, s, 1, 1, "m1")
		a = wake(t, s, 1, 2, "m1", 1)
		activate(t, s, 1, 2)
		if u := usage(t, s, 1); u.Free != 0 {
			t.Errorf("woke with %+v", u)
		}
		if err := mountOverlay(a, point); err != nil {
			t.Fatalf("the runtime cannot use a full disk: %v", err)
		}
		root := filepath.Join(point, "root")
		defer func() { _ = unix.Unmount(root, unix.MNT_DETACH) }()
		for _, err := range []error{
			os.Remove(filepath.Join(root, "ballast0")),
			os.WriteFile(filepath.Join(root, "new"), bytes.Repeat([]byte("n"), 1<<19), 0o644),
			unix.Unmount(root, 0),
		} {
			if err != nil {
				t.Error(err)
			}
		}
		slept(t, s, 1, 2, "m2")
		if a = wake(t, s, 1, 3, "m2", 2); len(get(t, a, "new")) != 1<<19 {
			t.Error("what was written after the delete is gone")
		}
	})
}

func TestADiskGrows(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		s := openWith(t, cfg, nil)
		a := awake(t, s, 1, 1)
		put(t, a, "f", "mine")
		saved(t, s, shoot(t, s, 1, 1), "m1")
		small := usage(t, s, 1)
		for _, bad := range []uint64{0, testSize / 2, 2*testSize + 1, MaxSize * 2} {
			_, err := s.Grow(t.Context(), key(1), bad)
			wantKind(t, err, errkind.Invalid)
		}
		_, err := s.Grow(t.Context(), key(1), MaxSize)
		wantKind(t, err, errkind.NoCapacity)
		for range 2 {
			got, err := s.Grow(t.Context(), key(1), 2*testSize)
			if err != nil {
				t.Fatal(err)
			}
			if got != 2*testSize {
				t.Logf("this process may not resize what is mounted: the disk has %d bytes until the next wake", got)
			} else if u := usage(t, s, 1); u.Size < 2*small.Size-8<<20 {
				t.Errorf("%+v, then %+v", small, u)
			}
		}
		if sp, _ := s.Space(); sp.Promised < testSize+testSize/2 {
			t.Errorf("only %d bytes are promised", sp.Promised)
		}
		saved(t, s, shoot(t, s, 1, 1), "m2")
		slept(t, s, 1, 1, "m3")
		a = wake(t, s, 1, 2, "m3", 1)
		if u := usage(t, s, 1); u.Size < 2*small.Size-8<<20 || get(t, a, "f") != "mine" {
			t.Errorf("%+v, then %+v", small, u)
		}
		slept2(t, s, 1, 2, "m4")
		// The plan grew while the session slept.
		a = attach(t, s, Want{Key: key(1), Epoch: ep(3), Head: "m4", LastActive: ep(2), Size: 3 * testSize})
		if u := usage(t, s, 1); u.Size < 3*small.Size-16<<20 || get(t, a, "f") != "mine" || a.Size != 3*testSize {
			t.Errorf("%+v, then %+v", small, u)
		}
		fill(t, a)
		slept2(t, s, 1, 3, "m5")
		// Smaller, or more than the pool has: it wakes as it is.
		for i, size := range []uint64{testSize, MaxSize} {
			a = attach(t, s, Want{Key: key(1), Epoch: ep(uint64(4 + i)), Head: "m5", LastActive: ep(3), Size: size})
			if a.Size != 3*testSize {
				t.Errorf("wanted %d, got %d", size, a.Size)
			}
			if err := s.Detach(t.Context(), key(1)); err != nil {
				t.Fatal(err)
			}
		}
		if got := names(t, s, 1); got[imageName+".grown"] || got[imageName+".grown"+making] {
			t.Errorf("left: %v", got)
		}
	})
}

func FuzzSuperblock(f *testing.F) {
	ok := make([]byte, 1024)
	binary.LittleEndian.PutUint16(ok[0x38:], 0xef53)
	binary.LittleEndian.PutUint32(ok[0x4:], 16384)
	binary.LittleEndian.PutUint32(ok[0x18:], 2)
	f.Add(ok)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := parseSuper(b); err == nil && n > MaxSize {
			t.Errorf("a disk of %d bytes", n)
		}
	})
}

func FuzzIndex(f *testing.F) {
	f.Add(index{"m1", testSize, []byte("plain\n")}.encode())
	f.Add([]byte("berth-base 1 m1 5 0"))
	f.Add([]byte("berth-base 1 ../x 5 0\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := decodeIndex(b)
		if err != nil {
			return
		}
		again, err := decodeIndex(x.encode())
		if err != nil || again.id != x.id || again.size != x.size || !bytes.Equal(again.plain, x.plain) {
			t.Errorf("%+v came back as %+v, %v", x, again, err)
		}
	})
}
