package disk

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/extents"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// xfsPool is an XFS file system with reflink in a loop file. One serves all tests that need no size
// of their own.
type xfsPool struct{ dir, file, point string }

var shared struct {
	once sync.Once
	pool *xfsPool
	err  error
}

func TestMain(m *testing.M) {
	if os.Getenv(childVar) != "" {
		os.Exit(child())
	}
	code := m.Run()
	if shared.pool != nil {
		if err := shared.pool.close(); err != nil {
			fmt.Fprintln(os.Stderr, "remove the pool:", err)
			code = 1
		}
	}
	os.Exit(code)
}

func makePool(mib int) (*xfsPool, error) {
	dir, err := os.MkdirTemp("", "pool")
	if err != nil {
		return nil, err
	}
	p := &xfsPool{dir: dir, file: filepath.Join(dir, "pool.xfs"), point: filepath.Join(dir, "pool")}
	if err := p.make(mib); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *xfsPool) make(mib int) error {
	if err := errors.Join(os.WriteFile(p.file, nil, 0o600), os.Truncate(p.file, int64(mib)<<20), os.Mkdir(p.point, 0o700)); err != nil {
		return err
	}
	if out, err := exec.Command("mkfs.xfs", "-q", "-m", "reflink=1", "-s", "size=4096", p.file).CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.xfs: %w: %s", err, out)
	}
	return p.mount()
}

func (p *xfsPool) mount() error {
	dev, err := loopdev.Attach(p.file, false)
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	return unix.Mount(dev.Name(), p.point, "xfs", unix.MS_NOATIME, "")
}

func (p *xfsPool) close() error {
	err := unix.Unmount(p.point, 0)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		err = nil
	}
	if err != nil {
		return errors.Join(err, unix.Unmount(p.point, unix.MNT_DETACH), os.RemoveAll(p.dir))
	}
	return os.RemoveAll(p.dir)
}

// xfsDir is a folder of the shared pool.
func xfsDir(t testing.TB) string {
	t.Helper()
	needRoot(t)
	shared.once.Do(func() { shared.pool, shared.err = makePool(1 << 10) })
	if shared.err != nil {
		t.Skipf("skipped: no XFS pool: %v", shared.err)
	}
	dir := filepath.Join(shared.pool.point, "s"+rand.Text())
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("empty the pool: %v", err)
		}
	})
	return dir
}

// ownPool is a pool of a size of its own.
func ownPool(t testing.TB, mib int) *xfsPool {
	t.Helper()
	needRoot(t)
	p, err := makePool(mib)
	if err != nil {
		t.Skipf("skipped: no XFS pool: %v", err)
	}
	t.Cleanup(func() {
		if err := p.close(); err != nil {
			t.Errorf("remove the pool: %v", err)
		}
	})
	return p
}

// kinds are the file systems that a store is tested on.
var kinds = []struct {
	name string
	dir  func(testing.TB) string
}{
	{"xfs", xfsDir},
	{"ext4", func(t testing.TB) string { needRoot(t); return t.TempDir() }},
}

// onPools runs a test with a configuration for each kind of pool.
func onPools(t *testing.T, f func(t *testing.T, cfg Config)) {
	t.Helper()
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			dir := kind.dir(t)
			f(t, Config{Dir: dir, Reflink: extents.Usable(dir) == nil})
		})
	}
}

// openWith is openTest with a configuration.
func openWith(t testing.TB, cfg Config, fault func(string) error) *Store {
	t.Helper()
	s, err := open(context.Background(), cfg, fault)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.fault, s.run.Fault = nil, nil
		if _, err := s.Sweep(context.Background(), func(Disk) Verdict { return Remove }); err != nil {
			t.Errorf("sweep: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		noTrace(t, cfg.Dir)
	})
	return s
}

// awake attaches a fresh disk and lets the session write.
func awake(t testing.TB, s *Store, n int, epoch uint64) Attachment {
	t.Helper()
	a := attach(t, s, fresh(n, epoch))
	activate(t, s, n, epoch)
	return a
}

func activate(t testing.TB, s *Store, n int, epoch uint64) {
	t.Helper()
	if err := s.Activate(key(n), ep(epoch)); err != nil {
		t.Fatal(err)
	}
}

// manifestOf is what a store of chunks would answer for a shot.
func manifestOf(sh *Shot, id string) Manifest {
	return Manifest{
		ID: id, Session: sh.Session, Generation: sh.Generation, Epoch: sh.Epoch, Parent: sh.Parent,
		Image: sh.ImageDigest, Size: sh.Size, Allocated: sh.Allocated(),
	}
}

func shoot(t testing.TB, s *Store, n int, epoch uint64) *Shot {
	t.Helper()
	sh, err := s.Shoot(context.Background(), key(n), ep(epoch))
	if err != nil {
		t.Fatalf("shoot: %v", err)
	}
	return sh
}

// saved proposes and commits a shot.
func saved(t testing.TB, s *Store, sh *Shot, id string) {
	t.Helper()
	for _, err := range []error{
		s.Propose(sh, manifestOf(sh, id), []byte("index of "+id)), s.CommitHead(sh.Key, id), s.Release(sh),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// slept puts a session to sleep with a committed manifest.
func slept(t testing.TB, s *Store, n int, epoch uint64, id string) {
	t.Helper()
	sh, m, err := s.SealShot(context.Background(), key(n), ep(epoch))
	if err != nil || sh == nil {
		t.Fatalf("seal: %v, %v, %v", sh, m, err)
	}
	saved(t, s, sh, id)
}

func record(t testing.TB, s *Store, n int) Record {
	t.Helper()
	r, err := s.Get(key(n))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// wake attaches an existing disk.
func wake(t testing.TB, s *Store, n int, epoch uint64, head string, last uint64) Attachment {
	t.Helper()
	return attach(t, s, Want{Key: key(n), Epoch: ep(epoch), Head: head, LastActive: ep(last)})
}

// names lists a disk's folder.
func names(t testing.TB, s *Store, n int) map[string]bool {
	t.Helper()
	entries, err := os.ReadDir(s.folder(key(n)))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, e := range entries {
		out[e.Name()] = true
	}
	return out
}
