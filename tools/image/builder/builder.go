// Package builder makes the container images that Berth starts sessions from and
// keeps each as an OCI layout in the cache. It guarantees that an image is built
// once per recipe, that nothing of the building machine (package sources, name
// servers, host name) is left in it, and that a build that is interrupted leaves
// nothing behind. The contents of the Debian image follow the package versions
// that the machine's sources offered on the day of the build.
package builder

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/berth-dev/berth/internal/ociimage"
	"github.com/berth-dev/berth/tools/runtimes/cache"
)

// EnvImage names an image to use in place of the one that would be built.
const EnvImage = "BERTH_IMAGE"

// The user that sessions run as, in every image that this package makes.
const (
	User = "agent"
	UID  = 1000
	Home = "/home/agent"
)

// Names inside the cache.
const (
	cacheFolder = "images"
	defaultLink = "default"
)

// epoch is the time stamp of everything in an image that has no better one.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// Default returns the OCI layout of the default session image: the image that
// ref names, or if ref is empty the Debian image, built when it is missing.
// Built finds what Default returned last.
func Default(ctx context.Context, ref string, log io.Writer) (string, error) {
	path, err := makeDefault(ctx, ref, log)
	if err != nil {
		return "", err
	}
	return path, cache.Point(filepath.Join(filepath.Dir(path), defaultLink), path)
}

// Built returns the OCI layout of the default session image without building it.
// Its error is one sentence that says what to do.
func Built() (string, error) {
	root, err := cache.Root()
	if err != nil {
		return "", err
	}
	path, err := filepath.EvalSymlinks(filepath.Join(root, cacheFolder, defaultLink))
	if errors.Is(err, fs.ErrNotExist) {
		return "", errors.New("the default session image is not built; run: go run ./tools/image")
	}
	if err != nil {
		return "", fmt.Errorf("find the default session image: %w", err)
	}
	return path, nil
}

func makeDefault(ctx context.Context, ref string, log io.Writer) (string, error) {
	if ref != "" {
		return copyOf(ctx, ref, log)
	}
	if !canBuildDebian() {
		return "", fmt.Errorf("the default image cannot be built here, for want of mmdebstrap; name an image with --image or %s", EnvImage)
	}
	return debianImage(ctx, log)
}

// copyOf keeps the image that ref names in the cache, under its digest.
func copyOf(ctx context.Context, ref string, log io.Writer) (string, error) {
	img, err := ociimage.LoadContext(ctx, ref)
	if err != nil {
		return "", err
	}
	digest, err := img.Digest()
	if err != nil {
		return "", fmt.Errorf("compute the digest of image %s: %w", ref, err)
	}
	return fill("image-"+digest.Hex[:12], func(dir string) error {
		return timed(log, "copying image "+ref, func() error { return ociimage.WriteLayout(dir, img) })
	})
}

// fill returns the cached layout with the given name, building it when missing.
func fill(name string, build func(dir string) error) (string, error) {
	root, err := cache.Root()
	if err != nil {
		return "", err
	}
	return cache.Fill(filepath.Join(root, cacheFolder), name, build)
}

// entryName names a cache entry after everything that goes into the image.
func entryName(name string, inputs ...any) string {
	text, err := json.Marshal(append(inputs, runtime.GOARCH))
	if err != nil {
		panic(err) // recipes are strings and image configurations
	}
	sum := sha256.Sum256(text)
	return name + "-" + hex.EncodeToString(sum[:6])
}

// timed says what it does and how long it took.
func timed(log io.Writer, what string, do func() error) error {
	fmt.Fprintf(log, "%s ...\n", what)
	start := time.Now()
	if err := do(); err != nil {
		return err
	}
	fmt.Fprintf(log, "%s: done %.0f s\n", what, time.Since(start).Seconds())
	return nil
}

// imageConfig is what the images say about how to run them. They name no user:
// process 1 is the guest agent, and whoever starts a program chooses its user.
func imageConfig(shell string) v1.Config {
	return v1.Config{
		Env: []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"LANG=C.UTF-8",
		},
		Cmd:        []string{shell},
		WorkingDir: Home,
	}
}

// writeImage writes an image of one layer, given as a (compressed) tar file.
func writeImage(dir, layerFile string, config v1.Config) error {
	layer, err := tarball.LayerFromFile(layerFile, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return fmt.Errorf("read the image's layer: %w", err)
	}
	base, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		OS: "linux", Architecture: runtime.GOARCH,
		Created: v1.Time{Time: epoch},
		RootFS:  v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return fmt.Errorf("describe the image: %w", err)
	}
	base = mutate.ConfigMediaType(mutate.MediaType(base, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.Append(base, mutate.Addendum{
		Layer:   layer,
		History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "berth tools/image"},
	})
	if err != nil {
		return fmt.Errorf("assemble the image: %w", err)
	}
	if img, err = mutate.Config(img, config); err != nil {
		return fmt.Errorf("describe the image: %w", err)
	}
	return ociimage.WriteLayout(dir, img)
}

// scratch makes a directory for the files of one build and removes it after.
func scratch(use func(dir string) error) error {
	dir, err := os.MkdirTemp("", "berth-image-")
	if err != nil {
		return fmt.Errorf("create a scratch directory: %w", err)
	}
	defer os.RemoveAll(dir)
	return use(dir)
}
