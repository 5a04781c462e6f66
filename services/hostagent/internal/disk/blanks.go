package disk

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

// Blanks says which formatted images are kept ready, so that formatting is off the path of a wake.
type Blanks struct {
	// Sizes in bytes; a size that was asked for once is added while there is room (MaxSizes).
	Sizes []uint64
	// Ready is how many are kept per size; it is the ceiling as well. 0 keeps none.
	Ready int
}

// MaxSizes bounds how many different sizes blanks are kept of.
const MaxSizes = 8

const (
	firstBackoff = 250 * time.Millisecond
	lastBackoff  = time.Minute
)

// blanks fills blanks/<size>/<random>.img in the background. Where the file system can share
// extents (FICLONE), a blank is a clone of one template per size; else each is formatted.
type blanks struct {
	store *Store
	ready int
	mkfs  func(ctx context.Context, path string, size uint64) error
	log   *slog.Logger

	mu     sync.Mutex
	sizes  []uint64
	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
}

func newBlanks(ctx context.Context, s *Store, cfg Blanks) *blanks {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	b := &blanks{
		store: s, ready: cfg.Ready, mkfs: mkfs, log: s.log, sizes: cfg.Sizes[:min(len(cfg.Sizes), MaxSizes)],
		wake: make(chan struct{}, 1), cancel: cancel, done: make(chan struct{}),
	}
	b.tidy()
	go b.fillForEver(ctx)
	return b
}

func (b *blanks) close() {
	b.cancel()
	<-b.done
}

// blankFormat is what blanks are: 2 have the two folders of a disk in them, and the mark.
const blankFormat = "2\n"

// blankMark is a file at the top of a blank, which goes with its first mount: an image that has it holds
// nothing of anybody. A machine leaves it; the host does not look there any more.
const blankMark = "blank"

// tidy removes what an earlier process was formatting, and the blanks of an earlier version.
func (b *blanks) tidy() {
	mark := filepath.Join(b.store.dir, "blanks", "format")
	if have, err := os.ReadFile(mark); err != nil || string(have) != blankFormat {
		old, _ := filepath.Glob(filepath.Join(b.store.dir, "blanks", "*", "*"))
		for _, f := range old {
			_ = discard(f)
		}
		if err := writeWhole(mark, []byte(blankFormat)); err != nil {
			b.log.Warn("cannot note the format of blank disks", "error", err)
		}
	}
	half, _ := filepath.Glob(filepath.Join(b.store.dir, "blanks", "*", "*.making"))
	for _, f := range half {
		_ = os.Remove(f)
	}
}

func (b *blanks) folder(size uint64) string {
	return filepath.Join(b.store.dir, "blanks", strconv.FormatUint(size, 10))
}

func blankSize(folder string) (uint64, bool) {
	n, err := strconv.ParseUint(filepath.Base(folder), 10, 64)
	return n, err == nil
}

// claim moves a blank of the size to path; with none ready it formats one.
func (b *blanks) claim(ctx context.Context, size uint64, path string) error {
	defer b.nudge(size)
	ready, err := filepath.Glob(filepath.Join(b.folder(size), "*.img"))
	if err != nil {
		return err
	}
	for _, f := range ready {
		err := os.Rename(f, path)
		if err == nil {
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("claim blank: %w", err)
		}
	}
	tmp := path + ".making"
	if err := b.make(ctx, size, tmp); err != nil {
		_ = os.Remove(tmp)
		return err
	}
	return os.Rename(tmp, path)
}

// nudge remembers the size and starts a refill.
func (b *blanks) nudge(size uint64) {
	b.mu.Lock()
	known := false
	for _, s := range b.sizes {
		known = known || s == size
	}
	if !known && len(b.sizes) < MaxSizes {
		b.sizes = append(b.sizes[:len(b.sizes):len(b.sizes)], size)
	}
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *blanks) fillForEver(ctx context.Context) {
	defer close(b.done)
	backoff := firstBackoff
	for {
		err := b.fill(ctx)
		var again <-chan time.Time
		if err != nil && ctx.Err() == nil {
			b.log.Warn("cannot make a blank disk", "err", err, "again_in", backoff)
			again = time.After(backoff)
			backoff = min(2*backoff, lastBackoff)
		} else {
			backoff = firstBackoff
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-b.wakeUnless(again != nil):
		}
	}
}

// wakeUnless mutes nudges during a back-off: a failure must not be retried at the rate of claims.
func (b *blanks) wakeUnless(mute bool) <-chan struct{} {
	if mute {
		return nil
	}
	return b.wake
}

func (b *blanks) fill(ctx context.Context) error {
	b.mu.Lock()
	sizes := b.sizes
	b.mu.Unlock()
	for _, size := range sizes {
		for ctx.Err() == nil {
			ready, err := filepath.Glob(filepath.Join(b.folder(size), "*.img"))
			if err != nil || len(ready) >= b.ready {
				break
			}
			if err := b.one(ctx, size); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *blanks) one(ctx context.Context, size uint64) error {
	if err := os.MkdirAll(b.folder(size), 0o700); err != nil {
		return err
	}
	sp, err := b.store.account()
	if err != nil {
		return err
	}
	if sp.Room() < size/64 { // what formatting takes, with room to spare
		return fmt.Errorf("make blank disk of %s: %w", fmtBytes(size), unix.ENOSPC)
	}
	name := filepath.Join(b.folder(size), rand.Text())
	if err := b.make(ctx, size, name+".making"); err != nil {
		_ = os.Remove(name + ".making")
		return err
	}
	return os.Rename(name+".making", name+".img")
}

// make writes a formatted image to path and brings it to stable storage.
func (b *blanks) make(ctx context.Context, size uint64, path string) error {
	if err := b.clone(ctx, size, path); err == nil {
		return nil
	} else if !errors.Is(err, extents.ErrNotSupported) {
		return err
	}
	if err := b.mkfs(ctx, path, size); err != nil {
		return err
	}
	return syncFile(path)
}

// clone shares the extents of a template. Its file system UUID is shared as well, which is why
// images are never found by UUID.
func (b *blanks) clone(ctx context.Context, size uint64, path string) error {
	if !b.store.reflink {
		return extents.ErrNotSupported
	}
	template := b.store.template(size)
	if err := os.MkdirAll(b.folder(size), 0o700); err != nil {
		return err
	}
	if _, err := os.Lstat(template); errors.Is(err, fs.ErrNotExist) {
		tmp := template + rand.Text() + making
		err := b.mkfs(ctx, tmp, size)
		if err == nil {
			err = syncFile(tmp)
		}
		if err != nil {
			_ = os.Remove(tmp)
			return err
		}
		if err := os.Rename(tmp, template); err != nil {
			return err
		}
	}
	src, err := os.Open(template)
	if err != nil {
		return fmt.Errorf("open template: %w", err)
	}
	defer func() { _ = src.Close() }()
	dst, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err = extents.Clone(dst, src); err == nil {
		err = dst.Sync()
	}
	if cerr := dst.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = os.Remove(path)
	}
	return err
}

func mkfs(ctx context.Context, path string, size uint64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = f.Truncate(int64(size))
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	content, err := skeleton()
	if err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	defer func() { _ = os.RemoveAll(content) }()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-b", strconv.Itoa(SizeUnit), "-m", "0", "-d", content,
		"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", path)
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("mkfs.ext4: %w: %s", mkfsCause(err, stderr.Bytes()), bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}

// skeleton is a folder that holds what every disk holds.
func skeleton() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "berth-blank"); err != nil {
		return "", err
	}
	err = os.Chmod(dir, 0o755)
	for _, name := range []string{Upper, Work} {
		path := filepath.Join(dir, name)
		err = errors.Join(err, os.Mkdir(path, 0o755), os.Chmod(path, 0o755))
	}
	return dir, errors.Join(err, os.WriteFile(filepath.Join(dir, blankMark), nil, 0o600))
}

// mkfsCause gives 'no space' its errno back, which the exit code of mkfs hides.
func mkfsCause(err error, stderr []byte) error {
	if bytes.Contains(stderr, []byte("No space left")) {
		return unix.ENOSPC
	}
	return err
}

func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	err = f.Sync()
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}
