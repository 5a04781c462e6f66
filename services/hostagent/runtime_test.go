package hostagent

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/diskpool"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// realRig is a rig on the containerd driver with real disks and a busybox image, or a skip that
// says what is missing.
func realRig(t *testing.T) *rig {
	t.Helper()
	cache := os.Getenv("BERTH_CACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			t.Skipf("skipped: no cache folder: %v", err)
		}
		cache = filepath.Join(dir, "berth")
	}
	images, _ := filepath.Glob(filepath.Join(cache, "images", "busybox-*"))
	if len(images) == 0 {
		t.Skip("skipped: no busybox image in the cache (tools/image makes it)")
	}
	r := newRig(t, nil, subjects.Gate(testHost))
	r.load = loadLayout
	r.cfg.Driver, r.cfg.Tiers = "", []string{"container", "gvisor"}
	r.cfg.Images = map[string]string{"default": images[len(images)-1]}
	if r.cfg.Runtimes = os.Getenv("BERTH_RUNTIMES"); r.cfg.Runtimes == "" {
		r.cfg.Runtimes = filepath.Join(cache, "runtimes", "current", "bin")
	}
	r.cfg.Disk.Reserve, r.cfg.Disk.Ready = 0, 1
	r.cfg.Hello = 20 * time.Second
	if err := r.cfg.preflight(); err != nil {
		t.Skipf("skipped: %v", err)
	}
	if err := disk.Preflight(r.cfg.Dir, 0); err != nil {
		t.Skipf("skipped: %v", err)
	}
	t.Cleanup(func() { clearHost(t, r) })
	r.cfg.Guest = filepath.Join(t.TempDir(), "berth-guest")
	cmd := exec.Command("go", "build", "-o", r.cfg.Guest, "github.com/berth-dev/berth/services/hostagent/guest/cmd/berth-guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the guest: %v: %s", err, b)
	}
	return r
}

func loadLayout(_ context.Context, ref string) (v1.Image, error) {
	index, err := layout.ImageIndexFromPath(ref)
	if err != nil {
		return nil, err
	}
	m, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	return index.Image(m.Manifests[0].Digest)
}

func tierTerms(tier corev1.Tier) func(*hostv1.WakeRequest) {
	return func(w *hostv1.WakeRequest) {
		w.Terms.Tier = tier
		w.Terms.Limits = &corev1.Limits{CpuMillis: 1000, MemoryBytes: 512 << 20, Pids: 512, DiskBytes: 128 << 20}
	}
}

// TestRealSandboxes: the whole life of a session in each tier, with a restart in the middle.
func TestRealSandboxes(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	for _, tier := range []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR} {
		t.Run(tierName(tier), func(t *testing.T) {
			r := realRig(t)
			r.start()
			if !r.run.h.offers(tier) {
				t.Skipf("skipped: this host has no tier %s: %v", tierName(tier), lacking(r.run.h.caps))
			}
			lifeOf(t, r, tier)
		})
	}
}

func lifeOf(t *testing.T, r *rig, tier corev1.Tier) {
	one := ref("ann", 5, 6)
	began := time.Now()
	reply := r.mustWake(one, tierTerms(tier))
	t.Logf("cold wake %s", time.Since(began))
	for _, s := range reply.GetTiming().GetSteps() {
		t.Logf("  %-40s %8.2f ms", s.GetName(), float64(s.GetTook().AsDuration().Microseconds())/1000)
	}
	if !strings.HasPrefix(reply.GetImageDigest(), "sha256:") {
		t.Errorf("image %q", reply.GetImageDigest())
	}
	c := r.client(one)
	if o := c.exec("x1", "sh", "-c", "cat /run/berth/session.json"); !strings.Contains(string(o.stdout), `"tier": "`+tierName(tier)+`"`) {
		t.Errorf("session.json: %q %q", o.stdout, o.stderr)
	}
	if _, err := c.upload("/root/keep", []byte("mine")); err != nil {
		t.Fatal(err)
	}
	cp := c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Checkpoint{Checkpoint: &boxv1.Checkpoint{}}})
	if m := cp.reply.GetResult().GetManifest(); m.GetId() == "" || r.sched.head(one) != m.GetId() {
		t.Errorf("checkpoint %v", m)
	}
	timeExecs(t, r, c)
	st := c.mustOpen(execOp("long", "sh", "-c", "echo before; sleep 4; echo after"))
	if f, err := st.recv(10 * time.Second); err != nil || string(f.GetData().GetData()) != "before\n" {
		t.Fatalf("%v %v", f, err)
	}
	r.halt()
	r.start()
	if o, err := c.mustOpen(attachOp("long", 7)).drain(); err != nil || string(o.stdout) != "after\n" || r.sched.reported() != 0 {
		t.Errorf("after the restart: %q %v, %d reports", o.stdout, err, r.sched.reported())
	}
	began = time.Now()
	r.sleepWhenIdle(one)
	t.Logf("sleep %s", time.Since(began))
	if found, err := r.run.h.drv.List(r.context()); err != nil || len(found) != 0 {
		t.Errorf("left: %v %v", found, err)
	}
	two := ref("ann", 5, 9)
	again := resume(r, one)
	began = time.Now()
	r.mustWake(two, func(w *hostv1.WakeRequest) { tierTerms(tier)(w); again(w); w.ImageDigest = reply.GetImageDigest() })
	t.Logf("resume %s", time.Since(began))
	c = r.client(two)
	if got, err := c.download("/root/keep"); err != nil || string(got) != "mine" {
		t.Errorf("the file is %q, %v", got, err)
	}
	killedFromOutside(t, r, two, tier)
	must(t, r.delete(two))
	inv, err := r.run.h.disks.List()
	if err != nil || len(inv.Disks) != 0 || len(inv.Strays) != 0 {
		t.Errorf("after the delete: %+v %v", inv, err)
	}
	left, _ := os.ReadDir(filepath.Join(r.cfg.Dir, "run"))
	if len(left) != 0 {
		t.Errorf("%d run folders are left", len(left))
	}
}

func timeExecs(t *testing.T, r *rig, c *client) {
	times := make([]time.Duration, 100)
	for i := range times {
		start := time.Now()
		c.exec(fmt.Sprintf("t%d", i), "/bin/true")
		times[i] = time.Since(start)
	}
	s := r.run.h.session(key("ann"))
	direct := make([]time.Duration, 100)
	for i := range direct {
		direct[i] = timeDirect(t, s, fmt.Sprintf("d%d", i))
	}
	t.Logf("exec of true p50: %s through the bus, %s at the guest alone", median(times), median(direct))
}

// killedFromOutside kills the sandbox's first process and wakes it again with its newest files.
func killedFromOutside(t *testing.T, r *rig, two *corev1.SessionRef, tier corev1.Tier) {
	c := r.client(two)
	if _, err := c.upload("/root/newest", []byte("after the sleep")); err != nil {
		t.Fatal(err)
	}
	s := r.run.h.session(key("ann"))
	s.mu.Lock()
	pid := s.sb.PID
	s.mu.Unlock()
	if pid == 0 {
		t.Logf("skipped: the driver tells no pid")
		return
	}
	began := time.Now()
	p, err := os.FindProcess(pid)
	must(t, err)
	must(t, p.Kill())
	eventually(t, 5*time.Second, "the loss is reported", func() bool { return r.sched.reported() > 0 })
	t.Logf("a kill from outside was reported after %s", time.Since(began))
	three := ref("ann", 5, 12)
	again := resume(r, two)
	r.mustWake(three, func(w *hostv1.WakeRequest) { tierTerms(tier)(w); again(w) })
	if got, err := r.client(three).download("/root/newest"); err != nil || string(got) != "after the sleep" {
		t.Errorf("the newest file is %q, %v", got, err)
	}
	if _, err := r.wake(two, tierTerms(tier)); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("the old epoch: %v", err)
	}

}

// clearHost takes away what a failed test left running.
func clearHost(t *testing.T, r *rig) {
	r.halt()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute) // it starts a containerd and maybe a machine
	defer cancel()
	d, _, err := openDrivers(ctx, r.cfg, r.cfg.sandboxes(testLog()), nil)
	if err != nil {
		t.Errorf("clear the host: %v", err)
		return
	}
	found, err := d.List(ctx)
	for _, f := range found {
		t.Errorf("sandbox %s was left running", f.ID)
		if err := d.Stop(ctx, f.ID); err != nil {
			t.Errorf("stop %s: %v", f.ID, err)
		}
	}
	if err = errsJoin(err, d.Close()); err != nil {
		t.Errorf("clear the host: %v", err)
	}
	clearNetwork(t, r)
	pool, err := diskpool.Open(ctx, r.cfg.pool(nil))
	if err != nil {
		t.Errorf("clear the disks: %v", err)
		return
	}
	store, err := disk.Open(ctx, disk.Config{Dir: filepath.Join(r.cfg.Dir, "disks"), Reflink: pool.Reflink()})
	if err == nil {
		_, err = store.Sweep(ctx, func(disk.Disk) disk.Verdict { return disk.Remove })
		err = errsJoin(err, store.Close())
	}
	err = errsJoin(err, pool.Close())
	if err != nil {
		t.Errorf("clear the disks: %v", err)
	}
}

// clearNetwork removes the router of a host that has ended, if it is there.
func clearNetwork(t *testing.T, r *rig) {
	r.halt()
	l, err := network.Open(context.Background(), network.Config{Dir: filepath.Join(r.cfg.Dir, "net"), Log: testLog()})
	if err == nil {
		err = l.Destroy(context.Background())
	}
	if err != nil {
		t.Errorf("clear the network: %v", err)
	}
}
