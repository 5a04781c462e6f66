package e2e

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestExportAndImport: everything that a session changed on top of its image goes to another user's new
// session, as it was at one moment while a program wrote on: contents, holes, owners, modes, links and
// what was removed of the image.
func TestExportAndImport(t *testing.T) { exportAndImport(t, disks.For(t)) }

func exportAndImport(t *testing.T, e *testenv.Env) {
	ann := open(t, e.Client("acme", "ann"), sdk.OpenOptions{})
	want := tree(t, ann)
	// At any moment first is second or one more.
	const pair = `
import os, time
os.makedirs("/srv/pair", exist_ok=True)
n = 0
while True:
    n += 1
    for name in ("first", "second"):
        with open("/srv/pair/new", "w") as f: f.write(str(n))
        os.rename("/srv/pair/new", "/srv/pair/" + name)
    if n == 100: print("goes", flush=True)
`
	r, w := io.Pipe()
	p, err := ann.Exec(t.Context(), sdk.Cmd{Args: []string{"python3", "-c", pair}, Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Detach()
	if _, err := io.ReadFull(r, make([]byte, len("goes\n"))); err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	out, err := ann.Export(t.Context(), &archive)
	if err != nil || out.Skipped > 0 || out.Attributes > 0 {
		t.Fatalf("export: %+v %v", out, err)
	}
	later := counter(t, ann, "first")
	first, second := paired(t, archive.Bytes())
	if first != second && first != second+1 || first < 100 || later <= first {
		t.Errorf("the archive holds first %d and second %d, later there was %d", first, second, later)
	}
	file := filepath.Join(t.TempDir(), "ann.tar")
	if _, err := e.CLI("disk", "export", "default", file, "--tenant", "acme", "--user", "ann"); err != nil {
		t.Fatal(err)
	}

	bob := open(t, e.Client("acme", "bob"), sdk.OpenOptions{})
	in, err := bob.Import(t.Context(), bytes.NewReader(archive.Bytes()), "")
	// The empty dev is where every sandbox has its own devices.
	if others := slices.DeleteFunc(in.SkippedNames, func(n string) bool { return strings.HasPrefix(n, "dev/:") }); err != nil ||
		len(others) > 0 || in.Skipped > 1 || in.Attributes > 0 || in.Entries+in.Skipped != out.Entries {
		t.Fatalf("import: %+v %v, exported were %+v", in, err, out)
	}
	if got := sums(t, bob); got != want {
		t.Errorf("imported is\n%s\nand exported was\n%s", got, want)
	}
	if counter(t, bob, "first") != first || counter(t, bob, "second") != second {
		t.Error("imported is another pair than the archive holds")
	}
	if got := sh(t, bob, "stat -c '%b %s' /root/work/hole"); !strings.HasSuffix(got, " 41943044") || len(got) > len("999 41943044") {
		t.Errorf("the file with a hole has blocks and bytes %s", got)
	}
	if err := bob.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if bob = open(t, e.Client("acme", "bob"), sdk.OpenOptions{}); sums(t, bob) != want {
		t.Error("what was imported did not survive a sleep")
	}
	if _, err := e.CLI("disk", "import", "default", file, "--tenant", "acme", "--user", "bob", "--to", "/mnt"); err != nil {
		t.Error(err)
	}
	if got := sh(t, bob, "cat /mnt/opt/pkg/tool"); got != "tool" {
		t.Errorf("imported below /mnt: %q", got)
	}
}

func counter(t *testing.T, s *sdk.Session, name string) int {
	t.Helper()
	n, err := strconv.Atoi(content(t, s, "/srv/pair/"+name))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// paired reads both counters of an archive.
func paired(t *testing.T, archive []byte) (first, second int) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if err == io.EOF {
			return first, second
		}
		if err != nil {
			t.Fatal(err)
		}
		n := map[string]*int{"srv/pair/first": &first, "srv/pair/second": &second}[strings.TrimPrefix(h.Name, "./")]
		if n == nil {
			continue
		}
		raw, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if *n, err = strconv.Atoi(string(raw)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHostileArchiveWritesNothingOutside: entries that climb, that are absolute, that go through links
// they planted, and devices. Whatever becomes of the import, what is outside its directory stays as it
// was, in the session and on the host.
func TestHostileArchiveWritesNothingOutside(t *testing.T) { hostileArchive(t, disks.For(t)) }

func hostileArchive(t *testing.T, e *testenv.Env) {
	s := open(t, e.Client("acme", "ann"), sdk.OpenOptions{})
	outside := t.TempDir()
	sh(t, s, "mkdir -p /root/in /root/out && echo untouched > /root/out/f && sync")
	const files = "find /root/out /etc /usr/bin /var /opt /home -printf '%p %y %m %s %T@\n' | sort | sha256sum"
	want := sh(t, s, files)
	file := func(name string) *tar.Header {
		return &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o4777, Size: 4}
	}
	link := func(name, to string) *tar.Header {
		return &tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777}
	}
	cases := map[string][]*tar.Header{
		"climbs":              {file("../out/f"), file("a/../../out/f"), file("../../../../../../.." + outside + "/f")},
		"absolute":            {file("/root/out/f"), file(outside + "/f"), file("/etc/passwd")},
		"through a link":      {link("d", "/root/out"), file("d/f"), link("e", "../out"), file("e/f"), link("h", outside), file("h/f")},
		"over a link":         {link("f", "/root/out/f"), file("f")},
		"by a hard link":      {{Typeflag: tar.TypeLink, Name: "hard", Linkname: "../out/f"}, file("hard"), {Typeflag: tar.TypeLink, Name: "hard2", Linkname: "/root/out/f"}, file("hard2")},
		"removes outside":     {file("../out/.wh.f"), link("w", "/root/out"), file("w/.wh.f"), file("w/.wh..wh..opq"), file(".wh..."), file(".wh..")},
		"devices":             {{Typeflag: tar.TypeBlock, Name: "disk", Mode: 0o666, Devmajor: 259}, {Typeflag: tar.TypeChar, Name: "mem", Mode: 0o666, Devmajor: 1, Devminor: 1}},
		"a link to a link":    {link("x", "y"), link("y", "../out"), file("x/f")},
		"a link becomes path": {link("p", "/root/out"), {Typeflag: tar.TypeDir, Name: "p", Mode: 0o700}, file("p/f")},
	}
	for name, entries := range cases {
		var archive bytes.Buffer
		w := tar.NewWriter(&archive)
		for _, h := range entries {
			h.ModTime = time.Unix(1, 0)
			if err := w.WriteHeader(h); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if h.Size > 0 {
				_, _ = io.WriteString(w, "evil")
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		res, err := s.Import(t.Context(), &archive, "/root/in")
		t.Logf("%s: %d entries, skipped %q, %v", name, res.Entries, res.SkippedNames, err)
		if got := content(t, s, "/root/out/f"); got != "untouched" {
			t.Errorf("%s: the file outside says %q", name, got)
		}
		if got := sh(t, s, files); got != want {
			t.Errorf("%s: something outside has changed", name)
		}
		if got := sh(t, s, "find /root/in -type b -o -type c"); got != "" {
			t.Errorf("%s: a device was made: %s", name, got)
		}
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
		t.Errorf("on the host was written: %v %v", left, err)
	}
	if _, err := s.Import(t.Context(), strings.NewReader("this is no archive"), "/root/in"); err == nil {
		t.Error("bytes that are no archive were imported")
	}
}
