// Package ociimage reads and writes container images in the forms that Berth
// meets: OCI layout directories, OCI and docker archives (tar files) and
// registry references.
//
// It guarantees that an image keeps its digest on the way from any OCI form into
// containerd, that what is read is checked against its digest, and that a bad
// reference is reported in one sentence that names it. Images are read on
// demand: a file or directory must stay in place, and a registry reachable, for
// as long as its v1.Image is in use.
package ociimage

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Load finds the image that ref names: the path of an OCI layout directory, the
// path of an OCI or docker archive, or else a registry reference such as
// debian:12 or localhost:5000/name@sha256:... If the source holds images of
// several platforms, the one for Linux on this processor is chosen.
func Load(ref string) (v1.Image, error) {
	return LoadContext(context.Background(), ref)
}

// LoadContext is Load with a context, which bounds a registry image's whole use.
func LoadContext(ctx context.Context, ref string) (v1.Image, error) {
	if ref == "" {
		return nil, errors.New("the image reference is empty")
	}
	info, err := os.Stat(ref)
	switch {
	case err == nil && info.IsDir():
		return loadLayout(ref)
	case err == nil:
		return loadArchive(ref)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("image %s cannot be read: %w", ref, err)
	case looksLikePath(ref):
		return nil, fmt.Errorf("image %s does not exist: there is no such file or directory", ref)
	}
	return pull(ctx, ref)
}

// looksLikePath tells paths from registry references, which never begin so.
func looksLikePath(ref string) bool {
	return strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, ".") || strings.HasPrefix(ref, "~") ||
		strings.HasSuffix(ref, ".tar")
}

func loadLayout(dir string) (v1.Image, error) {
	if _, err := os.Stat(dir + "/oci-layout"); err != nil {
		return nil, fmt.Errorf("image %s is a directory but no OCI layout: it has no oci-layout file", dir)
	}
	img, err := fromBlobs(dirBlobs(dir))
	if err != nil {
		return nil, fmt.Errorf("image %s is an OCI layout that cannot be read: %w", dir, err)
	}
	return img, nil
}

func loadArchive(path string) (v1.Image, error) {
	blobs, err := indexTar(path)
	if err != nil {
		return nil, fmt.Errorf("image %s is no tar archive: %w", path, err)
	}
	if blobs.has("index.json") {
		img, err := fromBlobs(blobs)
		if err != nil {
			return nil, fmt.Errorf("image %s is an OCI archive that cannot be read: %w", path, err)
		}
		return img, nil
	}
	if blobs.has("manifest.json") {
		img, err := tarball.ImageFromPath(path, nil)
		if err != nil {
			return nil, fmt.Errorf("image %s is a docker archive that cannot be read: %w", path, err)
		}
		return img, nil
	}
	return nil, fmt.Errorf("image %s is a tar archive without an image: it has neither index.json nor manifest.json", path)
}

func pull(ctx context.Context, ref string) (v1.Image, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, fmt.Errorf("image %s is neither a file nor a valid registry reference", ref)
	}
	img, err := remote.Image(parsed,
		remote.WithContext(ctx),
		remote.WithAuthFromKeychain(authn.DefaultKeychain),
		remote.WithPlatform(platform()))
	if err != nil {
		return nil, fmt.Errorf("image %s cannot be pulled: %w", ref, plain(err))
	}
	return img, nil
}

// plain shortens a registry's answer, which may be a page of text, to one line.
func plain(err error) error {
	var answer *transport.Error
	if !errors.As(err, &answer) {
		return err
	}
	var codes []string
	for _, d := range answer.Errors {
		codes = append(codes, strings.ToLower(strings.ReplaceAll(string(d.Code), "_", " ")))
	}
	if len(codes) == 0 {
		return fmt.Errorf("the registry answers with status %d", answer.StatusCode)
	}
	return fmt.Errorf("the registry answers with status %d, %s", answer.StatusCode, strings.Join(codes, ", "))
}

func platform() v1.Platform {
	return v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
}

// dirBlobs reads the files of an OCI layout directory.
type dirBlobs string

func (d dirBlobs) open(name string) (io.ReadCloser, error) {
	return os.DirFS(string(d)).Open(name)
}

// tarBlobs reads the files of an uncompressed tar archive in place.
type tarBlobs struct {
	path    string
	entries map[string]span
}

type span struct{ start, size int64 }

// indexTar notes where in the archive each of its files lies.
func indexTar(path string) (*tarBlobs, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	t := &tarBlobs{path: path, entries: make(map[string]span)}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err == io.EOF {
			return t, nil
		}
		if err != nil {
			return nil, err
		}
		start, err := f.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, err
		}
		if h.Typeflag == tar.TypeReg {
			t.entries[strings.TrimPrefix(h.Name, "./")] = span{start, h.Size}
		}
	}
}

func (t *tarBlobs) has(name string) bool {
	_, ok := t.entries[name]
	return ok
}

func (t *tarBlobs) open(name string) (io.ReadCloser, error) {
	s, ok := t.entries[name]
	if !ok {
		return nil, fmt.Errorf("open %s: %w", name, fs.ErrNotExist)
	}
	f, err := os.Open(t.path)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(f, s.start, s.size), f}, nil
}
