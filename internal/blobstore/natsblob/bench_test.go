package natsblob

import (
	"crypto/sha256"
	"fmt"
	"os"
	"testing"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"gocloud.dev/blob"
	"golang.org/x/sync/errgroup"
)

// BenchmarkObject puts and gets objects of 16 MiB in one store, synced before
// each acknowledgement, with chunks of several sizes.
func BenchmarkObject(b *testing.B) {
	e := bustest.Start(b, host)
	conn := bustest.Connect(b, e, host)
	data := random(16 << 20)
	for _, kib := range []int{64, 128, 256, 512, 1000} {
		bk := bucketOf(b, conn, kib<<10)
		name := fmt.Sprintf("%dKiB", kib)
		b.Run("put/"+name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for i := range b.N {
				if err := bk.WriteAll(b.Context(), fmt.Sprint(name, i%4), data, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("get/"+name, func(b *testing.B) {
			if err := bk.WriteAll(b.Context(), name+"0", data, nil); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(data)))
			for range b.N {
				if _, err := bk.ReadAll(b.Context(), name+"0"); err != nil {
					b.Fatal(err)
				}
			}
		})
		deleteAll(b, bk)
	}
}

// BenchmarkList lists one session's 50 objects among 20,000: what the first
// page costs, which fetches every name.
func BenchmarkList(b *testing.B) {
	e := bustest.Start(b, host)
	conn := bustest.Connect(b, e, host)
	bk := bucketOf(b, conn, 0)
	g, ctx := errgroup.WithContext(b.Context())
	g.SetLimit(64)
	for i := range 20_000 {
		g.Go(func() error {
			return bk.WriteAll(ctx, fmt.Sprintf("v1/acme/s%03d.1/packs/1-%032d", i/50, i), nil, nil)
		})
	}
	if err := g.Wait(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		page, _, err := bk.ListPage(b.Context(), blob.FirstPageToken, 1000, &blob.ListOptions{Prefix: "v1/acme/s007.1/"})
		if err != nil || len(page) != 50 {
			b.Fatal(len(page), err)
		}
	}
}

// BenchmarkFloor writes and syncs a file in pieces as large as a chunk: what
// the disk allows a put.
func BenchmarkFloor(b *testing.B) {
	data := random(16 << 20)
	f, err := os.Create(b.TempDir() + "/floor")
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		_, _ = sha256.New().Write(data)
		for off := 0; off < len(data); off += ChunkSize {
			if _, err := f.Write(data[off:min(off+ChunkSize, len(data))]); err != nil {
				b.Fatal(err)
			}
			if err := f.Sync(); err != nil {
				b.Fatal(err)
			}
		}
	}
}
