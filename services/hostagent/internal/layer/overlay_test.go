package layer

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/unpack"
)

// TestARealOverlayComesBack: what a kernel's overlay notes in its upper directory, taken into a copy
// of the lower one, gives what the overlay showed.
func TestARealOverlayComesBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount")
	}
	dir := t.TempDir()
	at := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, lower := range []string{"lower", "copy"} {
		for _, f := range []string{"kept", "gone", "changed", "emptied/a", "emptied/b/c", "dir-gone/x", "turned/into/a/file", "file"} {
			must(os.MkdirAll(filepath.Dir(at(lower, f)), 0o755))
			must(os.WriteFile(at(lower, f), []byte("image "+f), 0o644))
		}
	}
	for _, d := range []string{"upper", "work", "merged"} {
		must(os.Mkdir(at(d), 0o755))
	}
	opts := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s,userxattr,index=off,metacopy=off", at("lower"), at("upper"), at("work"))
	if err := unix.Mount("overlay", at("merged"), "overlay", 0, opts); err != nil {
		t.Skipf("no overlay on %s: %v", dir, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at("merged"), unix.MNT_DETACH) })
	must(os.Remove(at("merged/gone")))
	must(os.RemoveAll(at("merged/dir-gone")))
	must(os.WriteFile(at("merged/changed"), []byte("session"), 0o600))
	must(os.RemoveAll(at("merged/emptied")))
	must(os.Mkdir(at("merged/emptied"), 0o700))
	must(os.WriteFile(at("merged/emptied/new"), []byte("session"), 0o600))
	must(os.RemoveAll(at("merged/turned")))
	must(os.WriteFile(at("merged/turned"), []byte("a file"), 0o600))
	must(os.Remove(at("merged/file")))
	must(os.MkdirAll(at("merged/file/now/dir"), 0o755))
	must(os.Symlink("kept", at("merged/link")))
	must(os.Link(at("merged/changed"), at("merged/emptied/hard")))
	must(os.Lchown(at("merged/kept"), 1234, 5678))
	want := view(t, at("merged"))

	upper, err := os.Open(at("upper"))
	must(err)
	defer upper.Close()
	var raw bytes.Buffer
	st, err := Write(context.Background(), &raw, upper, Limits{})
	if err != nil || st.Skipped != 0 || st.Attributes != 0 {
		t.Fatalf("%+v, %v", st, err)
	}
	got, err := unpack.Into(context.Background(), at("copy"), &raw)
	if err != nil || got.Skipped != 0 || got.Entries != st.Entries || got.Bytes != st.Bytes {
		t.Fatalf("%+v of %+v, %v", got, st, err)
	}
	if have := view(t, at("copy")); have != want {
		t.Errorf("the overlay shows\n%s\nand the archive gives\n%s", want, have)
	}
}

// view names all that is below a directory.
func view(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s %o %d:%d", strings.TrimPrefix(p, dir), st.Mode, st.Uid, st.Gid)
		switch {
		case d.Type().IsRegular():
			raw, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " %d.%d %q", st.Mtim.Sec, st.Mtim.Nsec, raw)
		case d.Type() == fs.ModeSymlink:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			b.WriteString(" " + to)
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}
