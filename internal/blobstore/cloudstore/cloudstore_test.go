package cloudstore_test

import (
	"context"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/berth-dev/berth/internal/blobstore"
	"github.com/berth-dev/berth/internal/blobstore/blobtest"
	_ "github.com/berth-dev/berth/internal/blobstore/cloudstore"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// TestStoreOnAFakeOfS3 runs against gofakes3, a fake of S3 in this process over loopback: not S3.
func TestStoreOnAFakeOfS3(t *testing.T) {
	backend := s3mem.New()
	if err := backend.CreateBucket("disks"); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(gofakes3.New(backend).Server())
	t.Cleanup(srv.Close)
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	b, err := blobstore.Open(t.Context(), "s3://disks?endpoint="+srv.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	if err := blobstore.Reachable(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	blobtest.Round(t, b)
	if n, err := blobstore.Tidy(t.Context(), b, time.Hour); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	_, err = blobstore.Open(t.Context(), "s3://missing?endpoint="+srv.URL, nil)
	if !errs.Is(err, errkind.Invalid) || !strings.Contains(err.Error(), "there is no bucket missing") {
		t.Errorf("got %v", err)
	}
}

// TestCloudURLErrorIsOneSentenceWithoutSecrets opens URLs whose store cannot be used: each error is one
// sentence of the right kind and repeats no secret.
func TestCloudURLErrorIsOneSentenceWithoutSecrets(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	t.Setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
	t.Setenv("AZURE_STORAGE_ACCOUNT", "acct")
	t.Setenv("AZURE_STORAGE_KEY", "aHVudGVyMg==")
	for url, want := range map[string]errkind.Kind{
		"s3://":                              errkind.Invalid,
		"s3://u:hunter2@b":                   errkind.Invalid,
		"s3://b?endpoint=nowhere":            errkind.Invalid,
		"s3://b?nonsense=hunter2&region=x":   errkind.Invalid,
		"s3://b?endpoint=http://127.0.0.1:1": errkind.Unavailable,
		"gs://":                              errkind.Invalid,
		"gs://b":                             errkind.Unavailable,
		"azblob://":                          errkind.Invalid,
		"azblob://c?protocol=http&domain=127.0.0.1:1&localemu=true": errkind.Unavailable,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		_, err := blobstore.Open(ctx, url, nil)
		cancel()
		if !errs.Is(err, want) || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "CLOUD=1") {
			t.Errorf("%s: %v, want %v: %v", url, errs.Kind(err), want, err)
		}
	}
}
