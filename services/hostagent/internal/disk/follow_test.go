package disk

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What is written between the rounds in which a clone follows its disk is in the shot, and what is
// written after the freeze is not.
func TestAShotHasWhatWasWrittenWhileItWasCloned(t *testing.T) {
	s := openWith(t, Config{Dir: xfsDir(t), Reflink: true}, nil)
	a := awake(t, s, 1, 1)
	put(t, a, "f", "before")
	put(t, a, "gone", strings.Repeat("x", 8<<20))
	var want [32]byte
	s.fault = func(step string) error {
		switch step {
		case "shot.followed":
			put(t, a, "f", "followed")
		case "shot.caughtup":
			put(t, a, "g", "caught up")
			if err := os.Remove(filepath.Join(a.Root, Upper, "gone")); err != nil {
				return err
			}
			return discardFree(a.Root)
		case "shot.cloned":
			want = sumOf(t, s.image(key(1))) // frozen still
		}
		return nil
	}
	sh := shoot(t, s, 1, 1)
	put(t, a, "f", "after")
	if sumOf(t, sh.Image.Name()) != want {
		t.Error("the shot is not what the disk was while it was frozen")
	}
	if f, g := inShot(t, sh, "f"), inShot(t, sh, "g"); sh.CrashConsistent || f != "followed" || g != "caught up" {
		t.Errorf("got %q, %q of %+v", f, g, sh)
	}
}

// discardFree gives what the files of a mount do not hold back to its image.
func discardFree(root string) error {
	d, err := os.Open(root)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	const fitrim = 0xc0185879 // FITRIM of linux/fs.h
	r := struct{ start, length, least uint64 }{length: math.MaxUint64}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.Fd(), fitrim, uintptr(unsafe.Pointer(&r))); errno != 0 {
		return fmt.Errorf("trim: %w", errno)
	}
	return nil
}

// Ranges that were cloned while the session wrote are of no one moment: such a shot is a whole clone.
func TestAShotThatDidNotStayFrozenIsOfOneMoment(t *testing.T) {
	for name, patience := range map[string]time.Duration{"thawed": freezeTime, "late": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			over := make(chan struct{})
			s := openWith(t, Config{Dir: xfsDir(t), Reflink: true, MarkFrozen: func(Key, string) (func(), error) {
				return func() { close(over) }, nil
			}}, nil)
			a := awake(t, s, 1, 1)
			put(t, a, "f", "before")
			goOn := make(chan struct{})
			if name == "late" {
				s.freezeTime, s.freezeFile = patience, func(f *os.File) error { <-goOn; return freezeFile(f) }
			}
			var again bool
			s.fault = func(step string) error {
				switch step {
				case "shot.frozen":
					if name == "thawed" {
						return freezeMount(s.mountPoint(key(1)), false)
					}
				case "shot.cloned":
					put(t, a, "f", "later")
					return syncMount(s.mountPoint(key(1)))
				case "shot.again":
					again = true
				}
				return nil
			}
			sh := shoot(t, s, 1, 1)
			close(goOn)
			<-over
			if !again || !sh.CrashConsistent || inShot(t, sh, "f") != "later" {
				t.Errorf("again %v, got %+v", again, sh)
			}
		})
	}
}

// BenchmarkShoot freezes a disk of 10 GiB with 1 GiB in it after 64 MiB of it were written again, in
// pieces of a size here and there.
func BenchmarkShoot(b *testing.B) {
	for _, piece := range []int64{4 << 10, 1 << 20} {
		b.Run(fmt.Sprint(piece>>10, "KiB"), func(b *testing.B) { benchmarkShoot(b, piece) })
	}
}

func benchmarkShoot(b *testing.B, piece int64) {
	p := ownPool(b, 20<<10)
	s := openWith(b, Config{Dir: p.point, Reflink: true}, nil)
	w := fresh(1, 1)
	w.Size = 10 << 30
	a := attach(b, s, w)
	activate(b, s, 1, 1)
	for i := range 16 {
		put(b, a, string(rune('a'+i)), strings.Repeat("0123456789abcdef", 4<<20))
	}
	saved(b, s, shoot(b, s, 1, 1), "m0")
	rng := rand.New(rand.NewSource(1))
	var frozen, took time.Duration
	for n := range b.N {
		scatter(b, a, rng, piece)
		began := time.Now()
		sh := shoot(b, s, 1, 1)
		took += time.Since(began)
		frozen = max(frozen, sh.Frozen)
		saved(b, s, sh, "m"+strings.Repeat("x", n+1))
	}
	b.ReportMetric(float64(frozen.Microseconds())/1000, "frozen-max-ms")
	b.ReportMetric(float64(took.Microseconds())/1000/float64(b.N), "shot-ms")
}

// scatter writes 64 MiB over the files of a disk, and leaves them in memory.
func scatter(b *testing.B, a Attachment, rng *rand.Rand, piece int64) {
	b.Helper()
	text := bytes.Repeat([]byte("fedcba9876543210"), int(piece/16))
	for range 64 << 20 / piece {
		f, err := os.OpenFile(filepath.Join(a.Root, Upper, string(rune('a'+rng.Intn(16)))), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteAt(text, rng.Int63n(64<<20/piece)*piece)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			b.Fatal(err)
		}
	}
}
