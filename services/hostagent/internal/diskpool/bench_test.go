package diskpool

import (
	"os"
	"testing"
)

// BenchmarkOpen makes and mounts a pool as large as the file system below it.
func BenchmarkOpen(b *testing.B) {
	dir := room(b)
	for b.Loop() {
		p, err := Open(b.Context(), Config{Dir: dir, Mode: Loop})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := p.Close(); err != nil {
			b.Fatal(err)
		}
		_ = os.Remove(dir + suffix)
		b.StartTimer()
	}
}

// BenchmarkMount mounts one that is there.
func BenchmarkMount(b *testing.B) {
	dir := room(b)
	for b.Loop() {
		p, err := Open(b.Context(), Config{Dir: dir, Mode: Loop})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := p.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
