package extents

import (
	"fmt"
	"math/rand"
	"os"
	"testing"
)

// full is a disk of 10 GiB with 1 GiB of data.
func full(b *testing.B, dir string) *os.File {
	b.Helper()
	disk := create(b, dir, 10<<30)
	for off := int64(0); off < 1<<30; off += 4 << 20 {
		write(b, disk, 8*off, 4<<20)
	}
	if err := disk.Sync(); err != nil {
		b.Fatal(err)
	}
	return disk
}

// BenchmarkClone is how long a disk must be frozen at least.
func BenchmarkClone(b *testing.B) {
	dir := xfs(b)
	disk := full(b, dir)
	for b.Loop() {
		clone := create(b, dir, 0)
		if err := Clone(clone, disk); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		_ = os.Remove(clone.Name())
		b.StartTimer()
	}
}

// BenchmarkChanged finds 50 MiB that changed of 1 GiB, in pieces of a size.
func BenchmarkChanged(b *testing.B) {
	for _, piece := range []int64{4 << 10, 128 << 10, 1 << 20} {
		b.Run(fmt.Sprint(piece>>10, "KiB"), func(b *testing.B) {
			dir := xfs(b)
			disk := full(b, dir)
			base := cloned(b, dir, disk)
			r := rand.New(rand.NewSource(1))
			for range 50 << 20 / piece {
				off := r.Int63n(1<<30/piece) * piece
				write(b, disk, off/(4<<20)*(32<<20)+off%(4<<20), piece)
			}
			now := cloned(b, dir, disk)
			var changed []Range
			for b.Loop() {
				var err error
				if changed, err = Changed(base, now); err != nil {
					b.Fatal(err)
				}
			}
			sum := uint64(0)
			for _, c := range changed {
				sum += c.Len
			}
			b.ReportMetric(float64(sum)/(1<<20), "MiB/found")
			b.ReportMetric(float64(len(changed)), "ranges")
		})
	}
}
