package blobstore

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"gocloud.dev/blob"
	"pgregory.net/rapid"
)

// round holds a store to what every store must do.
func round(t *testing.T, b *blob.Bucket) {
	t.Helper()
	ctx := bustest.Context(t)
	data := make([]byte, 9<<20+5)
	_, _ = rand.Read(data)
	if err := Reachable(ctx, b); err != nil {
		t.Fatal(err)
	}
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
	if err := b.Delete(ctx, key); !errs.Is(err, errkind.NotFound) {
		// S3 does not tell whether there was one
		if err != nil {
			t.Errorf("got %v", err)
		}
	}
	if n, err := Tidy(ctx, b, time.Hour); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

func open(t *testing.T, url string) *blob.Bucket {
	t.Helper()
	b, err := Open(bustest.Context(t), url, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

func TestStoreInMemory(t *testing.T) { round(t, open(t, "mem://")) }

func TestStoreInAFolder(t *testing.T) { round(t, open(t, "file://"+t.TempDir()+"/new/folder")) }

func TestStoreOnTheBus(t *testing.T) {
	host := subjects.Host("h1")
	conn := bustest.Connect(t, bustest.Start(t, host), host)
	for _, url := range []string{"nats://", "nats://BERTH_DISKS"} {
		b, err := Open(bustest.Context(t), url, conn)
		if err != nil {
			t.Fatal(err)
		}
		round(t, b)
		_ = b.Close()
	}
	if _, err := Open(bustest.Context(t), "nats://OTHER", conn); !errs.Is(err, errkind.Denied) {
		t.Errorf("got %v", err)
	}
}

// Against gofakes3, a fake of S3 in this process, over loopback: not S3.
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
	round(t, open(t, "s3://disks?endpoint="+srv.URL))
	_, err := Open(bustest.Context(t), "s3://missing?endpoint="+srv.URL, nil)
	if !errs.Is(err, errkind.Invalid) || !strings.Contains(err.Error(), "there is no bucket missing") {
		t.Errorf("got %v", err)
	}
}

// Every URL that opens nothing says why in one sentence of the right kind,
// and repeats no secret.
func TestUrlsThatOpenNothingSayWhy(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	t.Setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
	t.Setenv("AZURE_STORAGE_ACCOUNT", "acct")
	t.Setenv("AZURE_STORAGE_KEY", "aHVudGVyMg==")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for url, want := range map[string]errkind.Kind{
		"ftp://x":                            errkind.Invalid,
		"":                                   errkind.Invalid,
		"/a/folder":                          errkind.Invalid,
		"s3://":                              errkind.Invalid,
		"s3://u:hunter2@b":                   errkind.Invalid,
		"s3://b?endpoint=nowhere":            errkind.Invalid,
		"s3://b?nonsense=hunter2&region=x":   errkind.Invalid,
		"s3://b?endpoint=http://127.0.0.1:1": errkind.Unavailable,
		"gs://":                              errkind.Invalid,
		"gs://b":                             errkind.Unavailable,
		"azblob://":                          errkind.Invalid,
		"azblob://c?protocol=http&domain=127.0.0.1:1&localemu=true": errkind.Unavailable,
		"file://relative":     errkind.Invalid,
		"file:///":            errkind.Invalid,
		"file://" + file:      errkind.Invalid,
		"file:///tmp/x?a=b":   errkind.Invalid,
		"nats://":             errkind.Invalid,
		"file:///a%zzhunter2": errkind.Invalid,
	} {
		ctx, cancel := context.WithTimeout(bustest.Context(t), 2*time.Second)
		_, err := Open(ctx, url, nil)
		cancel()
		if !errs.Is(err, want) || strings.ContainsAny(err.Error(), "\n") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want %v: %v", url, errs.Kind(err), want, err)
			continue
		}
		t.Logf("%s: %v", url, err)
	}
}

func TestDescribeTellsNoSecret(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secret := rapid.StringMatching(`[A-Z]{6}`).Draw(t, "secret")
		for _, url := range []string{"s3://u:%s@b/p", "s3://b?key=%s", "s3://%s:x@b", "s3://b/p#%s"} {
			if got := Describe(fmt.Sprintf(url, secret)); strings.Contains(got, secret) {
				t.Fatal(got)
			}
		}
	})
	if got := Describe("s3://b/p?endpoint=x"); got != "s3://b/p" {
		t.Error(got)
	}
}
