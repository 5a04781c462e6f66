//go:build linux

package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
)

// kernelFolder returns what tools/runtimes filled.
func kernelFolder(t testing.TB) string {
	t.Helper()
	root := os.Getenv("BERTH_CACHE")
	if root == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Skipf("skipped: no cache folder: %v", err)
		}
		root = filepath.Join(cache, "berth")
	}
	return filepath.Join(root, "runtimes", "current", "microvm")
}

// built are the programs, the image and the blank disk of all tests of this package.
type built struct {
	dir, guest, image, blank string
	shelf                    shelf
}

var once struct {
	sync.Mutex
	built *built
}

const diskBytes = 64 << 20

// TestMain removes what the tests share.
func TestMain(m *testing.M) {
	code := m.Run()
	if once.built != nil {
		_ = os.RemoveAll(once.built.dir)
	}
	os.Exit(code)
}

// build makes what the tests share, or skips.
func needBuilt(t testing.TB) *built {
	t.Helper()
	if testing.Short() {
		t.Skip("skipped: short, no virtual machines")
	}
	for _, program := range []string{"mkfs.erofs", "mkfs.ext4"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("skipped: %v", err)
		}
	}
	once.Lock()
	defer once.Unlock()
	if once.built != nil {
		return once.built
	}
	dir, err := os.MkdirTemp("", "berth-microvm-")
	if err != nil {
		t.Fatal(err)
	}
	b := &built{dir: dir, guest: filepath.Join(dir, "berth-guest"), image: filepath.Join(dir, "root.erofs"), blank: filepath.Join(dir, "blank.ext4"), shelf: shelf{all: map[shape]*template{}}}
	lower := testImage(t, dir)
	goBuild(t, b.guest, "guest/cmd/berth-guest")
	goBuild(t, filepath.Join(lower, "probe"), "driver/drivertest/probe")
	run(t, "mkfs.erofs", "-zlz4", b.image, lower)
	if err := os.Truncate(touch(t, b.blank), diskBytes); err != nil {
		t.Fatal(err)
	}
	run(t, "mkfs.ext4", "-q", "-O", "^resize_inode,^has_journal,has_journal", b.blank)
	once.built = b
	return b
}

func touch(t testing.TB, path string) string {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func run(t testing.TB, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
}

func goBuild(t testing.TB, out, pkg string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "github.com/berth-dev/berth/services/hostagent/"+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v: %s", pkg, err, b)
	}
}

func testImage(t testing.TB, dir string) string {
	t.Helper()
	lower := filepath.Join(dir, "image")
	for _, d := range []string{"proc", "sys", "dev", "run", "tmp", "etc", "var", "usr", "opt/folder", "mnt", "root"} {
		if err := os.MkdirAll(filepath.Join(lower, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"etc/doomed", "etc/changed", "opt/folder/file"} {
		if err := os.WriteFile(filepath.Join(lower, f), []byte("image"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return lower
}

// host is a drivertest.Host on this machine.
type host struct {
	*built
	dir string
	cfg Config
}

var (
	_ drivertest.Host     = (*host)(nil)
	_ drivertest.Litterer = (*host)(nil)
	_ drivertest.Breaker  = (*host)(nil)
	_ drivertest.Detacher = (*host)(nil)
)

func newHost(t testing.TB) *host {
	t.Helper()
	cfg := NewConfig(filepath.Join(t.TempDir(), "state"), kernelFolder(t), "/proc/self/exe")
	if err := Preflight(cfg); err != nil {
		t.Skipf("skipped: %v", err)
	}
	h := &host{built: needBuilt(t), dir: t.TempDir(), cfg: cfg}
	h.cfg.Guest, h.cfg.shelf = h.guest, &h.shelf
	h.cfg.NoKVM = true // as in most places where tests run; the probe has a test of its own
	h.cfg.UserDir = filepath.Join(h.dir, "users")
	h.cfg.Run = "/run/berth/test-" + h.cfg.Cgroup[len("berth-"):] + "/vm"
	if testing.Verbose() {
		h.cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	}
	if err := os.MkdirAll(h.cfg.State, 0o700); err != nil {
		t.Fatal(err)
	}
	h.probed(t)
	return h
}

// Open implements drivertest.Host.
func (h *host) Open(t testing.TB) driver.Driver {
	t.Helper()
	d, err := Open(context.Background(), h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if d.accel.Absent != "" {
		t.Fatal(d.accel.Absent)
	}
	return d
}

// probed lets the hosts of all tests have what the first one found out.
func (h *host) probed(t testing.TB) {
	t.Helper()
	kept := filepath.Join(h.built.dir, "accel.json")
	if _, err := os.Stat(kept); err == nil {
		run(t, "cp", kept, h.cfg.Accel)
		return
	}
	d := h.Open(t)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	run(t, "cp", h.cfg.Accel, kept)
}

// Spec implements drivertest.Host. Every test has sessions and disks of its own.
func (h *host) Spec(t testing.TB, session int, epoch uint64) driver.Spec {
	t.Helper()
	key := ids.DeriveSessionKey([]byte("k"), t.Name(), "t", fmt.Sprint(session), "default")
	dir := filepath.Join(h.dir, string(key))
	image := filepath.Join(dir, "disk.ext4")
	if _, err := os.Stat(image); err != nil {
		if err := os.MkdirAll(filepath.Join(dir, "run"), 0o755); err != nil {
			t.Fatal(err)
		}
		run(t, "cp", "--sparse=always", h.blank, image)
	}
	return driver.Spec{
		Session: key, Generation: ids.Generation{Incarnation: 1, Index: 1}, Epoch: ids.Epoch{Incarnation: 1, Index: epoch}, Tier: driver.MicroVM,
		Image: driver.Image{Digest: "sha256:test", Block: h.image}, DiskImage: image, RunDir: filepath.Join(dir, "run"),
		Init: []string{"/probe"}, Hostname: fmt.Sprintf("box-%d", session),
		Limits: driver.Limits{CPUMillis: 1000, MemoryBytes: 192 << 20, PIDs: 64},
	}
}

// Left implements drivertest.Host.
func (h *host) Left(t testing.TB) []string {
	t.Helper()
	var out []string
	for _, dir := range []string{filepath.Join(h.cfg.State, "vms"), h.cfg.Run} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), templatePrefix) {
				out = append(out, "folder "+e.Name())
			}
		}
	}
	tree, err := cgroup.Detect()
	if err != nil {
		t.Error(err)
	}
	for _, c := range tree.Children(h.cfg.Cgroup) {
		if !strings.HasPrefix(c, templatePrefix) {
			out = append(out, "cgroup "+c)
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, p := range procs {
		if b, _ := os.ReadFile(p); bytes.Contains(b, []byte(h.cfg.Cgroup+"/b")) || bytes.Contains(b, []byte(h.cfg.Cgroup+"/w")) {
			out = append(out, "process "+filepath.Dir(p))
		}
	}
	users, _ := os.ReadDir(h.cfg.UserDir)
	for _, u := range users {
		out = append(out, "user "+u.Name())
	}
	return out
}

var errFault = errors.New("fault of the test")

// Crash implements drivertest.Host.
func (h *host) Crash(d driver.Driver, _ driver.Tier, n int, hard bool) bool {
	return crashAt(d, n, hard, []string{"sandbox.record", "sandbox.cgroup", "sandbox.template", "sandbox.machine", "sandbox.restore", "sandbox.personalise", "sandbox.ready"})
}

// Break implements drivertest.Breaker.
func (h *host) Break(d driver.Driver, _ driver.Tier, n int, hard bool) bool {
	return crashAt(d, n, hard, []string{"warm.record", "warm.cgroup", "warm.template", "warm.machine", "warm.restore", "warm.guest", "warm.rehearsal", "warm.ready",
		"claim.record", "claim.disk", "claim.limits", "claim.personalise", "claim.ready"})
}

// Detach implements drivertest.Detacher: nobody holds the disk's image any more.
func (h *host) Detach(_ testing.TB, spec driver.Spec) error {
	open, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return err
	}
	for _, f := range open {
		if to, err := os.Readlink(f); err == nil && to == spec.DiskImage {
			return fmt.Errorf("%s is the disk's image", f)
		}
	}
	return nil
}

func crashAt(d driver.Driver, n int, hard bool, points []string) bool {
	if n >= len(points) {
		return false
	}
	r := &d.(*Driver).run
	r.Fault, r.Crash = nil, hard
	if n >= 0 {
		r.Fault = func(name string) error {
			if name == points[n] {
				return errFault
			}
			return nil
		}
	}
	return true
}

// Litter implements drivertest.Litterer: sockets of a machine whose record is gone.
func (h *host) Litter(t testing.TB, _ driver.Tier, id ids.SandboxID) bool {
	t.Helper()
	listeners, err := listen(filepath.Join(h.cfg.Run, string(id)))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range listeners {
		_ = f.Close()
	}
	return true
}
