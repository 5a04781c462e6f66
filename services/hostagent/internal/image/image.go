// Package image keeps unpacked images on one host, one folder per digest, every layer applied. It
// guarantees that a folder under its digest is whole and was checked layer by layer against the
// digests that its configuration names, also after a crash, and that nothing changes it later.
//
// An image is one folder rather than one per layer: the layers' own deletion marks would be in
// another namespace of attributes than those of a session's disk, and files would reappear.
package image

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/archive"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// Loader finds the image that ref names: a layout, an archive or a registry reference.
type Loader func(ctx context.Context, ref string) (v1.Image, error)

// Store is safe for concurrent use by one process.
type Store struct {
	dir  string
	load Loader
	mu   sync.Mutex

	refsMu sync.Mutex        // after mu
	refs   map[string]string // digest by reference, of this process

	making  chan struct{} // one block is made at a time
	blockMu sync.Mutex    // of what follows
	jobs    map[string]*blockJob
	checked map[string]bool // digests whose block this process made or compared
}

const (
	rootFolder = "rootfs"
	configFile = "image.json"
	making     = ".making-"
)

// meta is stored beside the files.
type meta struct {
	Digest string   `json:"digest"`
	Env    []string `json:"env"`
	Block  *block   `json:"block,omitempty"` // nil until it was made
}

// Open makes or reopens the store in dir and removes what an earlier process was unpacking.
func Open(dir string, load Loader) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, errs.E("open image store", errkind.Invalid, dir, err)
	}
	// A container's first process walks this path without any rights on the host.
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, errs.E("open image store", errkind.Internal, dir, err)
	}
	s := &Store{dir: dir, load: load, refs: map[string]string{}, checked: map[string]bool{}, jobs: map[string]*blockJob{}, making: make(chan struct{}, 1)}
	if err := s.clean(); err != nil {
		return nil, errs.E("open image store", errkind.Internal, dir, err)
	}
	return s, nil
}

// Get returns an image that is unpacked already; NotFound if it is not. Its Block is there if it was
// made, see Block.
func (s *Store) Get(digest string) (driver.Image, error) {
	const op = "find image"
	dir, err := s.folder(digest)
	if err != nil {
		return driver.Image{}, errs.E(op, errkind.Invalid, digest, err)
	}
	b, err := os.ReadFile(filepath.Join(dir, configFile))
	if errors.Is(err, fs.ErrNotExist) {
		return driver.Image{}, errs.E(op, errkind.NotFound, digest, "the image is not on this host")
	}
	if err != nil {
		return driver.Image{}, errs.E(op, errkind.Internal, digest, err)
	}
	var m meta
	if err := json.Unmarshal(b, &m); err != nil || m.Digest != digest {
		return driver.Image{}, errs.E(op, errkind.DataLoss, digest, "the image's description is damaged")
	}
	return driver.Image{Digest: digest, Lower: filepath.Join(dir, rootFolder), Block: blockPath(dir, m.Block), Env: m.Env}, nil
}

// Ensure returns the image that ref names, unpacking it if need be. A reference is looked up once
// per process: what it names is pinned by digest from then on.
func (s *Store) Ensure(ctx context.Context, ref string) (driver.Image, error) {
	const op = "unpack image"
	s.mu.Lock()
	defer s.mu.Unlock()
	if digest, ok := s.digest(ref); ok {
		if img, err := s.Get(digest); err == nil {
			return img, nil
		}
	}
	src, err := s.load(ctx, ref)
	if err != nil {
		return driver.Image{}, errs.E(op, errkind.NotFound, ref, err)
	}
	hash, err := src.Digest()
	if err != nil {
		return driver.Image{}, errs.E(op, errkind.Internal, ref, err)
	}
	img, err := s.Get(hash.String())
	if errs.Is(err, errkind.NotFound) {
		if err = s.unpack(ctx, src, hash.String()); err == nil {
			img, err = s.Get(hash.String())
		}
	}
	if errors.Is(err, unix.ENOSPC) {
		return img, errs.E(op, errkind.NoCapacity, ref, err)
	}
	if err != nil {
		return img, errs.Wrap(op, ref, err)
	}
	s.refsMu.Lock()
	s.refs[ref] = hash.String()
	s.refsMu.Unlock()
	return img, nil
}

func (s *Store) digest(ref string) (string, bool) {
	s.refsMu.Lock()
	defer s.refsMu.Unlock()
	d, ok := s.refs[ref]
	return d, ok
}

// Resolved is the digest that ref stands for, empty if this process has not looked it up.
func (s *Store) Resolved(ref string) string {
	d, _ := s.digest(ref)
	return d
}

// Known lists the digests that are unpacked, and the references that this process looked up. It does
// not wait for an unpacking under way.
func (s *Store) Known() []string {
	out, err := s.List()
	if err != nil {
		return nil
	}
	s.refsMu.Lock()
	defer s.refsMu.Unlock()
	for ref, d := range s.refs {
		if slices.Contains(out, d) {
			out = append(out, ref)
		}
	}
	return out
}

// List returns the digests that are unpacked.
func (s *Store) List() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, errs.E("list images", errkind.Internal, s.dir, err)
	}
	var out []string
	for _, e := range entries {
		if d := strings.Replace(e.Name(), "-", ":", 1); strings.HasPrefix(d, "sha256:") {
			out = append(out, d)
		}
	}
	return out, nil
}

// Remove deletes an unpacked image; no sandbox may use it and no disk may name it. Idempotent.
func (s *Store) Remove(digest string) error {
	dir, err := s.folder(digest)
	if err != nil {
		return errs.E("remove image", errkind.Invalid, digest, err)
	}
	s.leaveBlock(digest)
	s.mu.Lock()
	defer s.mu.Unlock()
	gone := filepath.Join(s.dir, making+rand.Text())
	if err := os.Rename(dir, gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.E("remove image", errkind.Internal, digest, err)
	}
	return errs.Wrap("remove image", digest, os.RemoveAll(gone))
}

func (s *Store) folder(digest string) (string, error) {
	h, err := v1.NewHash(digest)
	if err != nil {
		return "", fmt.Errorf("%.80q is no digest", digest)
	}
	return filepath.Join(s.dir, h.Algorithm+"-"+h.Hex), nil
}

// unpack applies every layer in a folder of its own, which takes its name once all is on stable
// storage.
func (s *Store) unpack(ctx context.Context, src v1.Image, digest string) error {
	dir, err := s.folder(digest)
	if err != nil {
		return err
	}
	tmp := filepath.Join(s.dir, making+rand.Text())
	root := filepath.Join(tmp, rootFolder)
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	if err := os.Chmod(tmp, 0o711); err != nil {
		return err
	}
	cfg, err := src.ConfigFile()
	if err != nil {
		return fmt.Errorf("read image configuration: %w", err)
	}
	layers, err := src.Layers()
	if err != nil {
		return fmt.Errorf("read image layers: %w", err)
	}
	if len(layers) != len(cfg.RootFS.DiffIDs) {
		return fmt.Errorf("the image has %d layers, its configuration names %d", len(layers), len(cfg.RootFS.DiffIDs))
	}
	for i, l := range layers {
		if err := apply(ctx, root, l, cfg.RootFS.DiffIDs[i]); err != nil {
			return fmt.Errorf("layer %d: %w", i+1, err)
		}
	}
	// No layer names the root's own time, which would differ from host to host.
	if err := os.Chtimes(root, time.Unix(0, 0), time.Unix(0, 0)); err != nil {
		return err
	}
	b, err := json.Marshal(meta{Digest: digest, Env: cfg.Config.Env})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tmp, configFile), b, 0o644); err != nil {
		return err
	}
	if err := syncAll(tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	return syncAll(s.dir)
}

func apply(ctx context.Context, root string, l v1.Layer, want v1.Hash) error {
	r, err := l.Uncompressed()
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	sum := sha256.New()
	tee := io.TeeReader(r, sum)
	if _, err := archive.Apply(ctx, root, tee); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, tee); err != nil { // padding after the archive's end
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want.Hex {
		return fmt.Errorf("its content is sha256:%s, not %s as the image says", got, want)
	}
	return nil
}

// syncAll brings the file system that holds dir to stable storage.
func syncAll(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return unix.Syncfs(int(d.Fd()))
}
