package archive

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"

	"github.com/berth-dev/berth/internal/blobstore"
	"github.com/berth-dev/berth/internal/blobstore/layer"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// flaky is a store whose errors have kinds of their own, as those of package blobstore, and that fails
// some requests before it works.
type flaky struct {
	layer.Driver
	fails atomic.Int64
}

func (f *flaky) fail() error {
	if f.fails.Add(-1) >= 0 {
		return errs.E("ask the store", errkind.Unavailable, "", "it is away for a moment")
	}
	return nil
}

func (f *flaky) NewRangeReader(ctx context.Context, key string, off, n int64, o *driver.ReaderOptions) (driver.Reader, error) {
	if err := f.fail(); err != nil {
		return nil, err
	}
	return f.Driver.NewRangeReader(ctx, key, off, n, o)
}

func (f *flaky) NewTypedWriter(ctx context.Context, key, ctype string, o *driver.WriterOptions) (driver.Writer, error) {
	if err := f.fail(); err != nil {
		return nil, err
	}
	return f.Driver.NewTypedWriter(ctx, key, ctype, o)
}

func realStore(t *testing.T) *blob.Bucket {
	t.Helper()
	b, err := blobstore.Open(t.Context(), "file://"+t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// TestAStoreThatFailsForAMomentIsAskedAgain also where its errors have kinds already.
func TestAStoreThatFailsForAMomentIsAskedAgain(t *testing.T) {
	f := &flaky{Driver: layer.Driver{Below: realStore(t)}}
	d := Open(blob.NewBucket(f), Options{Backoff: time.Microsecond, Kind: blobstore.Kind})
	m := make(image, 4*ChunkSize).fill(0, 3*ChunkSize, 1)
	f.fails.Store(2)
	ix, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	f.fails.Store(2)
	if _, err := d.Load(t.Context(), testDisk, testKey, ix.Info().ID); err != nil {
		t.Fatal(err)
	}
	f.fails.Store(1 << 30)
	if _, err := d.Load(t.Context(), testDisk, testKey, ix.Info().ID); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("a store that stays away: %v", err)
	}
}

// TestAMissingObjectOfARealStoreIsDamage that a verification finds and a restore refuses, not a
// "not found" that means that there is no such session.
func TestAMissingObjectOfARealStoreIsDamage(t *testing.T) {
	b := realStore(t)
	d := Open(b, Options{Backoff: time.Microsecond, Kind: blobstore.Kind})
	m := make(image, 4*ChunkSize).fill(0, 3*ChunkSize, 1)
	ix, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	head := ix.Info().ID
	lost := testDisk.pack(ix.packs[0].name)
	if err := b.Delete(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	v, err := d.Verify(t.Context(), testDisk, head, "", 0)
	if err != nil || len(v.Damaged) != 1 || !strings.HasSuffix(lost, v.Damaged[0].Object) {
		t.Errorf("a missing pack: %+v, %v", v.Damaged, err)
	}
	if _, err := content(t, d, ix); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a restore without a pack: %v", err)
	}
	if err := b.Delete(t.Context(), testDisk.manifest(head)); err != nil {
		t.Fatal(err)
	}
	d = Open(b, Options{Backoff: time.Microsecond, Kind: blobstore.Kind})
	if _, err := d.Load(t.Context(), testDisk, testKey, head); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a missing manifest: %v", err)
	}
	if v, err := d.Verify(t.Context(), testDisk, head, "", 0); err != nil || len(v.Damaged) != 1 {
		t.Errorf("a missing manifest: %+v, %v", v.Damaged, err)
	}
}
