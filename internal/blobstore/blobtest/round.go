package blobtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"gocloud.dev/blob"
)

// Round checks what every store that package blobstore opens must do. The
// bucket must be empty; Round leaves it empty.
func Round(t *testing.T, b *blob.Bucket) {
	t.Helper()
	ctx := t.Context()
	data := make([]byte, 9<<20+5)
	_, _ = rand.Read(data)
	const key = "v1/acme/s.1/packs/1-abc"
	if err := b.WriteAll(ctx, key, data, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := b.ReadAll(ctx, key); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	r, err := b.NewRangeReader(ctx, key, 1<<20, 77, nil)
	if err != nil {
		t.Fatal(err)
	}
	var part bytes.Buffer
	if _, err := part.ReadFrom(r); err != nil || !bytes.Equal(part.Bytes(), data[1<<20:1<<20+77]) {
		t.Errorf("%d bytes, %v", part.Len(), err)
	}
	_ = r.Close()
	page, _, err := b.ListPage(ctx, blob.FirstPageToken, 10, &blob.ListOptions{Prefix: "v1/"})
	if err != nil || len(page) != 1 || page[0].Key != key || page[0].Size != int64(len(data)) {
		t.Errorf("%+v, %v", page, err)
	}
	if _, err := b.Attributes(ctx, "v1/none"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
	if _, err := b.NewReader(ctx, "v1/none", nil); !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
	short, cancel := context.WithCancel(ctx)
	w, err := b.NewWriter(short, "v1/cancelled", &blob.WriterOptions{ContentType: "x"})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write(data[:100])
	cancel()
	if err := w.Close(); err == nil {
		t.Error("a cancelled write was acknowledged")
	}
	if ok, err := b.Exists(ctx, "v1/cancelled"); ok || err != nil {
		t.Errorf("%t, %v", ok, err)
	}
	if err := b.Delete(ctx, key); err != nil {
		t.Error(err)
	}
	// S3 does not report whether the object existed.
	if err := b.Delete(ctx, key); err != nil && !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
}
