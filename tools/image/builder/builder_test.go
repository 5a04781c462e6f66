package builder

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/berth-dev/berth/internal/ociimage"
	"github.com/berth-dev/berth/tools/runtimes/cache"
)

func TestDefaultFromReference(t *testing.T) {
	t.Setenv(cache.EnvRoot, t.TempDir())
	if _, err := Built(); err == nil || !strings.Contains(err.Error(), "go run ./tools/image") {
		t.Fatalf("Built() before anything is: %v", err)
	}
	img, err := random.Image(512, 1)
	if err != nil {
		t.Fatal(err)
	}
	ref := filepath.Join(t.TempDir(), "given")
	if err := ociimage.WriteLayout(ref, img); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	path, err := Default(context.Background(), ref, &log)
	if err != nil {
		t.Fatal(err)
	}
	copied, err := ociimage.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	want, _ := img.Digest()
	if got, _ := copied.Digest(); got != want {
		t.Errorf("digest %v; want %v", got, want)
	}
	if got, err := Built(); err != nil || got != path {
		t.Errorf("Built() = %q, %v; want %q", got, err, path)
	}
	log.Reset()
	if again, err := Default(context.Background(), ref, &log); err != nil || again != path || log.Len() > 0 {
		t.Errorf("second run: %q, %v, and it says %q; want the same path in silence", again, err, log.String())
	}
}

func TestDefaultRefusesABadReference(t *testing.T) {
	t.Setenv(cache.EnvRoot, t.TempDir())
	if _, err := Default(context.Background(), "/no/such", io.Discard); err == nil {
		t.Fatal("accepted")
	}
}

func TestBusyboxLayerMakesAnImage(t *testing.T) {
	layer := filepath.Join(t.TempDir(), "layer.tar.gz")
	if err := writeBusyboxLayer(layer, []byte("binary"), []string{"busybox", "sh", "cat"}); err != nil {
		t.Fatal(err)
	}
	modes := make(map[string]*tar.Header)
	f, err := os.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if modes[h.Name] != nil {
			t.Errorf("%s is there twice", h.Name)
		}
		modes[h.Name] = h
	}
	if h := modes["bin/busybox"]; h == nil || h.Typeflag != tar.TypeReg || h.Mode != 0o755 {
		t.Errorf("bin/busybox: %+v", h)
	}
	if h := modes["bin/sh"]; h == nil || h.Linkname != "busybox" {
		t.Errorf("bin/sh: %+v", h)
	}
	if h := modes["home/agent/"]; h == nil || h.Uid != UID {
		t.Errorf("home/agent: %+v", h)
	}
	dir := filepath.Join(t.TempDir(), "layout")
	if err := writeImage(dir, layer, imageConfig("/bin/sh")); err != nil {
		t.Fatal(err)
	}
	img, err := ociimage.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(img); err != nil {
		t.Error(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.OS != "linux" || config.Config.WorkingDir != Home || len(config.History) != 1 {
		t.Errorf("config %+v", config)
	}
}

func TestEntryNameFollowsItsInputs(t *testing.T) {
	base := entryName("x", "a", []string{"b"})
	if base != entryName("x", "a", []string{"b"}) {
		t.Error("the same inputs have two names")
	}
	if base == entryName("x", "a", []string{"c"}) || base == entryName("x", "a") {
		t.Error("other inputs have the same name")
	}
}

func TestKeepLines(t *testing.T) {
	const text = `# deb http://mirror.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib # ours
deb [signed-by=/k arch=amd64] http://mirror.example/security bookworm-security main
deb-src http://mirror.example/debian bookworm main
deb http://vendor.example/apt vendor-bookworm main
deb http://mirror.example/debian trixie main
deb http://mirror.example/debian bookworm contrib
`
	const want = `deb http://mirror.example/debian bookworm main contrib
deb [signed-by=/k arch=amd64] http://mirror.example/security bookworm-security main
`
	if got := keepLines(text); got != want {
		t.Errorf("kept:\n%swant:\n%s", got, want)
	}
}

func TestKeepStanzas(t *testing.T) {
	const keep = `Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 a key
 .
 more of it`
	text := strings.Join([]string{
		"# a comment\n" + keep,
		"Types: deb-src\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main",
		"Types: deb\nURIs: http://vendor.example/apt\nSuites: nodistro\nComponents: main",
		"Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm trixie\nComponents: main",
		"Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main\nEnabled: no",
	}, "\n\n")
	if got := keepStanzas(text); got != keep+"\n\n" {
		t.Errorf("kept:\n%s\nwant:\n%s", got, keep)
	}
}
