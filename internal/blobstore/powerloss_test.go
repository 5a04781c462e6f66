package blobstore

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"gocloud.dev/blob"
	"gocloud.dev/blob/fileblob"
	"golang.org/x/sys/unix"
)

// xfs is a file system in a file that can lose its power: what was not synced
// is gone.
type xfs struct {
	t          *testing.T
	image, dir string
	mounted    bool
}

func newXFS(t *testing.T) *xfs {
	x := &xfs{t: t, image: filepath.Join(t.TempDir(), "xfs.img"), dir: t.TempDir()}
	if err := os.WriteFile(x.image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(x.image, 320<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.xfs", "-q", x.image).CombinedOutput(); err != nil {
		t.Skipf("no XFS can be made: %v %s", err, out)
	}
	t.Cleanup(x.unmount)
	if err := x.mount(); err != nil {
		t.Skipf("no XFS can be mounted: %v", err)
	}
	return x
}

func (x *xfs) mount() error {
	out, err := exec.Command("mount", "-o", "loop,nouuid", x.image, x.dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	x.mounted = true
	return nil
}

func (x *xfs) unmount() {
	if !x.mounted {
		return
	}
	if err := unix.Unmount(x.dir, 0); err != nil {
		x.t.Error(err)
		return
	}
	x.mounted = false
}

// losePower stops the file system without writing its log (XFS_IOC_GOINGDOWN,
// NOLOGFLUSH), and mounts what is in the image then, as after a crash: a copy,
// since another process that has just copied the mounts of this one keeps the
// file system that was stopped, and a second mount of it would be the same.
func (x *xfs) losePower() {
	x.t.Helper()
	d, err := os.Open(x.dir)
	if err != nil {
		x.t.Fatal(err)
	}
	flags := uint32(2)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, d.Fd(), 0x8004587d, uintptr(unsafe.Pointer(&flags)))
	_ = d.Close()
	if errno != 0 {
		x.t.Fatal(errno)
	}
	was := x.image
	x.image += ".after"
	if out, err := exec.Command("cp", "--sparse=always", was, x.image).CombinedOutput(); err != nil {
		x.t.Fatalf("%v: %s", err, out)
	}
	x.unmount()
	if err := x.mount(); err != nil {
		x.t.Fatal(err)
	}
}

// An acknowledged object, also one that replaced another, is there after a
// loss of power, and an acknowledged delete does not come back. fileblob by
// itself is the control: it must lose its object, or the test proves nothing.
func TestAcknowledgedObjectsOutliveALossOfPower(t *testing.T) {
	x := newXFS(t)
	ctx := bustest.Context(t)
	b := open(t, "file://"+x.dir+"/store")
	plain, err := fileblob.OpenBucket(x.dir+"/plain", &fileblob.Options{CreateDir: true, NoTempDir: true, Metadata: fileblob.MetadataDontWrite})
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("berth"), 100_000)
	put := func(b *blob.Bucket, key string, data []byte) {
		t.Helper()
		if err := b.WriteAll(ctx, key, data, nil); err != nil {
			t.Fatal(err)
		}
	}
	put(b, "v1/a/gone", data)
	put(b, "v1/a/replaced", []byte("old"))
	for i := range 5 {
		put(b, fmt.Sprintf("v1/a/%d/x", i), data)
	}
	put(b, "v1/a/replaced", data)
	if err := b.Delete(ctx, "v1/a/gone"); err != nil {
		t.Fatal(err)
	}
	put(plain, "v1/x", data) // last: a sync of the other would write it along
	x.losePower()
	// As a process that begins after it: the folder is on another device now.
	b = open(t, "file://"+x.dir+"/store")
	for _, key := range []string{"v1/a/0/x", "v1/a/1/x", "v1/a/2/x", "v1/a/3/x", "v1/a/4/x", "v1/a/replaced"} {
		if got, err := b.ReadAll(ctx, key); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %d bytes, %v", key, len(got), err)
		}
	}
	if _, err := b.Attributes(ctx, "v1/a/gone"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a deleted object came back: %v", err)
	}
	if got, err := plain.ReadAll(ctx, "v1/x"); err == nil && bytes.Equal(got, data) {
		t.Error("fileblob's object is there without a sync: the test loses no power")
	} else {
		t.Logf("the control lost its object: %d bytes, %v", len(got), err)
	}
}
