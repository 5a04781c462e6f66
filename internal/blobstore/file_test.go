package blobstore

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"gocloud.dev/blob"
	"golang.org/x/sys/unix"
)

// What a killed writer leaves is no object, and goes when it is old.
func TestTemporaryFilesAreNoObjects(t *testing.T) {
	dir := t.TempDir()
	b := open(t, "file://"+dir)
	ctx := bustest.Context(t)
	w, err := b.NewWriter(ctx, "v1/a/x", &blob.WriterOptions{ContentType: "x"}) // neither closed nor cancelled
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("torn")); err != nil {
		t.Fatal(err)
	}
	if found, _ := filepath.Glob(dir + "/v1/a/x.*.tmp"); len(found) != 1 {
		t.Fatalf("%q: fileblob names its temporary files in another way now", found)
	}
	if page, _, err := b.ListPage(ctx, blob.FirstPageToken, 10, nil); err != nil || len(page) != 0 {
		t.Errorf("%+v, %v", page, err)
	}
	if n, err := Tidy(ctx, b, 0); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("the folders of what was left are still there: %v", left)
	}
}

// The names of folders are names of sessions: the last object takes them
// along, while others write beside it.
func TestEmptyFoldersGoAndNoWriterLosesItsFolder(t *testing.T) {
	dir := t.TempDir()
	b := open(t, "file://"+dir)
	ctx := bustest.Context(t)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 50 {
				key := fmt.Sprintf("v1/a/s/packs/%d-%d", w, i)
				if err := b.WriteAll(ctx, key, []byte(key), nil); err != nil {
					t.Error(err)
				}
				if got, err := b.ReadAll(ctx, key); err != nil || string(got) != key {
					t.Errorf("%q, %v", got, err)
				}
				if err := b.Delete(ctx, key); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// A full file system refuses with NoCapacity; the object that was there stays
// whole and the new one leaves nothing, though its writer is closed.
func TestFullFolderRefusesAndKeepsWhatItHas(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("berth-test", dir, "tmpfs", 0, "size=3m"); err != nil {
		t.Skipf("no file system of 3 MiB can be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	b := open(t, "file://"+dir)
	ctx := bustest.Context(t)
	old := bytes.Repeat([]byte("x"), 1<<20)
	if err := b.WriteAll(ctx, "v1/x", old, nil); err != nil {
		t.Fatal(err)
	}
	w, err := b.NewWriter(ctx, "v1/x", &blob.WriterOptions{ContentType: "x"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write(bytes.Repeat([]byte("y"), 4<<20))
	if !errs.Is(err, errkind.NoCapacity) {
		t.Errorf("write: %v", err)
	}
	if err := w.Close(); !errs.Is(err, errkind.NoCapacity) {
		t.Errorf("close: %v", err)
	}
	if got, err := b.ReadAll(ctx, "v1/x"); err != nil || !bytes.Equal(got, old) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if found, _ := filepath.Glob(dir + "/v1/*"); len(found) != 1 {
		t.Errorf("left: %q", found)
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if err := Reachable(ctx, b); !errs.Is(err, errkind.Denied) {
		t.Errorf("read-only: %v", err)
	}
}

// A store whose mount went away is not an empty store: nothing is found missing, and nothing is
// written below the place where it will be again.
func TestAnotherFolderAtTheSamePathIsNoStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	b := open(t, "file://"+dir)
	ctx := bustest.Context(t)
	if err := b.WriteAll(ctx, "v1/a/x", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	away := func(name string, err error) {
		t.Helper()
		if Kind(err) != errkind.Unavailable {
			t.Errorf("%s: %v, want that the store is away", name, err)
		}
	}
	for _, instead := range []func() error{
		func() error { return nil }, func() error { return os.Mkdir(dir, 0o700) }, func() error { return os.WriteFile(dir, nil, 0o600) },
	} {
		if err := errors.Join(os.Rename(dir, dir+".away"), instead()); err != nil {
			t.Fatal(err)
		}
		_, _, err := b.ListPage(ctx, blob.FirstPageToken, 10, nil)
		away("list", err)
		_, err = b.ReadAll(ctx, "v1/a/x")
		away("read", err)
		_, err = b.Exists(ctx, "v1/a/x")
		away("look", err)
		away("write", b.WriteAll(ctx, "v1/a/y", []byte("y"), nil))
		if left, err := os.ReadDir(dir); err == nil && len(left) > 0 {
			t.Errorf("written beside the store: %v", left)
		}
		if err := errors.Join(os.RemoveAll(dir), os.Rename(dir+".away", dir)); err != nil {
			t.Fatal(err)
		}
		if got, err := b.ReadAll(ctx, "v1/a/x"); err != nil || string(got) != "x" {
			t.Fatalf("with the store back: %q, %v", got, err)
		}
	}
}
