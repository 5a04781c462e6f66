package ociimage

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

const testName = "berth.local/test:v1"

func tiny(t *testing.T) v1.Image {
	t.Helper()
	base, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		OS: platform().OS, Architecture: platform().Architecture,
		RootFS: v1.RootFS{Type: "layers"},
	})
	if err != nil {
		t.Fatal(err)
	}
	layers, err := tinyLayers()
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(base, layers...)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func tinyLayers() ([]v1.Layer, error) {
	img, err := random.Image(512, 2)
	if err != nil {
		return nil, err
	}
	return img.Layers()
}

// archive writes img in OCI archive form and returns the path.
func archive(t *testing.T, img v1.Image) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "oci.tar")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := WriteArchive(f, testName, img); err != nil {
		t.Fatal(err)
	}
	return path
}

func layoutDir(t *testing.T, img v1.Image) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layout")
	if err := WriteLayout(dir, img); err != nil {
		t.Fatal(err)
	}
	return dir
}

func serveRegistry(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(registry.New())
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func push(t *testing.T, img v1.Image) string {
	t.Helper()
	ref, err := name.ParseReference(serveRegistry(t) + "/test/tiny:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
	return ref.String()
}

func TestLoadKeepsTheDigest(t *testing.T) {
	img := tiny(t)
	want, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	refs := map[string]string{
		"layout":          layoutDir(t, img),
		"archive":         archive(t, img),
		"registry":        push(t, img),
		"registry digest": "",
	}
	refs["registry digest"] = strings.TrimSuffix(refs["registry"], ":v1") + "@" + want.String()
	for form, ref := range refs {
		t.Run(form, func(t *testing.T) {
			got, err := Load(ref)
			if err != nil {
				t.Fatal(err)
			}
			if d, err := got.Digest(); err != nil || d != want {
				t.Errorf("digest %v, %v; want %v", d, err, want)
			}
			if err := validate.Image(got); err != nil {
				t.Error(err)
			}
		})
	}
}

// A docker archive has no manifest, so only the config's digest survives.
func TestLoadDockerArchive(t *testing.T) {
	img := tiny(t)
	tag, err := name.NewTag(testName)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "docker.tar")
	if err := tarball.WriteToFile(path, tag, img); err != nil {
		t.Fatal(err)
	}
	got, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	want, _ := img.ConfigName()
	if c, err := got.ConfigName(); err != nil || c != want {
		t.Errorf("config %v, %v; want %v", c, err, want)
	}
	if err := validate.Image(got); err != nil {
		t.Error(err)
	}
}

func TestLoadChoosesThePlatform(t *testing.T) {
	right, wrong := tiny(t), tiny(t)
	other := v1.Platform{OS: "linux", Architecture: "s390x"}
	dir := filepath.Join(t.TempDir(), "layout")
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: wrong, Descriptor: v1.Descriptor{Platform: &other}},
		mutate.IndexAddendum{Add: right, Descriptor: v1.Descriptor{Platform: new(platform())}})
	if err := path.AppendIndex(index); err != nil {
		t.Fatal(err)
	}
	got, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	want, _ := right.Digest()
	if d, err := got.Digest(); err != nil || d != want {
		t.Errorf("digest %v, %v; want the one of this platform, %v", d, err, want)
	}
}

func TestDamagedBlobsAreRefused(t *testing.T) {
	img := tiny(t)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	dir := layoutDir(t, img)
	blob := filepath.Join(dir, blobPath(digest))
	data, err := os.ReadFile(blob)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(blob, data, 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	err = WriteArchive(io.Discard, testName, got)
	if err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Fatalf("copying a damaged layer: %v", err)
	}
}

func TestBadReferences(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	var plainTar bytes.Buffer
	w := tar.NewWriter(&plainTar)
	w.WriteHeader(&tar.Header{Name: "hello", Mode: 0o644})
	w.Close()
	emptyLayout := filepath.Join(dir, "empty")
	if _, err := layout.Write(emptyLayout, empty.Index); err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct{ ref, want string }{
		"empty":            {"", "is empty"},
		"no file":          {dir + "/nothing", "does not exist"},
		"no tar file":      {"nothing.tar", "does not exist"},
		"no layout":        {dir, "no oci-layout file"},
		"empty layout":     {emptyLayout, "has no image"},
		"not a tar":        {file("text", bytes.Repeat([]byte("x"), 2048)), "no tar archive"},
		"not an image tar": {file("plain.tar", plainTar.Bytes()), "without an image"},
		"bad name":         {"UPPER CASE", "neither a file nor a valid registry reference"},
		"unknown name":     {serveRegistry(t) + "/no/such:v1", "status 404"},
		"no registry":      {"127.0.0.1:1/no/such:v1", "cannot be pulled"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := Load(c.ref)
			if err == nil {
				t.Fatal("accepted")
			}
			text := err.Error()
			if !strings.Contains(text, c.want) || !strings.Contains(text, c.ref) || strings.Contains(text, "\n") {
				t.Errorf("error %q; want one line with %q and the reference", text, c.want)
			}
		})
	}
}

func TestWriteLayoutTwice(t *testing.T) {
	img := tiny(t)
	if err := WriteLayout(layoutDir(t, img), img); err == nil {
		t.Fatal("wrote over an existing layout")
	}
}

func TestWriteArchiveReportsTheWriter(t *testing.T) {
	if err := WriteArchive(failing{}, testName, tiny(t)); err == nil || !strings.Contains(err.Error(), testName) {
		t.Fatalf("error %v; want one that names the image", err)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, fs.ErrClosed }
