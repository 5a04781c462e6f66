package ociimage

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// annotationName tells containerd's Import how to name an image.
const annotationName = "io.containerd.image.name"

// WriteArchive writes img as an OCI archive that containerd's client.Import
// reads. containerd knows the image by the given name, and by the same manifest
// digest as img. name must be a full reference, such as berth.local/agent:v1.
func WriteArchive(w io.Writer, name string, img v1.Image) error {
	t := tar.NewWriter(w)
	if err := writeArchive(t, name, img); err != nil {
		return fmt.Errorf("write image %s as an archive: %w", name, err)
	}
	if err := t.Close(); err != nil {
		return fmt.Errorf("finish the archive of image %s: %w", name, err)
	}
	return nil
}

func writeArchive(t *tar.Writer, name string, img v1.Image) error {
	desc, err := partial.Descriptor(img)
	if err != nil {
		return err
	}
	desc.Annotations = map[string]string{annotationName: name}
	index, err := json.Marshal(v1.IndexManifest{
		SchemaVersion: 2,
		MediaType:     types.OCIImageIndex,
		Manifests:     []v1.Descriptor{*desc},
	})
	if err != nil {
		return err
	}
	manifest, err := img.RawManifest()
	if err != nil {
		return err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	configDigest, err := img.ConfigName()
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		data []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", index},
		{blobPath(desc.Digest), manifest},
		{blobPath(configDigest), config},
	} {
		if err := addFile(t, f.name, int64(len(f.data)), bytes.NewReader(f.data)); err != nil {
			return err
		}
	}
	return addLayers(t, img)
}

func addLayers(t *tar.Writer, img v1.Image) error {
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	done := make(map[v1.Hash]bool)
	for _, layer := range layers {
		digest, err := layer.Digest()
		if err != nil {
			return err
		}
		if done[digest] {
			continue
		}
		done[digest] = true
		size, err := layer.Size()
		if err != nil {
			return err
		}
		r, err := layer.Compressed()
		if err != nil {
			return err
		}
		err = addFile(t, blobPath(digest), size, r)
		r.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func addFile(t *tar.Writer, name string, size int64, r io.Reader) error {
	if err := t.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size, Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	_, err := io.Copy(t, r)
	return err
}

// WriteLayout writes img as an OCI layout into dir, which must be empty or new.
func WriteLayout(dir string, img v1.Image) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create the OCI layout: %w", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "index.json")); err == nil {
		return fmt.Errorf("write an OCI layout to %s: there is one already", dir)
	}
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("write an OCI layout to %s: %w", dir, err)
	}
	p := platform()
	if err := path.AppendImage(img, layout.WithPlatform(p)); err != nil {
		return fmt.Errorf("write an OCI layout to %s: %w", dir, err)
	}
	return nil
}
