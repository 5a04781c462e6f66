package image

import (
	"bytes"
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
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

const (
	blockFile = "rootfs.erofs"
	blockTmp  = ".block-"
	// blockTime is what the file system says it was made at; no file is newer.
	blockTime = "4102444800"
)

// block describes the image's files as a read-only file system in a file. It is written after the file
// is whole and on stable storage.
type block struct {
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// blockLimit bounds the making of one block.
const blockLimit = 15 * time.Minute

// blockJob is a block that is being made or compared, for all who wait for it.
type blockJob struct {
	cancel context.CancelFunc
	done   chan struct{}
	img    driver.Image
	err    error
}

// Block returns an unpacked image with its Block, which it makes if it is missing: the same files with
// the same owners, modes and attributes, for a tier with a kernel of its own. The same files give the
// same bytes wherever mkfs.erofs is the same. What is there is read and compared with what was noted
// once per process, and made again when it differs. Who waits may give up: it is made all the same, so
// that a large image is there for whoever comes later; and nobody waits for the block of another image
// whose own is there. Kinds: NotFound (the image is not unpacked), Unimplemented (mkfs.erofs is
// missing), NoCapacity, Internal. Safe for concurrent use.
func (s *Store) Block(ctx context.Context, digest string) (driver.Image, error) {
	const op = "make block image"
	img, err := s.Get(digest)
	if err != nil {
		return img, err
	}
	s.blockMu.Lock()
	if img.Block != "" && s.checked[digest] {
		s.blockMu.Unlock()
		return img, nil
	}
	j := s.jobs[digest]
	if j == nil {
		own, cancel := context.WithTimeout(context.WithoutCancel(ctx), blockLimit)
		j = &blockJob{cancel: cancel, done: make(chan struct{})}
		s.jobs[digest] = j
		go s.work(own, digest, j)
	}
	s.blockMu.Unlock()
	select {
	case <-j.done:
		return j.img, j.err
	case <-ctx.Done():
		return img, errs.E(op, errs.Kind(ctx.Err()), digest, ctx.Err())
	}
}

// work makes or compares one block; one at a time, since it takes a whole processor.
func (s *Store) work(ctx context.Context, digest string, j *blockJob) {
	select {
	case s.making <- struct{}{}:
		j.img, j.err = s.block(ctx, digest)
		<-s.making
	case <-ctx.Done():
		j.err = errs.E("make block image", errs.Kind(ctx.Err()), digest, ctx.Err())
	}
	s.blockMu.Lock()
	if j.err == nil {
		s.checked[digest] = true
	} else {
		delete(s.checked, digest)
	}
	delete(s.jobs, digest)
	s.blockMu.Unlock()
	j.cancel()
	close(j.done)
}

func (s *Store) block(ctx context.Context, digest string) (driver.Image, error) {
	const op = "make block image"
	img, err := s.Get(digest)
	if err != nil {
		return img, err // removed while this waited
	}
	dir := filepath.Dir(img.Lower)
	if img.Block != "" && s.check(dir) == nil {
		return img, nil
	}
	if _, err := exec.LookPath("mkfs.erofs"); err != nil {
		return img, errs.E(op, errkind.Unimplemented, digest, "mkfs.erofs is missing on this host (Debian: erofs-utils)")
	}
	if err := makeBlock(ctx, dir, digest); err != nil {
		kind := errkind.Internal
		switch {
		case errors.Is(err, unix.ENOSPC):
			kind = errkind.NoCapacity
		case ctx.Err() != nil:
			kind = errs.Kind(ctx.Err())
		}
		return img, errs.E(op, kind, digest, err)
	}
	return s.Get(digest)
}

// leaveBlock ends what is made of an image that is about to go, and waits for that.
func (s *Store) leaveBlock(digest string) {
	s.blockMu.Lock()
	j := s.jobs[digest]
	delete(s.checked, digest)
	s.blockMu.Unlock()
	if j == nil {
		return
	}
	j.cancel()
	<-j.done
	s.blockMu.Lock()
	delete(s.checked, digest)
	s.blockMu.Unlock()
}

// blockPath is the file of an image's block, if what was noted of it may be true.
func blockPath(dir string, b *block) string {
	path := filepath.Join(dir, blockFile)
	st, err := os.Lstat(path)
	if b == nil || err != nil || !st.Mode().IsRegular() || st.Size() != b.Bytes {
		return ""
	}
	return path
}

// check compares the block with what was noted.
func (s *Store) check(dir string) error {
	m, err := readMeta(dir)
	if err != nil {
		return err
	}
	got, err := sum(filepath.Join(dir, blockFile))
	if err != nil {
		return err
	}
	if m.Block == nil || *got != *m.Block {
		return errors.New("the block image is not what was made")
	}
	return nil
}

func sum(path string) (*block, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return nil, err
	}
	return &block{Bytes: n, SHA256: hex.EncodeToString(h.Sum(nil))}, nil
}

// makeBlock makes the file beside the folder, and then the note of it.
func makeBlock(ctx context.Context, dir, digest string) error {
	m, err := readMeta(dir)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, blockTmp+rand.Text())
	defer func() { _ = os.Remove(tmp) }()
	// The file system's own id is the image's: the same files, the same bytes.
	id := sha256.Sum256([]byte(digest))
	uuid := fmt.Sprintf("%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:16])
	cmd := exec.CommandContext(ctx, "mkfs.erofs", "-zlz4", "-U", uuid, tmp, filepath.Join(dir, rootFolder))
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH="+blockTime, "LC_ALL=C")
	if out, err := cmd.CombinedOutput(); err != nil {
		if strings.Contains(string(out), "No space left") {
			err = errors.Join(err, unix.ENOSPC)
		}
		lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
		return fmt.Errorf("mkfs.erofs: %w: %s", err, lines[len(lines)-1])
	}
	if err := os.Chmod(tmp, 0o444); err != nil {
		return err
	}
	if m.Block, err = sum(tmp); err != nil {
		return err
	}
	if err := syncAll(dir); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, blockFile)); err != nil {
		return err
	}
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	note := filepath.Join(dir, blockTmp+rand.Text())
	defer func() { _ = os.Remove(note) }()
	if err := os.WriteFile(note, b, 0o644); err != nil {
		return err
	}
	if err := syncAll(dir); err != nil {
		return err
	}
	if err := os.Rename(note, filepath.Join(dir, configFile)); err != nil {
		return err
	}
	return syncAll(dir)
}

func readMeta(dir string) (meta, error) {
	var m meta
	b, err := os.ReadFile(filepath.Join(dir, configFile))
	if err == nil {
		err = json.Unmarshal(b, &m)
	}
	return m, err
}

// clean removes what an earlier process was making.
func (s *Store) clean() error {
	for _, pattern := range []string{making + "*", "*/" + blockTmp + "*"} {
		half, _ := filepath.Glob(filepath.Join(s.dir, pattern))
		for _, d := range half {
			if err := os.RemoveAll(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}
