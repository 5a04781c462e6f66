package ociimage

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// blobs gives access to the files of an OCI layout by their path inside it.
type blobs interface {
	open(name string) (io.ReadCloser, error)
}

// fromBlobs returns the image of an OCI layout.
func fromBlobs(b blobs) (v1.Image, error) {
	data, err := read(b, "index.json")
	if err != nil {
		return nil, err
	}
	d, err := choose(b, data)
	if err != nil {
		return nil, err
	}
	core := &layoutImage{blobs: b, desc: *d}
	if core.manifest, err = readBlob(b, d.Digest); err != nil {
		return nil, err
	}
	if core.parsed, err = v1.ParseManifest(bytes.NewReader(core.manifest)); err != nil {
		return nil, fmt.Errorf("parse the manifest: %w", err)
	}
	if core.config, err = readBlob(b, core.parsed.Config.Digest); err != nil {
		return nil, err
	}
	return partial.CompressedToImage(core)
}

// choose finds the image manifest in an index: the only one, or the one for this
// machine's platform. It follows indexes inside the index.
func choose(b blobs, index []byte) (*v1.Descriptor, error) {
	parsed, err := v1.ParseIndexManifest(bytes.NewReader(index))
	if err != nil {
		return nil, fmt.Errorf("parse the index: %w", err)
	}
	var images, fitting []v1.Descriptor
	for _, d := range parsed.Manifests {
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() {
			continue
		}
		images = append(images, d)
		if d.Platform != nil && d.Platform.Satisfies(platform()) {
			fitting = append(fitting, d)
		}
	}
	if len(images) != 1 {
		images = fitting
	}
	if len(images) == 0 {
		return nil, fmt.Errorf("it has no image for %s", platform())
	}
	if len(images) > 1 {
		return nil, fmt.Errorf("it has %d images for %s", len(images), platform())
	}
	if images[0].MediaType.IsImage() {
		return &images[0], nil
	}
	inner, err := readBlob(b, images[0].Digest)
	if err != nil {
		return nil, err
	}
	return choose(b, inner)
}

func read(b blobs, name string) ([]byte, error) {
	r, err := b.open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func blobPath(digest v1.Hash) string {
	return "blobs/" + digest.Algorithm + "/" + digest.Hex
}

// readBlob reads a small blob and checks it.
func readBlob(b blobs, digest v1.Hash) ([]byte, error) {
	data, err := read(b, blobPath(digest))
	if err != nil {
		return nil, err
	}
	if got, _, err := v1.SHA256(bytes.NewReader(data)); err != nil || got != digest {
		return nil, fmt.Errorf("blob %s is damaged", digest)
	}
	return data, nil
}

// layoutImage is the core of a v1.Image over the files of an OCI layout.
type layoutImage struct {
	blobs    blobs
	desc     v1.Descriptor
	manifest []byte
	parsed   *v1.Manifest
	config   []byte
}

func (l *layoutImage) MediaType() (types.MediaType, error) {
	if l.parsed.MediaType != "" {
		return l.parsed.MediaType, nil
	}
	return l.desc.MediaType, nil
}

func (l *layoutImage) RawManifest() ([]byte, error)   { return l.manifest, nil }
func (l *layoutImage) RawConfigFile() ([]byte, error) { return l.config, nil }

func (l *layoutImage) LayerByDigest(digest v1.Hash) (partial.CompressedLayer, error) {
	if digest == l.parsed.Config.Digest {
		return &layoutLayer{blobs: l.blobs, desc: l.parsed.Config}, nil
	}
	for _, d := range l.parsed.Layers {
		if d.Digest == digest {
			return &layoutLayer{blobs: l.blobs, desc: d}, nil
		}
	}
	return nil, fmt.Errorf("the image has no layer %s", digest)
}

// layoutLayer is one layer, compressed as it lies in the layout.
type layoutLayer struct {
	blobs blobs
	desc  v1.Descriptor
}

func (l *layoutLayer) Digest() (v1.Hash, error)            { return l.desc.Digest, nil }
func (l *layoutLayer) Size() (int64, error)                { return l.desc.Size, nil }
func (l *layoutLayer) MediaType() (types.MediaType, error) { return l.desc.MediaType, nil }
func (l *layoutLayer) Compressed() (io.ReadCloser, error) {
	r, err := l.blobs.open(blobPath(l.desc.Digest))
	if err != nil {
		return nil, err
	}
	return newVerifier(r, l.desc)
}

// verifier fails a read that reaches the end of a blob with the wrong digest.
type verifier struct {
	io.Reader
	io.Closer
}

func newVerifier(r io.ReadCloser, d v1.Descriptor) (io.ReadCloser, error) {
	h, err := v1.Hasher(d.Digest.Algorithm)
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	end := readerFunc(func([]byte) (int, error) {
		if got := fmt.Sprintf("%x", h.Sum(nil)); got != d.Digest.Hex {
			return 0, fmt.Errorf("blob %s is damaged", d.Digest)
		}
		return 0, io.EOF
	})
	return verifier{io.MultiReader(io.TeeReader(r, h), end), r}, nil
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
