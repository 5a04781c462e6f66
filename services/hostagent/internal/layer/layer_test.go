package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// tree is a directory that is written.
type tree struct {
	t   testing.TB
	dir string
}

func newTree(t testing.TB) *tree { return &tree{t, t.TempDir()} }

func (tr *tree) must(err error) {
	tr.t.Helper()
	if err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *tree) path(name string) string { return filepath.Join(tr.dir, name) }

func (tr *tree) file(name, content string) {
	tr.t.Helper()
	tr.must(os.MkdirAll(filepath.Dir(tr.path(name)), 0o755))
	tr.must(os.WriteFile(tr.path(name), []byte(content), 0o640))
}

func (tr *tree) attr(name, key, value string) {
	tr.t.Helper()
	if err := unix.Setxattr(tr.path(name), key, []byte(value), 0); errors.Is(err, unix.ENOTSUP) {
		tr.t.Skipf("no user attributes in %s: %v", tr.dir, err)
	} else {
		tr.must(err)
	}
}

func (tr *tree) mknod(name string, mode uint32, dev int) {
	tr.t.Helper()
	if os.Geteuid() != 0 {
		tr.t.Skip("needs root for device nodes")
	}
	tr.must(unix.Mknod(tr.path(name), mode, dev))
}

// write returns the archive.
func (tr *tree) write(l Limits) ([]byte, Stats) {
	tr.t.Helper()
	root, err := os.OpenFile(tr.dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	tr.must(err)
	defer root.Close()
	var out bytes.Buffer
	st, err := Write(context.Background(), &out, root, l)
	tr.must(err)
	if st.Bytes != uint64(out.Len()) {
		tr.t.Fatalf("%d bytes were told, %d written", st.Bytes, out.Len())
	}
	return out.Bytes(), st
}

type got struct {
	*tar.Header
	content string
}

// read reads an archive; files above 1 MiB only by their length.
func read(t testing.TB, raw []byte) map[string]got {
	t.Helper()
	out := map[string]got{}
	r := tar.NewReader(bytes.NewReader(raw))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := out[h.Name]; twice {
			t.Fatalf("%q comes twice", h.Name)
		}
		g := got{Header: h}
		if h.Size <= 1<<20 {
			b, err := io.ReadAll(r)
			if err != nil {
				t.Fatalf("%q: %v", h.Name, err)
			}
			g.content = string(b)
		}
		out[h.Name] = g
	}
}

func names(m map[string]got) string { return strings.Join(slices.Sorted(maps.Keys(m)), " ") }

func TestRemovalsOfAnOverlay(t *testing.T) {
	tr := newTree(t)
	tr.file("etc/kept", "x")
	tr.mknod("etc/gone", unix.S_IFCHR, 0)
	tr.file("new/below", "y")
	tr.attr("new", "user.overlay.opaque", "y")
	tr.file("marked/gone too", "")
	tr.attr("marked/gone too", "user.overlay.whiteout", "y")
	tr.attr("marked", "user.overlay.opaque", "x") // it holds marks; it hides nothing else
	tr.file("marked/full", "no removal: it is not empty")
	tr.attr("marked/full", "user.overlay.whiteout", "y")
	raw, st := tr.write(Limits{})
	all := read(t, raw)
	want := "etc/ etc/.wh.gone etc/kept marked/ marked/.wh.gone too marked/full new/ new/.wh..wh..opq new/below"
	if names(all) != want || st.Skipped != 0 || st.Entries != 9 {
		t.Errorf("%s\n%+v", names(all), st)
	}
	for name, g := range all {
		for key := range g.PAXRecords {
			if strings.Contains(key, "overlay") {
				t.Errorf("%s has %s", name, key)
			}
		}
	}
	opq, below := bytes.Index(raw, []byte("new/.wh..wh..opq")), bytes.Index(raw, []byte("new/below"))
	if opq < 0 || below < opq {
		t.Error("a directory is emptied after its files")
	}
}

func TestWhatAFileIs(t *testing.T) {
	tr := newTree(t)
	tr.file("a", "content")
	tr.attr("a", "user.note", "v\x00\xff=\n")
	tr.attr("a", "user.odd=name", "v")
	tr.must(os.Chmod(tr.path("a"), 0o4751|os.ModeSetuid))
	when := time.Unix(1_700_000_000, 123_456_789)
	tr.must(os.Chtimes(tr.path("a"), when, when))
	tr.must(os.Symlink("/etc/passwd", tr.path("link")))
	tr.must(os.Symlink("b\xfe", tr.path("bad\xff")))
	tr.must(os.Link(tr.path("a"), tr.path("b")))
	tr.must(os.Mkdir(tr.path("d"), 0o1777))
	if os.Geteuid() == 0 {
		tr.must(os.Lchown(tr.path("link"), 3_000_000, 1000))
	}
	raw, st := tr.write(Limits{})
	all := read(t, raw)
	first, second := all["a"], all["b"]
	if first.Typeflag == tar.TypeLink {
		first, second = second, first
	}
	if first.content != "content" || second.Typeflag != tar.TypeLink || second.Linkname != first.Name {
		t.Errorf("%+v, %+v", first.Header, second.Header)
	}
	if first.PAXRecords["SCHILY.xattr.user.note"] != "v\x00\xff=\n" || st.Attributes != 1 {
		t.Errorf("attributes %q, %+v", first.PAXRecords, st)
	}
	if !first.ModTime.Equal(when) || first.Mode != 0o4751 {
		t.Errorf("%s, %o", first.ModTime, first.Mode)
	}
	if l := all["link"]; l.Linkname != "/etc/passwd" || os.Geteuid() == 0 && l.Uid != 3_000_000 {
		t.Errorf("%+v", l.Header)
	}
	if l := all["bad\xff"]; l.Header == nil || l.Linkname != "b\xfe" {
		t.Errorf("%+v", names(all))
	}
}

func TestWhatCannotBeInAnArchiveIsTold(t *testing.T) {
	tr := newTree(t)
	tr.file(".wh.mine", "a user's file with the name of a removal")
	tr.must(unix.Mkfifo(tr.path("fifo"), 0o600))
	tr.mknod("null", unix.S_IFCHR, int(unix.Mkdev(1, 3)))
	tr.mknod("disk", unix.S_IFBLK, int(unix.Mkdev(7, 0)))
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	tr.must(err)
	defer unix.Close(sock)
	tr.must(os.Chdir(tr.dir))
	defer func() { _ = os.Chdir("/") }()
	tr.must(unix.Bind(sock, &unix.SockaddrUnix{Name: "socket"}))
	raw, st := tr.write(Limits{})
	if all := read(t, raw); len(all) != 0 || st.Skipped != 5 || len(st.SkippedNames) != 5 {
		t.Errorf("%s, %+v", names(all), st)
	}
}

// TestNoLinkLeadsOut: a link in a path is never followed, wherever it leads.
func TestNoLinkLeadsOut(t *testing.T) {
	tr, out := newTree(t), t.TempDir()
	tr.must(os.WriteFile(filepath.Join(out, "secret"), []byte("secret"), 0o600))
	tr.must(os.Symlink(out, tr.path("dir")))
	tr.must(os.Symlink("../../../../../../etc", tr.path("up")))
	raw, _ := tr.write(Limits{})
	if all := read(t, raw); names(all) != "dir up" || bytes.Contains(raw, []byte("secret\x00")) {
		t.Errorf("%s", names(all))
	}
}

// TestDirectoriesWithoutEnd: directories deeper than any path are left out and told; those that a
// path reaches are whole though only a few are open at once.
func TestDirectoriesWithoutEnd(t *testing.T) {
	tr := newTree(t)
	const depth = 2100
	at, err := unix.Open(tr.dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	tr.must(err)
	for range depth {
		tr.must(unix.Mkdirat(at, "d", 0o755))
		for _, f := range []string{"a", "z"} {
			fd, err := unix.Openat(at, f, unix.O_CREAT|unix.O_WRONLY, 0o600)
			tr.must(err)
			tr.must(unix.Close(fd))
		}
		next, err := unix.Openat(at, "d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		tr.must(err)
		tr.must(unix.Close(at))
		at = next
	}
	tr.must(unix.Close(at))
	raw, st := tr.write(Limits{OpenDirs: 3})
	// The path of the nth directory has 2n-1 bytes.
	if want := uint64(2048 * 3); st.Entries != want || st.Skipped == 0 {
		t.Errorf("%+v, want %d entries", st, want)
	}
	read(t, raw)
}

// TestASparseFileCostsNothing: a file of 8 TiB with three bytes in it is a few blocks.
func TestASparseFileCostsNothing(t *testing.T) {
	tr := newTree(t)
	size := int64(8 << 40)
	f, err := os.Create(tr.path("big \xff file"))
	tr.must(err)
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		size = 1 << 40
		tr.must(f.Truncate(size))
	}
	for _, at := range []int64{1 << 20, 1 << 33, size - 1} {
		_, err := f.WriteAt([]byte("x"), at)
		tr.must(err)
	}
	tr.file("after", "whole")
	raw, _ := tr.write(Limits{})
	if len(raw) > 1<<20 {
		t.Fatalf("%d bytes", len(raw))
	}
	all := read(t, raw)
	if all["big \xff file"].Header == nil || all["big \xff file"].Size != size || all["after"].content != "whole" {
		t.Errorf("%v", names(all))
	}
	if info, err := f.Stat(); err != nil || !all["big \xff file"].ModTime.Equal(info.ModTime()) {
		t.Errorf("%s is not the time of the file", all["big \xff file"].ModTime)
	}
}

// TestManyHoles: more ranges than a map may have become fewer, and the bytes stay.
func TestManyHoles(t *testing.T) {
	tr := newTree(t)
	f, err := os.Create(tr.path("holes"))
	tr.must(err)
	defer f.Close()
	want := make([]byte, 900<<10)
	for i := 0; i < len(want); i += 12 << 10 {
		copy(want[i:], fmt.Sprint(i))
		_, err := f.WriteAt([]byte(fmt.Sprint(i)), int64(i))
		tr.must(err)
	}
	tr.must(f.Truncate(int64(len(want))))
	for _, limit := range []int{1, 7, 8192} {
		raw, _ := tr.write(Limits{Holes: limit})
		if got := read(t, raw)["holes"]; got.content != string(want) {
			t.Errorf("limit %d: %d bytes that differ", limit, len(got.content))
		}
	}
}

// TestLinksBeyondTheBound: files are written again rather than remembered without end.
func TestLinksBeyondTheBound(t *testing.T) {
	tr := newTree(t)
	for i := range 40 {
		name := fmt.Sprintf("f%02d", i)
		tr.file(name, name)
		tr.must(os.Link(tr.path(name), tr.path("l"+name)))
	}
	raw, st := tr.write(Limits{LinkBytes: 640})
	all := read(t, raw)
	links := 0
	for name, g := range all {
		if g.Typeflag == tar.TypeLink {
			links++
			g = all[g.Linkname]
		}
		if g.content != strings.TrimPrefix(name, "l") {
			t.Errorf("%s holds %q", name, g.content)
		}
	}
	if st.Entries != 80 || links == 0 || links == 40 {
		t.Errorf("%d entries, %d links", st.Entries, links)
	}
}

// failing is a Writer that fails or cancels after so many bytes.
type failing struct {
	left int
	act  func() error
	out  bytes.Buffer
}

func (f *failing) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		if err := f.act(); err != nil {
			return 0, err
		}
	}
	return f.out.Write(p)
}

func TestAnEndThatIsNone(t *testing.T) {
	tr := newTree(t)
	for i := range 50 {
		tr.file(fmt.Sprint("f", i), strings.Repeat("x", 5000))
	}
	root, err := os.Open(tr.dir)
	tr.must(err)
	defer root.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	broken := errors.New("the pipe broke")
	for name, c := range map[string]struct {
		w    *failing
		is   func(error) bool
		most Limits
	}{
		"writer":  {&failing{left: 60_000, act: func() error { return broken }}, func(err error) bool { return errors.Is(err, broken) }, Limits{}},
		"context": {&failing{left: 60_000, act: func() error { cancel(); return nil }}, func(err error) bool { return errs.Is(err, errkind.Canceled) }, Limits{}},
		"limit":   {&failing{left: 1 << 30}, func(err error) bool { return errs.Is(err, errkind.Exhausted) }, Limits{Entries: 10}},
	} {
		with := context.Background()
		if name == "context" {
			with = ctx
		}
		_, err := Write(with, c.w, root, c.most)
		if err == nil || !c.is(err) {
			t.Errorf("%s: %v", name, err)
		}
		if raw := c.w.out.Bytes(); len(raw) >= 1024 && bytes.Equal(raw[len(raw)-1024:], make([]byte, 1024)) {
			t.Errorf("%s: the archive has an end mark", name)
		}
	}
}

// TestAnyTreeComesBack: what is read is what was there, for trees of any shape.
func TestAnyTreeComesBack(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tr := newTree(t)
		want := map[string]string{}
		dirs := []string{""}
		for i := range rapid.IntRange(0, 30).Draw(rt, "files") {
			raw := rapid.SliceOfN(rapid.ByteRange(1, 255), 1, 60).Draw(rt, "name")
			name := fmt.Sprint(i) + strings.ReplaceAll(string(raw), "/", "_")
			name = join(rapid.SampledFrom(dirs).Draw(rt, "dir"), name)
			switch rapid.IntRange(0, 4).Draw(rt, "kind") {
			case 0:
				tr.must(os.Mkdir(tr.path(name), 0o755))
				dirs = append(dirs, name)
				want[name+"/"] = ""
			case 1:
				target := "t" + string(raw)
				tr.must(os.Symlink(target, tr.path(name)))
				want[name] = target
			case 2:
				hole := rapid.Int64Range(0, 300<<10).Draw(rt, "hole")
				tr.file(name, "head")
				f, err := os.OpenFile(tr.path(name), os.O_WRONLY, 0)
				tr.must(err)
				_, err = f.WriteAt([]byte("tail"), hole+4)
				tr.must(errors.Join(err, f.Close()))
				want[name] = "head" + string(make([]byte, hole)) + "tail"
			default:
				content := string(rapid.SliceOfN(rapid.Byte(), 0, 2000).Draw(rt, "content"))
				tr.file(name, content)
				want[name] = content
			}
		}
		raw, st := tr.write(Limits{OpenDirs: rapid.IntRange(1, 4).Draw(rt, "open")})
		all := read(t, raw)
		if len(all) != len(want) || st.Skipped != 0 {
			rt.Fatalf("%d of %d entries, %+v", len(all), len(want), st)
		}
		for name, content := range want {
			g := all[name]
			if g.Header == nil || g.content != content && g.Linkname != content {
				rt.Fatalf("%q came back as %+v", name, g.Header)
			}
		}
	})
}

// FuzzSparse: for any name, size and ranges the headers made here are read as what they say.
func FuzzSparse(f *testing.F) {
	f.Add("name", int64(1<<20), int64(5), int64(4096), int64(1_700_000_000))
	f.Add("\xff\n=1", int64(1<<40), int64(0), int64(1), int64(-5))
	f.Fuzz(func(t *testing.T, name string, size, off, n, when int64) {
		if name == "" || len(name) > maxPath || strings.IndexByte(name, 0) >= 0 || strings.HasSuffix(name, "/") || strings.Trim(name, "./") == "" ||
			size < 0 || off < 0 || n <= 0 || n > 1<<16 || off > size-n || when < -1<<33 || when > 1<<33 {
			t.Skip()
		}
		file, err := os.Create(filepath.Join(t.TempDir(), "f"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if file.Truncate(size) != nil {
			t.Skip("larger than a file may be")
		}
		data := bytes.Repeat([]byte("x"), int(n))
		if _, err := file.WriteAt(data, off); err != nil {
			t.Skip(err)
		}
		var out bytes.Buffer
		w := &counted{ctx: context.Background(), w: &out}
		a := &archive{ctx: context.Background(), out: w, tar: tar.NewWriter(w), limits: Limits{}.withDefaults()}
		h := &tar.Header{Name: name, Size: size, Mode: 0o600, ModTime: time.Unix(when, 0)}
		if err := errors.Join(a.sparse(file, h, []part{{off, n}}), a.tar.Close()); err != nil {
			t.Fatal(err)
		}
		r := tar.NewReader(&out)
		back, err := r.Next()
		if err != nil || back.Name != name || back.Size != size || !back.ModTime.Equal(h.ModTime) {
			t.Fatalf("%q, %d: %+v, %v", name, size, back, err)
		}
	})
}
