package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/berth-dev/berth/internal/testsize"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// runtimes returns the folder that tools/runtimes filled, or skips.
func runtimes(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("BERTH_RUNTIMES")
	if dir == "" {
		root := os.Getenv("BERTH_CACHE")
		if root == "" {
			cache, err := os.UserCacheDir()
			if err != nil {
				t.Skipf("skipped: no cache folder: %v", err)
			}
			root = filepath.Join(cache, "berth")
		}
		dir = filepath.Join(root, "runtimes", "current", "bin")
	}
	if err := Preflight(NewConfig(t.TempDir(), dir)); err != nil {
		t.Skipf("skipped: %v", err)
	}
	return dir
}

// host is a drivertest.Host on this machine.
type host struct {
	dir   string
	cfg   Config
	disks *disk.Store
	probe string
	lower string
	mu    sync.Mutex
	keys  map[disk.Key]string // the test that each belongs to
}

var (
	_ drivertest.Host     = (*host)(nil)
	_ drivertest.Litterer = (*host)(nil)
	_ drivertest.Releaser = (*host)(nil)
	_ drivertest.Breaker  = (*host)(nil)
	_ drivertest.Detacher = (*host)(nil)
)

func newHost(t testing.TB) *host {
	t.Helper()
	h := &host{dir: t.TempDir(), keys: map[disk.Key]string{}}
	h.cfg = NewConfig(filepath.Join(h.dir, "state"), runtimes(t))
	h.cfg.Run = "/run/berth/test-" + h.cfg.Cgroup[len("berth-"):]
	if err := disk.Preflight(h.dir, 0); err != nil {
		t.Skipf("skipped: %v", err)
	}
	var err error
	if h.disks, err = disk.Open(context.Background(), disk.Config{
		Dir: filepath.Join(h.dir, "disks"), Blanks: disk.Blanks{Sizes: []uint64{64 << 20}, Ready: 2},
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.close(t) })
	h.probe = buildProbe(t, h.dir)
	h.lower = testImage(t, h.dir)
	if err := os.Chmod(h.dir, 0o700); err != nil { // state may lie where only root may go
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

func buildProbe(t testing.TB, dir string) string {
	t.Helper()
	out := filepath.Join(dir, "probe")
	cmd := exec.Command("go", "build", "-o", out, "github.com/berth-dev/berth/services/hostagent/driver/drivertest/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build probe: %v: %s", err, b)
	}
	return out
}

func testImage(t testing.TB, dir string) string {
	t.Helper()
	lower := filepath.Join(dir, "image")
	for _, d := range []string{"proc", "sys", "dev", "run", "tmp", "etc", "var", "usr", "opt/folder", "mnt"} {
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
	h.keys[k] = t.Name()
	h.mu.Unlock()
	run := filepath.Join(h.dir, "run", k.String())
	if err := os.MkdirAll(run, 0o755); err != nil {
		t.Fatal(err)
	}
	return driver.Spec{
		Session: k.Session, Generation: k.Generation, Epoch: ids.Epoch{Incarnation: 1, Index: epoch},
		Image: driver.Image{Digest: "sha256:test", Lower: h.lower}, Disk: a.Root, RunDir: run, Guest: h.probe,
		Hostname: fmt.Sprintf("box-%d", session),
		Limits:   driver.Limits{CPUMillis: 1000, MemoryBytes: 256 << 20, PIDs: 64},
	}
}

// Left implements drivertest.Host.
func (h *host) Left(t testing.TB) []string {
	t.Helper()
	var out []string
	entries, _ := os.ReadDir(filepath.Join(h.cfg.State, "sandboxes"))
	for _, e := range entries {
		out = append(out, "folder "+e.Name())
	}
	points, err := mounts.Below(h.cfg.Run)
	if err != nil {
		t.Error(err)
	}
	for _, p := range points {
		if filepath.Base(p) != "roots" {
			out = append(out, "mount "+p)
		}
	}
	sockets, _ := filepath.Glob(filepath.Join(h.cfg.Run, "s", "*"))
	for _, p := range sockets {
		out = append(out, "socket "+p)
	}
	tree, err := cgroup.Detect()
	if err != nil {
		t.Error(err)
	}
	for _, c := range tree.Children(h.cfg.Cgroup) {
		out = append(out, "cgroup "+c)
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		b, _ := os.ReadFile(p)
		args := bytes.Split(b, []byte{0})
		mine := bytes.Contains(b, []byte(h.cfg.Run+"/")) || bytes.Contains(b, []byte(h.cfg.State+"/")) || string(args[0]) == "berth-idroot" && isChild(p)
		if mine && filepath.Base(string(args[0])) != "containerd" {
			out = append(out, "process "+strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return out
}

// isChild reports whether the process of a /proc/<pid>/cmdline is a child of this one.
func isChild(cmdline string) bool {
	b, _ := os.ReadFile(filepath.Join(filepath.Dir(cmdline), "status"))
	return bytes.Contains(b, fmt.Appendf(nil, "\nPPid:\t%d\n", os.Getpid()))
}

func (h *host) deleteDisk(k disk.Key) error {
	return drivertest.WhileBusy(func() error { return h.disks.Delete(context.Background(), k) })
}

// Release implements drivertest.Releaser.
func (h *host) Release(t testing.TB) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	for k, name := range h.keys {
		if name != t.Name() {
			continue
		}
		if err := h.deleteDisk(k); err != nil {
			t.Errorf("delete disk: %v", err)
			continue
		}
		delete(h.keys, k)
	}
}

// Litter implements drivertest.Litterer.
func (h *host) Litter(t testing.TB, _ driver.Tier, id ids.SandboxID) bool {
	t.Helper()
	tree, err := cgroup.Detect()
	if err == nil {
		err = tree.Create(filepath.Join(h.cfg.Cgroup, string(id)), cgroup.Limits{CPUMillis: 100, MemoryBytes: 64 << 20, PIDs: 16})
	}
	if err == nil {
		err = os.Mkdir(filepath.Join(h.cfg.State, "sandboxes", string(id)), 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	return true
}

var errFault = errors.New("fault of the test")

// points of a Create in a tier.
func points(tier driver.Tier) []string {
	all := []string{"sandbox.record", "sandbox.container", "sandbox.root", "sandbox.cgroup", "sandbox.create", "sandbox.start"}
	if tier == driver.Container {
		all = append(all, "sandbox.userns")
	}
	return all
}

// Crash implements drivertest.Host.
func (h *host) Crash(d driver.Driver, tier driver.Tier, n int, hard bool) bool {
	return breakAt(d, points(tier), n, hard)
}

// Break implements drivertest.Breaker.
func (h *host) Break(d driver.Driver, tier driver.Tier, n int, hard bool) bool {
	all := append(points(tier), "sandbox.hold", "claim.record", "claim.limits")
	for _, s := range warmTiers[tier].bind(&claiming{}) {
		all = append(all, s.Name)
	}
	return breakAt(d, append(all, "claim.bound"), n, hard)
}

func breakAt(d driver.Driver, points []string, n int, hard bool) bool {
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

// Detach implements drivertest.Detacher.
func (h *host) Detach(t testing.TB, spec driver.Spec) error {
	t.Helper()
	return h.disks.Detach(context.Background(), disk.Key{Session: spec.Session, Generation: spec.Generation})
}

func TestConformance(t *testing.T) {
	drivertest.Run(t, newHost(t))
}

// Sandboxes that were prepared and claimed are held to all that others are held to: to the walls in each run, and
// to the rest in a run at full size.
func TestConformanceOfClaimedSandboxes(t *testing.T) {
	run := drivertest.Run
	if !testsize.Long() {
		run = drivertest.RunShared
	}
	run(t, drivertest.Claimed(newHost(t)))
}
