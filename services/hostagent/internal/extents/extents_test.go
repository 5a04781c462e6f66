package extents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const block = 4096

// mounted makes a file system of a kind in a sparse file and mounts it.
func mounted(t testing.TB, mkfs ...string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	if _, err := exec.LookPath(mkfs[0]); err != nil {
		t.Skip("skipped: ", err)
	}
	dir := t.TempDir()
	image, point := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 4<<30), os.Mkdir(point, 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range [][]string{append(slices.Clone(mkfs), image), {"mount", "-o", "loop", image, point}} {
		if out, err := exec.Command(cmd[0], cmd[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", cmd, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", point).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return point
}

func xfs(t testing.TB) string  { return mounted(t, "mkfs.xfs", "-q", "-m", "reflink=1", "-K") }
func ext4(t testing.TB) string { return mounted(t, "mkfs.ext4", "-q", "-E", "nodiscard") }

func create(t testing.TB, dir string, size int64) *os.File {
	t.Helper()
	f, err := os.CreateTemp(dir, "f")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

func write(t testing.TB, f *os.File, off, n int64) {
	t.Helper()
	b := make([]byte, n)
	_, _ = rand.New(rand.NewSource(off + n)).Read(b)
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}

func cloned(t testing.TB, dir string, src *os.File) *os.File {
	t.Helper()
	dst := create(t, dir, 0)
	if err := Clone(dst, src); err != nil {
		t.Fatal(err)
	}
	return dst
}

func content(f *os.File) ([]byte, error) { return os.ReadFile(f.Name()) }

// change does one thing to a disk that a loop device, or somebody's hand, could do.
func change(t *rapid.T, f *os.File) error {
	const most = 1 << 20
	size, err := sizeOf(f)
	if err != nil {
		return err
	}
	unit := rapid.SampledFrom([]int64{1, block}).Draw(t, "unit")
	off := rapid.Int64Range(0, most/unit-1).Draw(t, "off") * unit
	n := rapid.Int64Range(1, 64<<10/unit+1).Draw(t, "n") * unit
	fd := int(f.Fd())
	switch op := rapid.SampledFrom([]string{"write", "write", "write", "punch", "zero", "reserve", "truncate", "grow", "collapse", "sync"}).Draw(t, "op"); op {
	case "write":
		_, err = f.WriteAt(bytes.Repeat([]byte{byte(rapid.IntRange(0, 255).Draw(t, "byte"))}, int(n)), off)
	case "punch":
		err = unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	case "zero":
		err = unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, off, n)
	case "reserve":
		err = unix.Fallocate(fd, 0, off, n)
	case "truncate":
		err = f.Truncate(off)
	case "grow":
		err = f.Truncate(int64(size) + n)
	case "collapse":
		off, n = off/block*block, (n+block-1)/block*block
		if uint64(off+n) < size {
			err = unix.Fallocate(fd, unix.FALLOC_FL_COLLAPSE_RANGE, off, n)
		}
	case "sync":
		err = f.Sync()
	}
	return err
}

// unequal returns the first byte outside of ranges where a and b differ; b is zeros after its end.
func unequal(a, b []byte, outside []Range) int {
	for i := 0; i < len(a); {
		if len(outside) > 0 && uint64(i) >= outside[0].Off {
			i, outside = int(outside[0].End()), outside[1:]
			continue
		}
		other := byte(0)
		if i < len(b) {
			other = b[i]
		}
		if a[i] != other {
			return i
		}
		i++
	}
	return -1
}

func ordered(rs []Range, size int) error {
	end := uint64(0)
	for i, r := range rs {
		if r.Len == 0 || i > 0 && r.Off <= end || r.End() > uint64(size) {
			return fmt.Errorf("range %d of %v is not in order, or after %d", i, rs, size)
		}
		end = r.End()
	}
	return nil
}

// A byte that is left out of a snapshot although it changed is lost in silence.
func TestNothingThatChangedIsLeftOut(t *testing.T) {
	dir := xfs(t)
	rapid.Check(t, func(rt *rapid.T) {
		room, err := os.MkdirTemp(dir, "r")
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
		disk := open("disk")
		defer func() { _ = disk.Close() }()
		var base *os.File
		var held []byte
		for shot := range rapid.IntRange(2, 5).Draw(rt, "shots") {
			for range rapid.IntRange(0, 8).Draw(rt, "changes") {
				if err := change(rt, disk); err != nil {
					rt.Fatal(err)
				}
			}
			now := open(fmt.Sprint("shot", shot))
			defer func() { _ = now.Close() }()
			if err := Clone(now, disk); err != nil {
				rt.Fatal(err)
			}
			got := check(rt, base, now, held)
			if base == nil || rapid.Bool().Draw(rt, "commit") {
				if base != nil {
					_ = os.Remove(base.Name())
				}
				base, held = now, got
			} else {
				_ = os.Remove(now.Name())
			}
		}
	})
}

// check compares what is said about now with what is in it, which it returns.
func check(rt *rapid.T, base, now *os.File, held []byte) []byte {
	data, err := Data(now)
	if err != nil {
		rt.Fatal(err)
	}
	var changed []Range
	if base != nil {
		if changed, err = Changed(base, now); err != nil {
			rt.Fatal(err)
		}
	}
	got, err := content(now)
	if err != nil {
		rt.Fatal(err)
	}
	if err := errors.Join(ordered(data, len(got)), ordered(changed, len(got))); err != nil {
		rt.Fatal(err)
	}
	if at := unequal(got, nil, data); at >= 0 {
		rt.Fatalf("byte %d is not zero, and outside of %v", at, data)
	}
	if base == nil {
		return got
	}
	if at := unequal(got, held, changed); at >= 0 {
		rt.Fatalf("byte %d changed, and is outside of %v", at, changed)
	}
	if still, err := content(base); err != nil || !bytes.Equal(still, held) {
		rt.Fatalf("the base itself changed: %v", err)
	}
	return got
}

// A guest can cut its image into as many pieces as it likes.
func TestManyPiecesAreAllSeen(t *testing.T) {
	dir := xfs(t)
	const n = 5*batch + 7
	disk := create(t, dir, 2*n*block)
	for i := range int64(n) {
		write(t, disk, 2*i*block, block)
	}
	base := cloned(t, dir, disk)
	if data, err := Data(base); err != nil || len(data) != n {
		t.Fatalf("%d parts of %d: %v", len(data), n, err)
	}
	if got, err := Changed(base, cloned(t, dir, disk)); err != nil || len(got) != 0 {
		t.Fatalf("nothing changed, got %v, %v", got, err)
	}
	late := int64(2 * (4*batch + 3) * block)
	write(t, disk, late, 10)          // over data
	write(t, disk, late+block, block) // into a hole, and close to the end
	write(t, disk, (2*n-1)*block, block)
	want := []Range{{uint64(late), 2 * block}, {(2*n - 1) * block, block}}
	if got, err := Changed(base, cloned(t, dir, disk)); err != nil || !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v, %v", got, want, err)
	}
}

// One extent of the base is two of the newer file: what did not change must not be read again.
func TestAnExtentThatWasSplitIsNoChange(t *testing.T) {
	dir := xfs(t)
	disk := create(t, dir, 64<<20)
	write(t, disk, 0, 32<<20)
	base := cloned(t, dir, disk)
	write(t, disk, 10<<20, block)
	if err := unix.Fallocate(int(disk.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 20<<20, 2*block); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(int(disk.Fd()), 0, 40<<20, 1<<20); err != nil { // reserved is still zeros
		t.Fatal(err)
	}
	want := []Range{{10 << 20, block}, {20 << 20, 2 * block}}
	if got, err := Changed(base, cloned(t, dir, disk)); err != nil || !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v, %v", got, want, err)
	}
}

// A disk that grew has parts that its base never had.
func TestGrownDisk(t *testing.T) {
	dir := xfs(t)
	disk := create(t, dir, 1<<20+100) // the base ends within a block
	write(t, disk, 0, 1<<20+100)
	base := cloned(t, dir, disk)
	if err := disk.Truncate(4 << 20); err != nil {
		t.Fatal(err)
	}
	write(t, disk, 3<<20, block)
	now := cloned(t, dir, disk)
	got, err := Changed(base, now)
	if err != nil || len(got) != 2 || got[1] != (Range{3 << 20, block}) || got[0].Off > 1<<20+100 || got[0].Off < 1<<20 {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := Changed(now, base); err != nil { // the other way round: nothing after the end
		t.Error(err)
	} else if err := ordered(got, 1<<20+100); err != nil {
		t.Error(err)
	}
}

// Block numbers mean nothing to each other on two file systems, nor where blocks are not shared.
func TestWhatCannotBeToldIsUnknown(t *testing.T) {
	dir, other, plain := xfs(t), xfs(t), ext4(t)
	in := func(dir string) *os.File { f := create(t, dir, 1<<20); write(t, f, 0, block); return f }
	for name, f := range map[string][2]*os.File{"two": {in(dir), in(other)}, "ext4": {in(plain), in(plain)}} {
		if _, err := Changed(f[0], f[1]); !errors.Is(err, ErrUnknown) || !errs.Is(err, errkind.Unimplemented) {
			t.Errorf("%s: got %v", name, err)
		}
		if err := Clone(f[0], f[1]); !errors.Is(err, ErrNotSupported) || !errs.Is(err, errkind.Unimplemented) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestUsableTellsWhatClones(t *testing.T) {
	for name, dir := range map[string]string{"ext4": ext4(t), "xfs without reflink": mounted(t, "mkfs.xfs", "-q", "-m", "reflink=0", "-K")} {
		if err := Usable(dir); !errors.Is(err, ErrNotSupported) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	dir := xfs(t)
	if err := Usable(dir); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if err := Usable(filepath.Join(dir, "missing")); err == nil || errors.Is(err, ErrNotSupported) {
		t.Errorf("got %v", err)
	}
}

// Without clones a copy must neither lose a byte nor fill the holes of a large empty disk.
func TestCopyKeepsContentAndHoles(t *testing.T) {
	dir := ext4(t)
	src, dst := create(t, dir, 1<<30), create(t, dir, 7)
	write(t, src, 3, 5)
	write(t, src, 100<<20, 3<<20+5)
	write(t, dst, 0, 8<<20) // is replaced, longer or not
	if err := CopySparse(t.Context(), dst, src); err != nil {
		t.Fatal(err)
	}
	var a, b unix.Stat_t
	if err := errors.Join(dst.Sync(), unix.Stat(src.Name(), &a), unix.Stat(dst.Name(), &b)); err != nil {
		t.Fatal(err)
	}
	if a.Size != b.Size || b.Blocks*512 > 4<<20 {
		t.Errorf("%d bytes, %d blocks; the copied has %d, %d", b.Size, b.Blocks, a.Size, a.Blocks)
	}
	data, err := Data(src)
	if err != nil || len(data) != 2 {
		t.Fatalf("got %v, %v", data, err)
	}
	for _, r := range append(data, Range{0, block}, Range{1<<30 - block, block}) {
		want, got := make([]byte, r.Len), make([]byte, r.Len)
		_, err := src.ReadAt(want, int64(r.Off))
		if _, derr := dst.ReadAt(got, int64(r.Off)); err != nil || derr != nil || !bytes.Equal(want, got) {
			t.Errorf("%v differs: %v, %v", r, err, derr)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := CopySparse(ctx, dst, src); !errs.Is(err, errkind.Canceled) {
		t.Errorf("got %v", err)
	}
}

// The kernel's answer decides what is left out: whatever is not plain counts as changed.
func TestStrangeExtentsCountAsChanged(t *testing.T) {
	plain := piece{end: 10, physical: 100, kind: blocks}
	for flags, want := range map[uint32]kind{
		0: blocks, extentLast | extentShared | extentMerged: blocks, extentUnwritten: zeros,
		0x2: unknown, 0x4: unknown, 0x8: unknown, 0x80: unknown, 0x200: unknown, 0x400: unknown,
		1 << 30: unknown, 0x4 | extentUnwritten: unknown,
	} {
		e := fiemapExtent{flags: flags}
		if got := e.kind(); got != want {
			t.Errorf("%#x is %d, want %d", flags, got, want)
		}
	}
	for name, p := range map[string]piece{
		"elsewhere": {end: 10, physical: 101, kind: blocks}, "zeros": {end: 10, physical: 100}, "unknown": {end: 10, physical: 100, kind: unknown},
	} {
		if plain.same(p, 5) || p.same(plain, 5) {
			t.Errorf("%s is the same", name)
		}
	}
	odd := piece{end: 10, kind: unknown}
	if odd.same(odd, 0) || !plain.same(piece{off: 4, end: 6, physical: 104, kind: blocks}, 5) {
		t.Error("sub-ranges are not compared")
	}
}
