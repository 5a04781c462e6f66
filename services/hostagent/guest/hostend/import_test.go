package hostend_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

func archiveOf(t *testing.T, files map[string][]byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestImport(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	dir := t.TempDir()
	big := make([]byte, 5<<20+7) // more than a window
	fill(big, 0, 3)
	raw := archiveOf(t, map[string][]byte{"a/big": big, "../out": []byte("x")})
	got, err := c.Import(testContext(t), dir, bytes.NewReader(raw))
	if err != nil || got.Entries != 1 || got.Skipped != 1 || len(got.Names) != 1 || got.Bytes != uint64(len(raw)) {
		t.Fatalf("%+v, %v", got, err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "a", "big")); err != nil || !bytes.Equal(b, big) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

func TestImportsThatFail(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	dir := t.TempDir()
	good := archiveOf(t, map[string][]byte{"f": make([]byte, 3<<20)})
	broken := errors.New("the pipe broke")
	file := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, k := range map[string]struct {
		path string
		r    io.Reader
		err  error
		say  string
	}{
		"no archive":    {dir, strings.NewReader(strings.Repeat("hello ", 500_000)), hostend.ErrInvalid, "no tar archive"},
		"cut off":       {dir, bytes.NewReader(good[:1<<20]), hostend.ErrInvalid, "archive"},
		"relative":      {"x", bytes.NewReader(good), hostend.ErrInvalid, "not absolute"},
		"no directory":  {dir + "/none", bytes.NewReader(good), hostend.ErrNotFound, "none"},
		"a file":        {file, bytes.NewReader(good), hostend.ErrNotDir, "plain"},
		"broken source": {dir, io.MultiReader(bytes.NewReader(good[:1<<20]), brokenReader{broken}), broken, "broke"},
	} {
		if _, err := c.Import(testContext(t), k.path, k.r); !errors.Is(err, k.err) || !strings.Contains(err.Error(), k.say) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.Ping(testContext(t)); err != nil {
		t.Errorf("the channel was lost: %v", err)
	}
}

type brokenReader struct{ err error }

func (b brokenReader) Read([]byte) (int, error) { return 0, b.err }

// TestAnImportThatIsGivenUpLeavesNoRemains: its temporary file goes when the host cancels.
func TestAnImportThatIsGivenUpLeavesNoRemains(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(testContext(t))
	good := archiveOf(t, map[string][]byte{"f": make([]byte, 3<<20)})
	if _, err := c.Import(ctx, dir, io.MultiReader(bytes.NewReader(good[:2<<20]), cancelling{cancel})); err == nil {
		t.Error("it was taken for whole")
	}
	// A second import in turn: calls end before what comes after them is answered by the same agent.
	if _, err := c.Import(testContext(t), dir, bytes.NewReader(archiveOf(t, map[string][]byte{"g": []byte("x")}))); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "f")); err == nil {
		t.Error("half a file is there")
	}
}

type cancelling struct{ cancel func() }

func (c cancelling) Read([]byte) (int, error) { c.cancel(); return 0, context.Canceled }

func TestImportOntoAFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	_, c := attachInProcess(t, agent.Options{})
	noise := make([]byte, 4<<20)
	fill(noise, 0, 9)
	_, err := c.Import(testContext(t), dir, bytes.NewReader(archiveOf(t, map[string][]byte{"f": noise})))
	if !errors.Is(err, hostend.ErrNoSpace) || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("%v", err)
	}
}

// TestImportIntoAGuest takes an archive where the guest is; with BERTH_TEST_RUNTIME that is a real
// sandbox, whose kernel may know less than this machine's.
func TestImportIntoAGuest(t *testing.T) {
	c := startGuest(t).attach()
	dir, err := os.MkdirTemp("/var/tmp", "berth-import-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// A directory of this test alone: the guest's files may be this machine's.
	outside, err := os.MkdirTemp("/var/tmp", "berth-outside-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(outside) })
	var raw bytes.Buffer
	w := tar.NewWriter(&raw)
	for _, h := range []*tar.Header{
		{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o1750},
		{Name: "d/f", Typeflag: tar.TypeReg, Mode: 0o4711, Size: 3, Uid: 12, Gid: 13, ModTime: time.Unix(1_600_000_000, 0),
			PAXRecords: map[string]string{"SCHILY.xattr.user.note": "x"}},
		{Name: "d/hard", Typeflag: tar.TypeLink, Linkname: "d/f"},
		{Name: "d/soft", Typeflag: tar.TypeSymlink, Linkname: outside, ModTime: time.Unix(1_600_000_000, 0)},
		{Name: "d/soft/f", Typeflag: tar.TypeReg, Mode: 0o600, Size: 3},
		{Name: "up", Typeflag: tar.TypeSymlink, Linkname: "../" + filepath.Base(outside)},
		{Name: "up/f", Typeflag: tar.TypeReg, Mode: 0o600, Size: 3},
		{Name: "up/below/f", Typeflag: tar.TypeReg, Mode: 0o600, Size: 3},
		{Name: "gone/x", Typeflag: tar.TypeReg, Mode: 0o600, Size: 3},
		{Name: ".wh.gone", Typeflag: tar.TypeReg},
		{Name: "replaced/x", Typeflag: tar.TypeReg, Mode: 0o600, Size: 3},
		{Name: "replaced", Typeflag: tar.TypeReg, Mode: 0o600, Size: 3},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			_, _ = w.Write([]byte("abc"))
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := c.Import(testContext(t), dir, &raw)
	if err != nil || got.Entries != 12 || got.Skipped != 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	t.Logf("%d attributes could not be kept", got.Attributes)
	o := run(t, c, "look", "cd "+dir+` && stat -c '%n %a %u %g %Y %h' d d/f && cat d/hard && cat ".$(readlink d/soft)/f" replaced && ls`)
	if s := string(o.out); !strings.HasPrefix(s, "d 1750 0 0 ") || !strings.Contains(s, "\nd/f 4711 12 13 1600000000 2\nabcabcabc") || strings.Contains(s, "gone") {
		t.Errorf("%s%s", o.out, o.err)
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) != 0 {
		t.Errorf("the import left its directory: %v, %v", left, err)
	}
}
