package archive

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gocloud.dev/blob/fileblob"

	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

// text fills b with what compresses about as a disk of programs and sources does: three parts words
// and one part noise.
func text(b []byte, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	words := make([][]byte, 4096)
	for i := range words {
		w := make([]byte, 3+rng.IntN(9))
		for j := range w {
			w[j] = byte('a' + rng.IntN(26))
		}
		words[i] = append(w, ' ')
	}
	for off := 0; off < len(b); {
		if off/(1<<20)%4 == 3 {
			var v [8]byte
			for i, x := range [8]uint64{} {
				v[i] = byte(rng.Uint64() + x)
			}
			off += copy(b[off:], v[:])
			continue
		}
		off += copy(b[off:], words[rng.IntN(len(words))])
	}
}

type bench struct {
	dir  string
	d    *Depot
	img  *os.File
	size uint64
	base *Index
}

func newBench(b *testing.B, size int) *bench {
	x := &bench{dir: b.TempDir(), size: uint64(size)}
	bucket, err := fileblob.OpenBucket(x.dir, &fileblob.Options{NoTempDir: true, Metadata: fileblob.MetadataDontWrite})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = bucket.Close() })
	x.d = Open(bucket, Options{})
	if x.img, err = os.Create(filepath.Join(b.TempDir(), "disk.img")); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = x.img.Close() })
	buf := make([]byte, 64<<20)
	for off := 0; off < size; off += len(buf) {
		text(buf, uint64(off))
		if _, err := x.img.WriteAt(buf, int64(off)); err != nil {
			b.Fatal(err)
		}
	}
	return x
}

func (x *bench) source(changed []extents.Range) Source {
	return Source{Image: x.img, Size: x.size, Data: []extents.Range{{Off: 0, Len: x.size}}, Changed: changed, Base: x.base}
}

// rate reports bytes a second, and seconds of processor time: the second is true on a busy machine too.
func rate(b *testing.B, what string, n uint64, took, busy time.Duration) {
	b.ReportMetric(float64(n)/1e6/took.Seconds(), what+"-MB/s")
	b.ReportMetric(busy.Seconds(), what+"-cpu-s")
}

func processor() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkDepot saves 1 GiB, saves 50 MiB of changes in it, and restores it, beside zstd -d of the
// same chunks in plain packs. Run it with -benchtime 1x.
func BenchmarkDepot(b *testing.B) {
	const size, change = 1 << 30, 50 << 20
	x := newBench(b, size)
	for n := range b.N {
		began, busy := time.Now(), processor()
		base, st, err := x.d.Save(b.Context(), testDisk, testKey, x.source(nil), metaAt(1, time.Duration(n)*time.Hour))
		if err != nil {
			b.Fatal(err)
		}
		rate(b, "save-1GiB", size, time.Since(began), processor()-busy)
		b.ReportMetric(float64(st.BytesUploaded)/1e6, "uploaded-MB")
		x.base = base
		x.change(b, change)
		x.restore(b)
		x.floor(b)
		x.base = nil
	}
}

// change writes change bytes in runs of 1 MiB and saves.
func (x *bench) change(b *testing.B, change int) {
	buf := make([]byte, 1<<20)
	var ranges []extents.Range
	for i := range change / len(buf) {
		text(buf, rand.Uint64())
		off := uint64(i) * 20 << 20
		if _, err := x.img.WriteAt(buf, int64(off)); err != nil {
			b.Fatal(err)
		}
		ranges = append(ranges, extents.Range{Off: off, Len: uint64(len(buf))})
	}
	began := time.Now()
	ix, st, err := x.d.Save(b.Context(), testDisk, testKey, x.source(ranges), metaAt(1, 1000*time.Hour))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(time.Since(began).Seconds(), "save-change-s")
	b.ReportMetric(float64(st.BytesRead)/1e6, "change-read-MB")
	b.ReportMetric(float64(st.BytesUploaded)/1e6, "change-uploaded-MB")
	b.ReportMetric(float64(st.Objects), "change-objects")
	x.base = ix
}

// restore measures the best of three: memory that this machine has not touched before costs more
// than all the rest.
func (x *bench) restore(b *testing.B) {
	best, least := time.Hour, time.Hour
	for range 3 {
		dst, err := os.Create(filepath.Join(b.TempDir(), "restored.img"))
		if err != nil {
			b.Fatal(err)
		}
		began, busy := time.Now(), processor()
		ix, err := x.d.Load(b.Context(), testDisk, testKey, x.base.Info().ID)
		if err == nil {
			err = x.d.Restore(b.Context(), testKey, ix, dst, nil)
		}
		best, least = min(best, time.Since(began)), min(least, processor()-busy)
		if err == nil {
			err = same(x.img, dst)
		}
		_ = dst.Close()
		_ = os.Remove(dst.Name())
		if err != nil {
			b.Fatal(err)
		}
	}
	rate(b, "restore", x.size, best, least)
}

func same(a, b *os.File) error {
	bufs := [2][]byte{make([]byte, 8<<20), make([]byte, 8<<20)}
	for off := int64(0); ; off += int64(len(bufs[0])) {
		n, err := a.ReadAt(bufs[0], off)
		if m, _ := b.ReadAt(bufs[1], off); m != n || !bytes.Equal(bufs[0][:n], bufs[1][:m]) {
			return fmt.Errorf("the restored disk differs near byte %d", off)
		}
		if err == io.EOF {
			return nil
		}
	}
}

// floor is the same chunks, compressed one by one and not sealed, through cat and zstd -d into a file.
func (x *bench) floor(b *testing.B) {
	if _, err := exec.LookPath("zstd"); err != nil {
		b.Log("no zstd here to compare with:", err)
		return
	}
	dir := b.TempDir()
	var out *os.File
	raw := make([]byte, ChunkSize)
	for i, off := 0, int64(0); off < int64(x.size); i, off = i+1, off+ChunkSize {
		if i%256 == 0 {
			if out != nil {
				_ = out.Close()
			}
			var err error
			if out, err = os.Create(filepath.Join(dir, fmt.Sprintf("%05d.zst", i))); err != nil {
				b.Fatal(err)
			}
		}
		if _, err := x.img.ReadAt(raw, off); err != nil {
			b.Fatal(err)
		}
		if _, err := out.Write(x.d.enc.EncodeAll(raw, nil)); err != nil {
			b.Fatal(err)
		}
	}
	_ = out.Close()
	for what, cmd := range map[string]string{"zstd-d-null": "cat %s/*.zst | zstd -d -q > /dev/null", "zstd-d-file": "cat %s/*.zst | zstd -d -q > %s/out"} {
		best, least := time.Hour, time.Hour
		for range 3 {
			run := exec.Command("sh", "-c", strings.ReplaceAll(cmd, "%s", dir))
			began := time.Now()
			if msg, err := run.CombinedOutput(); err != nil {
				b.Fatal(string(msg), err)
			}
			best, least = min(best, time.Since(began)), min(least, run.ProcessState.UserTime()+run.ProcessState.SystemTime())
			_ = os.Remove(filepath.Join(dir, "out"))
		}
		rate(b, what, x.size, best, least)
	}
}
