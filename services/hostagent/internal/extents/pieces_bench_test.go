package extents

import (
	"fmt"
	"math/rand"
	"os"
	"testing"
	"time"
)

// BenchmarkClonePieces compares two ways to a still copy of a disk into which so many blocks of 4 KiB
// were written here and there, of which 64 since a moment ago: a clone of all of it, and a clone that
// is a moment old brought up to date by what changed since. Run it with -benchtime 1x.
func BenchmarkClonePieces(b *testing.B) {
	for _, n := range []int{0, 4096, 16384} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			dir := xfs(b)
			disk := full(b, dir)
			_ = cloned(b, dir, disk) // the parent's: from now on blocks are written elsewhere
			rng := rand.New(rand.NewSource(1))
			scatter(b, disk, rng, n)
			for b.Loop() {
				old := create(b, dir, 0)
				mirror, err := Follow(old, disk)
				if err != nil {
					b.Fatal(err)
				}
				began := time.Now()
				if _, err := mirror.Update(b.Context()); err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(time.Since(began).Microseconds())/1000, "ms/mirror")
				if err := mirror.Note(); err != nil {
					b.Fatal(err)
				}
				scatter(b, disk, rng, 64)
				began = time.Now()
				now := cloned(b, dir, disk)
				b.ReportMetric(float64(time.Since(began).Microseconds())/1000, "ms/clone")
				_ = os.Remove(now.Name())
				began = time.Now()
				if _, err := Changed(old, disk); err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(time.Since(began).Microseconds())/1000, "ms/compare")
				began = time.Now()
				if n, err := mirror.Update(b.Context()); err != nil || n == 0 {
					b.Fatal(n, err)
				}
				b.ReportMetric(float64(time.Since(began).Microseconds())/1000, "ms/update")
				_ = os.Remove(old.Name())
			}
		})
	}
}

func scatter(b *testing.B, disk *os.File, rng *rand.Rand, n int) {
	for range n {
		off := rng.Int63n(1<<30/4096) * 4096
		write(b, disk, off/(4<<20)*(32<<20)+off%(4<<20), 4096)
	}
	if err := disk.Sync(); err != nil {
		b.Fatal(err)
	}
}
