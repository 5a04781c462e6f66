package wasm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// programs builds what the driver runs, once for all tests.
var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "berth-wasm-test-")
	if err != nil {
		return "", err
	}
	const module = "github.com/berth-dev/berth/"
	for _, b := range []struct {
		out, pkg string
		wasi     bool
	}{
		{"berth-wasm", "services/hostagent/guest/wasm/cmd/berth-wasm", false},
		{"js.wasm", "tools/wasm/js", true},
		{"probe.wasm", "services/hostagent/driver/drivertest/probe", true},
		{"tool.wasm", "services/hostagent/driver/wasm/testdata/tool", true},
	} {
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(dir, b.out), module+b.pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if b.wasi {
			cmd.Env = append(cmd.Env, "GOOS=wasip1", "GOARCH=wasm")
		}
		if said, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build %s: %w: %s", b.out, err, said)
		}
	}
	return dir, os.Chmod(dir, 0o755)
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, err := programs(); err == nil {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// host is a drivertest.Host on this machine.
type host struct {
	dir   string
	cfg   Config
	disks *disk.Store
	lower string
	// memory of sandboxes with a guest agent: enough for a call and one that was started ahead.
	memory uint64
	short  *box // a sandbox whose calls have little time
	mu     sync.Mutex
	keys   map[disk.Key]bool
}

var (
	_ drivertest.Host     = (*host)(nil)
	_ drivertest.Breaker  = (*host)(nil)
	_ drivertest.Detacher = (*host)(nil)
)

// newHost makes a host; with the JavaScript tool if js is true. Machine code is kept from one run of
// the tests to the next: compiling that tool takes long, and its folder is named by what it is.
func newHost(t testing.TB, js bool) *host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: needs root")
	}
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	h := &host{dir: t.TempDir(), keys: map[disk.Key]bool{}, memory: 512 << 20}
	h.cfg = NewConfig(filepath.Join(h.dir, "state"), bin)
	if cache, err := os.UserCacheDir(); err == nil {
		h.cfg.Cache = filepath.Join(cache, "berth", "wasm-test")
	}
	if !js {
		h.cfg.JS = ""
	}
	if err := Preflight(h.cfg); err != nil {
		t.Skipf("skipped: %v", err)
	}
	if err := disk.Preflight(h.dir, 0); err != nil {
		t.Skipf("skipped: %v", err)
	}
	if h.disks, err = disk.Open(context.Background(), disk.Config{
		Dir: filepath.Join(h.dir, "disks"), Blanks: disk.Blanks{Sizes: []uint64{64 << 20}, Ready: 2},
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.close(t) })
	h.lower = testImage(t, h.dir, bin)
	if err := os.Chmod(h.dir, 0o700); err != nil { // state may lie where only root may go
		t.Fatal(err)
	}
	d := h.Open(t)
	err = d.(*Driver).Snapshot(t.Context(), driver.WASM, driver.Image{Lower: h.lower}, driver.Limits{})
	if err := errors.Join(err, d.Close()); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *host) close(t testing.TB) {
	for k := range h.keys {
		if err := h.deleteDisk(k); err != nil {
			t.Errorf("delete disk: %v", err)
		}
	}
	if err := h.disks.Close(); err != nil {
		t.Errorf("close disks: %v", err)
	}
}

func testImage(t testing.TB, dir, bin string) string {
	t.Helper()
	lower := filepath.Join(dir, "image")
	for _, d := range []string{"proc", "sys", "dev", "run", "tmp", "etc", "var", "usr/lib/wasm", "opt/folder", "mnt"} {
		if err := os.MkdirAll(filepath.Join(lower, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"etc/doomed", "etc/changed", "opt/folder/file"} {
		if err := os.WriteFile(filepath.Join(lower, f), []byte("image"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"probe.wasm", "tool.wasm"} {
		b, err := os.ReadFile(filepath.Join(bin, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(lower, "usr/lib/wasm", name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return lower
}

// Open implements drivertest.Host.
func (h *host) Open(t testing.TB) driver.Driver {
	t.Helper()
	d, err := Open(context.Background(), h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Spec implements drivertest.Host. Every test has sessions and disks of its own.
func (h *host) Spec(t testing.TB, session int, epoch uint64) driver.Spec {
	t.Helper()
	k := disk.Key{
		Session:    ids.DeriveSessionKey([]byte("k"), t.Name(), "t", fmt.Sprint(session), "default"),
		Generation: ids.Generation{Incarnation: 1, Index: 1},
	}
	a, err := h.disks.Attach(context.Background(), disk.Want{
		Key: k, Epoch: ids.Epoch{Incarnation: 1, Index: 1}, Fresh: true, Size: 64 << 20, Image: "sha256:test",
	})
	if err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	h.keys[k] = true
	h.mu.Unlock()
	run := filepath.Join(h.dir, "run", k.String())
	if err := os.MkdirAll(run, 0o755); err != nil {
		t.Fatal(err)
	}
	return driver.Spec{
		Session: k.Session, Generation: k.Generation, Epoch: ids.Epoch{Incarnation: 1, Index: epoch}, Tier: driver.WASM,
		Image: driver.Image{Digest: "sha256:test", Lower: h.lower}, Disk: a.Root, RunDir: run, Init: []string{"probe"},
		Hostname: fmt.Sprintf("box-%d", session),
		Limits:   driver.Limits{CPUMillis: 1000, MemoryBytes: 256 << 20, PIDs: 64},
	}
}

func (h *host) deleteDisk(k disk.Key) error {
	return drivertest.WhileBusy(func() error { return h.disks.Delete(context.Background(), k) })
}

// Release implements drivertest.Releaser.
func (h *host) Release(t testing.TB) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	for k := range h.keys {
		if err := h.deleteDisk(k); err != nil {
			t.Errorf("delete disk: %v", err)
		}
		delete(h.keys, k)
	}
}

// Litter implements drivertest.Litterer: a folder without a record, with what a start leaves.
func (h *host) Litter(t testing.TB, _ driver.Tier, id ids.SandboxID) bool {
	t.Helper()
	dir := filepath.Join(h.cfg.State, "sandboxes", string(id))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := makePipes(dir); err != nil {
		t.Fatal(err)
	}
	return true
}

// Left implements drivertest.Host.
func (h *host) Left(t testing.TB) []string {
	t.Helper()
	var out []string
	entries, _ := os.ReadDir(filepath.Join(h.cfg.State, "sandboxes"))
	for _, e := range entries {
		out = append(out, "folder "+e.Name())
	}
	tree, err := cgroup.Detect()
	if err != nil {
		t.Error(err)
	}
	for _, c := range tree.Children(h.cfg.Cgroup) {
		out = append(out, "cgroup "+c)
	}
	claims, _ := filepath.Glob(filepath.Join(h.cfg.IDs, "*"))
	for _, c := range claims {
		if b, err := os.ReadFile(c); err == nil && string(b) == "wasm-"+h.cfg.Cgroup {
			out = append(out, "ids "+filepath.Base(c))
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		b, _ := os.ReadFile(p)
		args := strings.Split(string(b), "\x00")
		if strings.HasPrefix(args[0], "berth-wasm-") && isChild(p) {
			out = append(out, "process "+strings.Join(args, " "))
		}
	}
	return out
}

// isChild reports whether the process of a /proc/<pid>/cmdline is a child of this one.
func isChild(cmdline string) bool {
	b, _ := os.ReadFile(filepath.Join(filepath.Dir(cmdline), "status"))
	return bytes.Contains(b, fmt.Appendf(nil, "\nPPid:\t%d\n", os.Getpid()))
}

var errFault = errors.New("fault of the test")

// Crash implements drivertest.Host.
func (h *host) Crash(d driver.Driver, _ driver.Tier, n int, hard bool) bool {
	return breakAt(d, points, n, hard)
}

// Break implements drivertest.Breaker.
func (h *host) Break(d driver.Driver, _ driver.Tier, n int, hard bool) bool {
	return breakAt(d, warmPoints, n, hard)
}

// Detach implements drivertest.Detacher.
func (h *host) Detach(_ testing.TB, spec driver.Spec) error {
	return h.disks.Detach(context.Background(), disk.Key{Session: spec.Session, Generation: spec.Generation})
}

func breakAt(d driver.Driver, points []string, n int, hard bool) bool {
	if n >= len(points) {
		return false
	}
	r := &d.(*Driver).run
	r.Fault, r.Crash = nil, hard
	if n >= 0 {
		r.Fault = func(name string) error {
			if slices.Index(points, name) == n {
				return errFault
			}
			return nil
		}
	}
	return true
}

func TestConformance(t *testing.T) {
	drivertest.Run(t, newHost(t, false))
}

// TestConformanceOfClaimed: what was prepared for nobody is as good as what was made for its session.
func TestConformanceOfClaimed(t *testing.T) {
	drivertest.RunShared(t, drivertest.Claimed(newHost(t, false)))
}
