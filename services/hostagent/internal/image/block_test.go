package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// ownedImage has owners, modes, a link and a deleted file.
func ownedImage(t *testing.T) v1.Image {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "bin/", Mode: 0o755, Typeflag: tar.TypeDir},
		{Name: "bin/tool", Mode: 0o4711, Uid: 12, Gid: 34, Typeflag: tar.TypeReg},
		{Name: "bin/alias", Linkname: "tool", Mode: 0o777, Typeflag: tar.TypeSymlink},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	return testImage(t, l, layer(t, map[string]string{"gone": "x"}), layer(t, map[string]string{"stays": "y"}), layer(t, map[string]string{".wh.gone": ""}))
}

func blockStore(t *testing.T, dir string) (*Store, string) {
	t.Helper()
	if _, err := exec.LookPath("mkfs.erofs"); err != nil {
		t.Skip("mkfs.erofs is missing: make setup")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root for the owners of files")
	}
	s, err := Open(dir, func(context.Context, string) (v1.Image, error) { return ownedImage(t), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := s.Ensure(context.Background(), "x")
	if err != nil {
		t.Fatal(err)
	}
	return s, img.Digest
}

func block1(t *testing.T, s *Store, digest string) string {
	t.Helper()
	img, err := s.Block(context.Background(), digest)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.Get(digest); err != nil || again.Block != img.Block || img.Block == "" {
		t.Fatalf("Get says %q, Block %q: %v", again.Block, img.Block, err)
	}
	return img.Block
}

func content(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestTwoHostsMakeTheSameBlock(t *testing.T) {
	s1, digest := blockStore(t, t.TempDir())
	s2, _ := blockStore(t, t.TempDir())
	if !bytes.Equal(content(t, block1(t, s1, digest)), content(t, block1(t, s2, digest))) {
		t.Error("the bytes differ")
	}
}

func TestBlockIsMadeOnceForManyCallers(t *testing.T) {
	s, digest := blockStore(t, t.TempDir())
	var wait sync.WaitGroup
	inodes := make([]uint64, 8)
	for i := range inodes {
		wait.Go(func() {
			img, err := s.Block(context.Background(), digest)
			var st unix.Stat_t
			if err == nil {
				err = unix.Stat(img.Block, &st)
			}
			if err != nil {
				t.Error(err)
			}
			inodes[i] = st.Ino
		})
	}
	wait.Wait()
	for _, n := range inodes {
		if n != inodes[0] {
			t.Errorf("several were made: %v", inodes)
		}
	}
}

// A process that died in the middle leaves a file that is no block, and one that was torn is not used.
func TestHalfABlockIsMadeAgain(t *testing.T) {
	dir := t.TempDir()
	s, digest := blockStore(t, dir)
	path := block1(t, s, digest)
	whole := content(t, path)
	for name, damage := range map[string]func() error{
		"torn":      func() error { return os.Truncate(path, 4096) },
		"other":     func() error { return os.WriteFile(path, make([]byte, len(whole)), 0o444) },
		"gone":      func() error { return os.Remove(path) },
		"half made": func() error { return os.WriteFile(filepath.Join(filepath.Dir(path), blockTmp+"x"), whole[:100], 0o600) },
		"a link":    func() error { return errors.Join(os.Remove(path), os.Symlink("/dev/zero", path)) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		s, _ = blockStore(t, dir)
		if got := content(t, block1(t, s, digest)); !bytes.Equal(got, whole) {
			t.Errorf("%s: the block has %d bytes and is not what it was", name, len(got))
		}
		left, _ := filepath.Glob(filepath.Join(dir, "*", blockTmp+"*"))
		if len(left) != 0 {
			t.Errorf("%s: left %v", name, left)
		}
	}
}

func TestBlockOfAnImageThatIsNotThere(t *testing.T) {
	s, digest := blockStore(t, t.TempDir())
	if err := s.Remove(digest); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Block(context.Background(), digest); !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
}

func TestNoBlockWithoutItsTool(t *testing.T) {
	dir := t.TempDir()
	s, digest := blockStore(t, dir)
	t.Setenv("PATH", "/nowhere")
	if _, err := s.Block(context.Background(), digest); !errs.Is(err, errkind.Unimplemented) {
		t.Errorf("got %v", err)
	}
	if img, err := s.Get(digest); err != nil || img.Block != "" {
		t.Errorf("got %q, %v", img.Block, err)
	}
}

// A large image takes longer than whoever asks for it first waits: it is made all the same, for the next,
// and a removal ends what is still being made.
func TestABlockThatTakesLongIsMadeForTheNext(t *testing.T) {
	s, digest := blockStore(t, t.TempDir())
	real, err := exec.LookPath("mkfs.erofs")
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	started, gate := filepath.Join(bin, "started"), filepath.Join(bin, "gate")
	if err := unix.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\necho > " + started + "\nread x < " + gate + "\nexec " + real + " \"$@\"\n"
	if err := os.WriteFile(filepath.Join(bin, "mkfs.erofs"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	giveUp := func() {
		t.Helper()
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { _, err := s.Block(ctx, digest); done <- err }()
		content(t, started)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
	}
	giveUp()
	if err := os.WriteFile(gate, []byte("go\n"), 0); err != nil {
		t.Fatal(err)
	}
	path := block1(t, s, digest)
	if err := os.WriteFile(path, nil, 0); err != nil { // another process finds it damaged, and makes it again
		t.Fatal(err)
	}
	s, digest = blockStore(t, s.dir)
	giveUp()
	if err := s.Remove(digest); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Block(context.Background(), digest); !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
}

// Owners and modes are those of the image, which the kernel of a machine reads as they are.
func TestBlockKeepsOwnersAndModes(t *testing.T) {
	if _, err := exec.LookPath("dump.erofs"); err != nil {
		t.Skip("dump.erofs is missing: make setup")
	}
	s, digest := blockStore(t, t.TempDir())
	path := block1(t, s, digest)
	out, err := exec.Command("dump.erofs", "--path=/bin/tool", path).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"Uid: 12 ", "Gid: 34 ", "0711"} {
		if !bytes.Contains(out, []byte(want)) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if out, err := exec.Command("dump.erofs", "--path=/gone", path).CombinedOutput(); err == nil && !bytes.Contains(out, []byte("not found")) &&
		!bytes.Contains(out, []byte("failed")) {
		t.Errorf("a deleted file is there:\n%s", out)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != fs.FileMode(0o444) {
		t.Errorf("its mode is %v, %v", st.Mode(), err)
	}
}
