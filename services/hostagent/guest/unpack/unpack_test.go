package unpack

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// ground is a directory to unpack into and one beside it that must stay as it is.
type ground struct {
	t             testing.TB
	root, outside string
	before        string
}

func newGround(t testing.TB) *ground {
	dir := t.TempDir()
	g := &ground{t: t, root: filepath.Join(dir, "root"), outside: filepath.Join(dir, "outside")}
	g.must(os.MkdirAll(filepath.Join(g.outside, "below"), 0o755))
	g.must(os.WriteFile(filepath.Join(g.outside, "secret"), []byte("secret"), 0o600))
	g.must(os.WriteFile(filepath.Join(g.outside, "below", "f"), nil, 0o644))
	g.must(os.Mkdir(g.root, 0o755))
	g.before = picture(t, g.outside)
	return g
}

func (g *ground) must(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatal(err)
	}
}

// unharmed fails when anything outside changed, or a temporary name is left inside.
func (g *ground) unharmed() {
	g.t.Helper()
	if after := picture(g.t, g.outside); after != g.before {
		g.t.Fatalf("outside was\n%s\nand is\n%s", g.before, after)
	}
	if all := picture(g.t, g.root); strings.Contains(all, ".berth-import-") {
		g.t.Fatalf("a temporary file is left:\n%s", all)
	}
}

// picture names all that is in a directory.
func picture(t testing.TB, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		name, _ := filepath.Rel(dir, p)
		fmt.Fprintf(&b, "%q %o %d:%d %d links %d.%d", name, st.Mode, st.Uid, st.Gid, st.Nlink, st.Mtim.Sec, st.Mtim.Nsec)
		if d.Type().IsRegular() && st.Size < 1<<20 {
			raw, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " %q", raw)
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

type item struct {
	name, content string
	kind          byte
	link          string
	mode          int64
	attrs         map[string]string
	uid           int
}

var when = time.Unix(1_600_000_000, 5_000)

func pack(t testing.TB, items ...item) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, i := range items {
		if i.kind == 0 {
			i.kind = tar.TypeReg
		}
		h := &tar.Header{Typeflag: i.kind, Name: i.name, Linkname: i.link, Mode: i.mode, ModTime: when, Format: tar.FormatPAX, PAXRecords: i.attrs, Uid: i.uid}
		if i.kind == tar.TypeReg {
			h.Size = int64(len(i.content))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte(i.content)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func (g *ground) take(items ...item) Stats {
	g.t.Helper()
	st, err := Into(context.Background(), g.root, bytes.NewReader(pack(g.t, items...)))
	if err != nil {
		g.t.Fatal(err)
	}
	g.unharmed()
	return st
}

func (g *ground) read(name string) string {
	raw, err := os.ReadFile(filepath.Join(g.root, name))
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

func TestWhatIsTaken(t *testing.T) {
	g := newGround(t)
	g.must(os.WriteFile(filepath.Join(g.root, "old"), []byte("old"), 0o600))
	g.must(os.Symlink("old", filepath.Join(g.root, "was-link")))
	st := g.take(
		item{name: "./", kind: tar.TypeDir, mode: 0o700},
		item{name: "d/", kind: tar.TypeDir, mode: 0o2750},
		item{name: "d/f", content: "content", mode: 0o4755, attrs: map[string]string{"SCHILY.xattr.user.note": "x\x00y"}},
		item{name: "d/hard", kind: tar.TypeLink, link: "d/f"},
		item{name: "d/hard", kind: tar.TypeLink, link: "d/f"}, // twice is the same
		item{name: "old", content: "new"},
		item{name: "was-link", content: "a file of its own"},
		item{name: "/implied/dir/s", kind: tar.TypeSymlink, link: "/nowhere"},
		item{name: "bad\xff", content: "x"},
		item{name: "fifo", kind: tar.TypeFifo},
		item{name: "dev", kind: tar.TypeChar},
	)
	if st.Entries != 8 || st.Skipped != 2 || len(st.Names) != 2 || st.Bytes == 0 {
		t.Errorf("%+v", st)
	}
	for name, want := range map[string]string{"d/f": "content", "d/hard": "content", "old": "new", "was-link": "a file of its own", "bad\xff": "x"} {
		if got := g.read(name); got != want {
			t.Errorf("%q: %q", name, got)
		}
	}
	var f, d, root unix.Stat_t
	g.must(errors.Join(unix.Lstat(g.root+"/d/f", &f), unix.Lstat(g.root+"/d", &d), unix.Lstat(g.root, &root)))
	if f.Mode&0o7777 != 0o4755 || f.Nlink != 2 || f.Mtim.Sec != when.Unix() || f.Mtim.Nsec != 5_000 {
		t.Errorf("%+v", f)
	}
	if d.Mode&0o7777 != 0o2750 || d.Mtim.Sec != when.Unix() {
		t.Errorf("the directory has mode %o and time %d", d.Mode, d.Mtim.Sec)
	}
	if root.Mode&0o777 != 0o755 {
		t.Errorf("the target itself was changed to %o", root.Mode)
	}
	value := make([]byte, 10)
	if n, err := unix.Getxattr(g.root+"/d/f", "user.note", value); err != nil || string(value[:n]) != "x\x00y" {
		if st.Attributes == 0 {
			t.Errorf("attribute %q, %v, and none is counted as lost", value[:n], err)
		}
	}
}

func TestRemovals(t *testing.T) {
	g := newGround(t)
	for _, name := range []string{"gone/deep/er/f", "kept", "emptied/a", "emptied/sub/b"} {
		g.must(os.MkdirAll(filepath.Join(g.root, filepath.Dir(name)), 0o755))
		g.must(os.WriteFile(filepath.Join(g.root, name), []byte(name), 0o600))
	}
	g.must(os.Symlink(g.outside, filepath.Join(g.root, "link")))
	g.must(os.Symlink(g.outside, filepath.Join(g.root, "emptied", "out")))
	st := g.take(
		item{name: ".wh.gone"}, item{name: ".wh.link"}, item{name: ".wh.never-was"}, item{name: "no/such/.wh.x"},
		item{name: "emptied/", kind: tar.TypeDir, mode: 0o755}, item{name: "emptied/.wh..wh..opq"}, item{name: "emptied/new", content: "new"},
		item{name: ".wh..wh.plnk"}, item{name: ".wh."}, item{name: ".wh..."},
	)
	got := picture(t, g.root)
	if strings.Contains(got, "gone") || strings.Contains(got, `"link"`) || strings.Contains(got, `"emptied/a"`) || strings.Contains(got, `"no"`) ||
		g.read("emptied/new") != "new" || g.read("kept") != "kept" {
		t.Errorf("%s", got)
	}
	if st.Skipped != 3 || st.Entries != 6 {
		t.Errorf("%+v", st)
	}
}

// TestNothingOutside: each of these leads out of the directory for a naive reader.
func TestNothingOutside(t *testing.T) {
	for name, items := range map[string][]item{
		"dots":                     {{name: "../outside/secret", content: "x"}, {name: "a/../../outside/secret", content: "x"}},
		"absolute":                 {{name: "/../outside/secret", content: "x"}},
		"absolute link":            {{name: "l", kind: tar.TypeSymlink, link: "OUT"}, {name: "l/secret", content: "x"}, {name: "l/new", content: "x"}},
		"relative link":            {{name: "l", kind: tar.TypeSymlink, link: "../outside"}, {name: "l/secret", content: "x"}},
		"deep relative link":       {{name: "a/b/l", kind: tar.TypeSymlink, link: "../../../outside"}, {name: "a/b/l/secret", content: "x"}},
		"link to a file":           {{name: "l", kind: tar.TypeSymlink, link: "../outside/secret"}, {name: "l", content: "x"}},
		"hard link out":            {{name: "h", kind: tar.TypeLink, link: "../outside/secret"}, {name: "h", content: "x"}},
		"hard link absolute":       {{name: "h", kind: tar.TypeLink, link: "OUT/secret"}},
		"hard link through a link": {{name: "l", kind: tar.TypeSymlink, link: "../outside"}, {name: "h", kind: tar.TypeLink, link: "l/secret"}, {name: "h", content: "x"}},
		"link that was there":      {{name: "was/secret", content: "x"}, {name: "was/below/f", content: "x"}, {name: "was/.wh.secret"}, {name: "was/.wh..wh..opq"}},
		"removal of the parent":    {{name: ".wh..."}, {name: "a/.wh..."}, {name: "l", kind: tar.TypeSymlink, link: ".."}, {name: "l/.wh.outside"}, {name: "l/.wh..wh..opq"}},
		"directory onto a link":    {{name: "was", kind: tar.TypeDir, mode: 0o700}, {name: "was/secret", content: "x"}},
		"attributes of a link":     {{name: "l", kind: tar.TypeSymlink, link: "../outside/secret", uid: 77, mode: 0o777}},
		"links to links":           {{name: "a", kind: tar.TypeSymlink, link: "b/.."}, {name: "b", kind: tar.TypeSymlink, link: "../outside/below"}, {name: "a/secret", content: "x"}},
		"a directory that becomes a link": {{name: "d", kind: tar.TypeDir, mode: 0o755}, {name: "d/f", content: "x"}, {name: "d", kind: tar.TypeSymlink, link: "../outside"},
			{name: "d/secret", content: "x"}, {name: "d", kind: tar.TypeDir, mode: 0o700}},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGround(t)
			g.must(os.Symlink(g.outside, filepath.Join(g.root, "was")))
			for i := range items {
				items[i].link = strings.ReplaceAll(items[i].link, "OUT", g.outside)
			}
			g.take(items...)
		})
	}
}

// TestTheSystemsOwn: below the root of a sandbox some directories are not its files, by whatever
// name they are reached.
func TestTheSystemsOwn(t *testing.T) {
	g := newGround(t)
	for _, d := range []string{"proc", "sys", "dev", "run", "etc"} {
		g.must(os.Mkdir(filepath.Join(g.root, d), 0o755))
		g.must(os.WriteFile(filepath.Join(g.root, d, "f"), []byte("kept"), 0o600))
	}
	raw := pack(t,
		item{name: "proc/f", content: "x"}, item{name: "sys", content: "x"}, item{name: "dev/", kind: tar.TypeDir, mode: 0o700}, item{name: ".wh.run"},
		item{name: "l", kind: tar.TypeSymlink, link: "/run"}, item{name: "l/f", content: "x"}, item{name: "l/.wh.f"}, item{name: "l/.wh..wh..opq"},
		item{name: "m", kind: tar.TypeSymlink, link: "etc/../proc/../dev"}, item{name: "m/f", content: "x"},
		item{name: "h", kind: tar.TypeLink, link: "proc/f"}, item{name: "etc/f", content: "new"}, item{name: ".wh..wh..opq"})
	root, err := os.Open(g.root)
	g.must(err)
	defer root.Close()
	st, err := into(context.Background(), root, true, bytes.NewReader(raw))
	g.must(err)
	for _, d := range []string{"proc", "sys", "dev", "run"} {
		if got := g.read(d + "/f"); got != "kept" {
			t.Errorf("%s: %q", d, got)
		}
	}
	if st.Skipped != 9 || st.Entries != 4 {
		t.Errorf("%+v", st)
	}
}

func TestAnArchiveThatIsNone(t *testing.T) {
	good := pack(t, item{name: "a", content: strings.Repeat("x", 3000)}, item{name: "b", content: "y"})
	long := append([]byte(nil), good...)
	long = append(long, bytes.Repeat([]byte("more"), 300)...)
	flipped := append([]byte(nil), good...)
	flipped[150] ^= 0x20
	for name, c := range map[string]struct {
		raw []byte
		say string
	}{
		"nothing":           {nil, "0 bytes"},
		"text":              {bytes.Repeat([]byte("hello "), 200), "no tar archive"},
		"gzip":              {append([]byte("\x1f\x8b\x08"), bytes.Repeat([]byte("zipped"), 200)...), "gzip"},
		"cut in a file":     {good[:2000], "damaged"},
		"cut between":       {good[:512+3072], "cut off"},
		"cut after a block": {good[:512+3072+1024], "cut off"},
		"flipped":           {flipped, "damaged"},
	} {
		g := newGround(t)
		_, err := Into(context.Background(), g.root, bytes.NewReader(c.raw))
		if !errors.Is(err, ErrArchive) || !strings.Contains(err.Error(), c.say) && !strings.Contains(err.Error(), "cut off") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
		g.unharmed()
	}
	g := newGround(t)
	st, err := Into(context.Background(), g.root, bytes.NewReader(long))
	if err != nil || st.Skipped != 1 || st.Bytes != uint64(len(long)) {
		t.Errorf("%+v, %v", st, err)
	}
}

// TestADiskThatIsFull: the error says so, what was begun is removed, and what was there stays.
func TestADiskThatIsFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount")
	}
	g := newGround(t)
	if err := unix.Mount("tmpfs", g.root, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(g.root, unix.MNT_DETACH) })
	g.must(os.WriteFile(filepath.Join(g.root, "kept"), []byte("kept"), 0o600))
	st, err := Into(context.Background(), g.root, bytes.NewReader(pack(t, item{name: "small", content: "x"}, item{name: "kept", content: strings.Repeat("x", 2<<20)})))
	if !errors.Is(err, unix.ENOSPC) || st.Entries != 2 {
		t.Errorf("%+v, %v", st, err)
	}
	if g.read("kept") != "kept" || g.read("small") != "x" {
		t.Errorf("%s", picture(t, g.root))
	}
	g.unharmed()
}

// endless is an archive of one file without end.
type endless struct {
	head []byte
	stop func()
	n    int
}

func (e *endless) Read(p []byte) (int, error) {
	if len(e.head) > 0 {
		n := copy(p, e.head)
		e.head = e.head[n:]
		return n, nil
	}
	if e.n++; e.n == 100 {
		e.stop()
	}
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

func TestAnImportThatIsGivenUp(t *testing.T) {
	g := newGround(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var head bytes.Buffer
	w := tar.NewWriter(&head)
	g.must(w.WriteHeader(&tar.Header{Name: "big", Size: 1 << 40, Mode: 0o600}))
	if _, err := Into(ctx, g.root, &endless{head: head.Bytes(), stop: cancel}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	g.unharmed()
}

// TestHolesStayHoles: a file of 1 TiB of nothing costs nothing.
func TestHolesStayHoles(t *testing.T) {
	g := newGround(t)
	content := "head" + strings.Repeat("\x00", 8<<20) + "tail"
	g.take(item{name: "sparse", content: content})
	var st unix.Stat_t
	g.must(unix.Stat(g.root+"/sparse", &st))
	if st.Size != int64(len(content)) || st.Blocks*512 > 1<<20 {
		t.Errorf("%d bytes in %d blocks", st.Size, st.Blocks)
	}
	if g.read("sparse") != content {
		t.Error("the content differs")
	}
}

// TestAnyArchive: whatever the entries are, nothing outside changes, and the end is an answer.
func TestAnyArchive(t *testing.T) {
	part := rapid.SampledFrom([]string{"a", "b", "c", "..", ".", "", "l", ".wh.a", ".wh.l", ".wh..wh..opq", "outside", "secret", "root"})
	path := rapid.Custom(func(t *rapid.T) string { return strings.Join(rapid.SliceOfN(part, 1, 5).Draw(t, "parts"), "/") })
	rapid.Check(t, func(rt *rapid.T) {
		g := newGround(t)
		var items []item
		for range rapid.IntRange(0, 12).Draw(rt, "n") {
			i := item{name: path.Draw(rt, "name"), content: rapid.SampledFrom([]string{"", "x"}).Draw(rt, "content"), mode: 0o755,
				kind: rapid.SampledFrom([]byte{tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink}).Draw(rt, "kind"), link: path.Draw(rt, "link")}
			if rapid.Bool().Draw(rt, "absolute") {
				i.link = g.outside + "/" + i.link
			}
			if i.name = strings.TrimRight(i.name, "/"); i.name == "" {
				i.name = "."
			}
			items = append(items, i)
		}
		_, err := Into(context.Background(), g.root, bytes.NewReader(pack(t, items...)))
		if errors.Is(err, ErrArchive) {
			rt.Fatal(err)
		}
		g.unharmed()
	})
}

// FuzzArchive feeds bytes that anybody may send.
func FuzzArchive(f *testing.F) {
	f.Add(pack(f, item{name: "a", content: "x"}, item{name: "l", kind: tar.TypeSymlink, link: "../outside"}, item{name: "l/secret", content: "x"}))
	f.Add(pack(f, item{name: "d/", kind: tar.TypeDir}, item{name: "d/.wh..wh..opq"}, item{name: ".wh.d"}, item{name: "h", kind: tar.TypeLink, link: "l"}))
	syncfs = func(int) error { return nil }
	f.Cleanup(func() { syncfs = unix.Syncfs })
	f.Fuzz(func(t *testing.T, raw []byte) {
		g := newGround(t)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		st, err := Into(ctx, g.root, io.LimitReader(bytes.NewReader(raw), 1<<20))
		if err == nil && st.Bytes != uint64(len(raw)) && len(raw) <= 1<<20 {
			t.Errorf("%d of %d bytes were read", st.Bytes, len(raw))
		}
		g.unharmed()
	})
}
