package blobstore

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/blobstore/blobtest"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"gocloud.dev/blob"
	"pgregory.net/rapid"
)

// round checks what every store must do.
func round(t *testing.T, b *blob.Bucket) {
	t.Helper()
	if err := Reachable(bustest.Context(t), b); err != nil {
		t.Fatal(err)
	}
	blobtest.Round(t, b)
	if n, err := Tidy(bustest.Context(t), b, time.Hour); n != 0 || err != nil {
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

// Every URL that opens nothing says why in one sentence of the right kind,
// and repeats no secret.
func TestUrlsThatOpenNothingSayWhy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for url, want := range map[string]errkind.Kind{
		"ftp://x":             errkind.Invalid,
		"":                    errkind.Invalid,
		"/a/folder":           errkind.Invalid,
		"s3://":               errkind.Invalid,
		"s3://u:hunter2@b":    errkind.Invalid,
		"gs://":               errkind.Invalid,
		"azblob://":           errkind.Invalid,
		"file://relative":     errkind.Invalid,
		"file:///":            errkind.Invalid,
		"file://" + file:      errkind.Invalid,
		"file:///tmp/x?a=b":   errkind.Invalid,
		"nats://":             errkind.Invalid,
		"file:///a%zzhunter2": errkind.Invalid,
	} {
		ctx, cancel := context.WithTimeout(bustest.Context(t), 500*time.Millisecond) // a provider that is away is asked again until then
		_, err := Open(ctx, url, nil)
		cancel()
		if !errs.Is(err, want) || strings.ContainsAny(err.Error(), "\n") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want %v: %v", url, errs.Kind(err), want, err)
			continue
		}
		t.Logf("%s: %v", url, err)
	}
}

// TestProgramWithoutCloudClientsNamesTheBuildThatHasThem opens cloud URLs in this program, which does not
// import package cloudstore.
func TestProgramWithoutCloudClientsNamesTheBuildThatHasThem(t *testing.T) {
	for url, scheme := range map[string]string{
		"s3://b?endpoint=http://127.0.0.1:1": "s3", "s3://b?nonsense=hunter2&region=x": "s3", "gs://b": "gs", "azblob://c": "azblob",
	} {
		_, err := Open(t.Context(), url, nil)
		want := "open store: this program was built without " + scheme + "://; build it with make build CLOUD=1"
		if !errs.Is(err, errkind.Invalid) || err.Error() != want {
			t.Errorf("%s: got %v, want %s", url, err, want)
		}
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
