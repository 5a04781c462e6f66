package blobtest

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/blob/drivertest"
	"gocloud.dev/blob/memblob"
	"gocloud.dev/gcerrors"
)

type harness struct{ below *blob.Bucket }

func (h harness) MakeDriver(context.Context) (driver.Bucket, error) {
	var b *bucket
	faulty, _ := Faulty(h.below)
	faulty.As(&b)
	return keepOpen{b}, nil
}
func (harness) MakeDriverForNonexistentBucket(context.Context) (driver.Bucket, error) {
	return nil, nil
}
func (harness) HTTPClient() *http.Client         { return nil }
func (harness) SupportsCopy() bool               { return true }
func (harness) SupportsNonSlashDelimiters() bool { return true }
func (harness) SkipDownloadAt() bool             { return false }
func (harness) Close()                           {}

type keepOpen struct{ *bucket }

func (keepOpen) Close() error { return nil }

// As lets the test at the driver itself.
func (b *bucket) As(i any) bool {
	if p, ok := i.(**bucket); ok {
		*p = b
		return true
	}
	return b.Driver.As(i)
}

// Without a fault it is a bucket like any: gocloud's own suite. Skipped by
// design: TestNonexistentBucket and TestSignedURL, which memblob has not.
func TestConformanceWithoutFaults(t *testing.T) {
	h := harness{memblob.OpenBucket(nil)}
	drivertest.RunConformanceTests(t, func(context.Context, *testing.T) (drivertest.Harness, error) { return h, nil }, nil)
}

func TestFaultsAreOfTheirKindAndGoAway(t *testing.T) {
	ctx := t.Context()
	b, f := Faulty(memblob.OpenBucket(nil))
	defer b.Close()
	data := []byte("0123456789")
	put := func() error { return b.WriteAll(ctx, "x", data, nil) }
	get := func() ([]byte, error) { return b.ReadAll(ctx, "x") }
	if err := put(); err != nil {
		t.Fatal(err)
	}
	f.Unreachable(true)
	if _, err := get(); !errs.Is(err, errkind.Unavailable) || !errs.Is(put(), errkind.Unavailable) {
		t.Errorf("unreachable: %v", err)
	}
	f.Mend()
	f.ReadOnly(true)
	if err := put(); !errs.Is(err, errkind.Denied) || gcerrors.Code(b.Delete(ctx, "x")) != gcerrors.PermissionDenied {
		t.Errorf("read-only: %v", err)
	}
	if got, err := get(); err != nil || !bytes.Equal(got, data) {
		t.Errorf("read-only: %v", err)
	}
	f.Mend()
	f.Full(true)
	if err := put(); !errs.Is(err, errkind.NoCapacity) {
		t.Errorf("full: %v", err)
	}
	f.Mend()
	f.Flip("x", 3)
	if got, err := get(); err != nil || bytes.Equal(got, data) || len(got) != 10 {
		t.Errorf("flipped: %q %v", got, err)
	}
	f.Truncate("x", 4)
	if got, _ := get(); len(got) == 10 {
		t.Errorf("truncated: %q", got)
	}
	f.Miss("x")
	if _, err := get(); gcerrors.Code(err) != gcerrors.NotFound {
		t.Errorf("missing: %v", err)
	}
	if _, err := b.List(nil).Next(ctx); err != io.EOF {
		t.Errorf("missing: %v", err)
	}
	f.Mend()
	if got, err := get(); err != nil || !bytes.Equal(got, data) {
		t.Errorf("mended: %q %v", got, err)
	}
}

// A write that meets a fault in its middle stores nothing, and a slow store
// lets go of whoever gives up.
func TestFaultsInTheMiddle(t *testing.T) {
	ctx := t.Context()
	b, f := Faulty(memblob.OpenBucket(nil))
	defer b.Close()
	w, err := b.NewWriter(ctx, "x", &blob.WriterOptions{ContentType: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("some")); err != nil {
		t.Fatal(err)
	}
	f.Full(true)
	if err := w.Close(); !errs.Is(err, errkind.NoCapacity) {
		t.Errorf("got %v", err)
	}
	f.Mend()
	if ok, err := b.Exists(ctx, "x"); ok || err != nil {
		t.Errorf("%t %v", ok, err)
	}
	release := f.Slow()
	short, cancel := context.WithCancel(ctx)
	done := make(chan error, 2)
	go func() { done <- b.WriteAll(short, "y", []byte("y"), nil) }()
	if c := <-f.Arrived(); c.Op != Put || c.Key != "y" {
		t.Errorf("%+v came", c)
	}
	cancel()
	if err := <-done; gcerrors.Code(err) != gcerrors.Canceled {
		t.Errorf("got %v", err)
	}
	go func() { done <- b.WriteAll(ctx, "z", []byte("z"), nil) }()
	<-f.Arrived()
	release()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
