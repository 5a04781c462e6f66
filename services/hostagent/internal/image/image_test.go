package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

func layer(t *testing.T, files map[string]string) v1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, text := range files {
		h := &tar.Header{Name: name, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
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
	return l
}

func testImage(t *testing.T, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err == nil {
		img, err = mutate.Config(img, v1.Config{Env: []string{"A=b"}})
	}
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestDeletedFilesOfLowerLayersStayDeleted(t *testing.T) {
	img := testImage(t, layer(t, map[string]string{"a": "1", "d/b": "2", "d/c": "3"}),
		layer(t, map[string]string{".wh.a": "", "d/.wh..wh..opq": "", "d/new": "4"}))
	s, err := Open(t.TempDir(), func(context.Context, string) (v1.Image, error) { return img, nil })
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Ensure(context.Background(), "x")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"a": false, "d/b": false, "d/c": false, "d/new": true} {
		if _, err := os.Lstat(filepath.Join(got.Lower, name)); (err == nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(got.Env) != 1 || got.Env[0] != "A=b" {
		t.Errorf("environment is %v", got.Env)
	}
	if list, err := s.List(); err != nil || len(list) != 1 || list[0] != got.Digest {
		t.Errorf("got %v, %v", list, err)
	}
	for range 2 {
		if err := s.Remove(got.Digest); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Get(got.Digest); !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
}

// lying is an image whose layer is not what its configuration says.
type lying struct {
	v1.Image
	layers []v1.Layer
}

func (l lying) Layers() ([]v1.Layer, error) { return l.layers, nil }

func TestAForgedLayerLeavesNothing(t *testing.T) {
	img := lying{testImage(t, layer(t, map[string]string{"a": "1"})), []v1.Layer{layer(t, map[string]string{"a": "evil"})}}
	dir := t.TempDir()
	s, err := Open(dir, func(_ context.Context, ref string) (v1.Image, error) {
		if ref != "x" {
			return nil, errors.New("no such image")
		}
		return img, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Ensure(context.Background(), "x"); err == nil {
		t.Error("it was accepted")
	}
	if _, err := s.Ensure(context.Background(), "y"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("left %v", entries)
	}
	if _, err := s.Get("../../etc"); !errs.Is(err, errkind.Invalid) {
		t.Errorf("got %v", err)
	}
}
