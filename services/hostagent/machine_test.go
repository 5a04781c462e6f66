package hostagent

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// machines is a driver whose sandboxes write the image of their disk themselves: this kernel stands for
// theirs, through a mount of its own. A pause freezes that.
type machines struct {
	*procs
	mu     sync.Mutex
	points map[ids.SandboxID]string
	images map[ids.SandboxID]string
	specs  []driver.Spec
	calls  []string
}

func newMachines(t *testing.T) *machines {
	if err := disk.Preflight(t.TempDir(), 0); err != nil {
		t.Skipf("skipped: disks need root and loop devices: %v", err)
	}
	m := &machines{procs: newProcs(t), points: map[ids.SandboxID]string{}, images: map[ids.SandboxID]string{}}
	m.caps = map[driver.Tier]driver.Capabilities{
		driver.Null:    {Native: true, Adopts: true, Holds: true},
		driver.MicroVM: {Native: true, Adopts: true, Holds: true, RawDisk: true, OwnKernel: true},
	}
	m.env = func(s driver.Spec) []string {
		if p := m.point(s.ID()); p != "" {
			return []string{"BERTH_TEST_UPPER=" + filepath.Join(p, disk.Upper)}
		}
		return nil
	}
	t.Cleanup(func() {
		for _, id := range slices.Collect(maps.Keys(m.points)) {
			if err := m.Stop(context.Background(), id); err != nil {
				t.Error(err)
			}
		}
	})
	return m
}

func (m *machines) point(id ids.SandboxID) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.points[id]
}

func (m *machines) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	m.mu.Lock()
	m.specs = append(m.specs, spec)
	m.mu.Unlock()
	if spec.Tier == driver.MicroVM && m.point(spec.ID()) == "" {
		dev, err := loopdev.Attach(spec.DiskImage, false)
		if err != nil {
			return driver.Sandbox{}, err
		}
		defer func() { _ = dev.Close() }()
		point := m.t.TempDir()
		if err := unix.Mount(dev.Name(), point, "ext4", 0, "noinit_itable,discard"); err != nil {
			return driver.Sandbox{}, err
		}
		m.mu.Lock()
		m.points[spec.ID()], m.images[spec.ID()] = point, spec.DiskImage
		m.mu.Unlock()
	}
	return m.procs.Create(ctx, spec)
}

func (m *machines) Stop(ctx context.Context, id ids.SandboxID) error {
	if err := m.procs.Stop(ctx, id); err != nil {
		return err
	}
	point := m.point(id)
	if point == "" {
		return nil
	}
	_ = m.ioctl(point, 0xc0045878)
	if err := unix.Unmount(point, 0); err != nil {
		return errs.E("stop sandbox", errkind.Busy, string(id), err)
	}
	m.mu.Lock()
	image := m.images[id]
	delete(m.points, id)
	m.mu.Unlock()
	if loopdev.WaitFree(image, time.Second) != nil { // another process copied the mount table meanwhile
		mounts.Reclaim(point)
	}
	return nil
}

func (m *machines) ioctl(point string, request uint) error {
	d, err := os.Open(point)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return unix.IoctlSetInt(int(d.Fd()), request, 0)
}

func (m *machines) pause(what string, id ids.SandboxID, request uint) error {
	m.mu.Lock()
	m.calls = append(m.calls, what)
	m.mu.Unlock()
	if err := m.ioctl(m.point(id), request); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}

func (m *machines) Freeze(_ context.Context, id ids.SandboxID) error {
	return m.pause("freeze", id, 0xc0045877)
}

func (m *machines) Thaw(_ context.Context, id ids.SandboxID) error {
	return m.pause("thaw", id, 0xc0045878)
}

func (m *machines) ResizeDisk(_ context.Context, id ids.SandboxID, _ uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls = append(m.calls, "resize")
	return nil
}

func (m *machines) take() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.calls
	m.calls = nil
	return out
}

// machineRig is a hostagent with machines, real disks and a store.
func machineRig(t *testing.T) (*rig, *machines) {
	m := newMachines(t)
	r := newRig(t, m)
	r.disks = nil
	pool, store := t.TempDir(), t.TempDir()
	r.cfg.Disk.Store = "file://" + store
	r.tune = func(h *host) {
		s, err := disk.Open(context.Background(), disk.Config{Dir: pool, Log: h.log})
		if err != nil {
			t.Fatal(err)
		}
		h.disks = s
		h.tiers.offer([]driver.Tier{driver.Null, driver.MicroVM}, nil)
		if err := h.openSaves(context.Background(), s); err != nil {
			t.Fatal(err)
		}
	}
	return r, m
}

func inMachine(fresh bool, last *corev1.SessionRef, head string) func(*hostv1.WakeRequest) {
	return func(w *hostv1.WakeRequest) {
		w.Terms.Tier, w.Terms.Limits.DiskBytes = corev1.Tier_TIER_MICROVM, 64<<20
		w.Fresh, w.ImageDigest, w.Manifest, w.VmWritten = fresh, "sha256:x", head, !fresh
		w.LastActiveEpoch = last.GetEpoch()
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestADiskOfAMachineThroughItsLife: from the first wake over snapshots, an export, a restart of the
// host, sleeps, a wake in a weaker tier and the loss of the host's image, nothing of the host mounts what
// a machine wrote, and every word of it says so.
func TestADiskOfAMachineThroughItsLife(t *testing.T) {
	r, m := machineRig(t)
	r.start()
	one := ref("vm", 1, 1)
	r.mustWake(one, inMachine(true, nil, ""))
	k := disk.Key{Session: key("vm"), Generation: grant.GenerationOf(one.GetGeneration())}
	spec := m.specs[0]
	upper := filepath.Join(m.point(spec.ID()), disk.Upper)
	if spec.Disk != "" || spec.DiskImage == "" {
		t.Fatalf("the driver got disk %q, image %q", spec.Disk, spec.DiskImage)
	}
	if rec, err := r.run.h.disks.Get(k); err != nil || !rec.VMWritten || !rec.Raw {
		t.Fatalf("got %+v, %v", rec, err)
	}
	write(t, filepath.Join(upper, "f"), "one")
	r.client(one).exec("x1", "true")
	m.take()
	if saved, err := r.gate(one).Checkpoint(t.Context()); err != nil || !saved.GetVmWritten() || !saved.GetCrashConsistent() {
		t.Fatalf("%+v, %v", saved, err)
	}
	if calls := m.take(); !slices.Equal(calls, []string{"freeze", "thaw"}) {
		t.Errorf("a snapshot of a guest that cannot freeze its file system: %v", calls)
	}
	exported(t, r.gate(one))

	r.halt()
	r.start()
	if calls := m.take(); !slices.Equal(calls, []string{"thaw"}) {
		t.Errorf("a machine that may be paused was adopted with %v", calls)
	}
	write(t, filepath.Join(upper, "f"), "two")
	reply, err := r.sleep(one, time.Time{}, true)
	if err != nil || !reply.GetManifest().GetVmWritten() || reply.GetManifest().GetCrashConsistent() {
		t.Fatalf("%+v, %v", reply, err)
	}
	head := reply.GetManifest().GetId()
	if rec, err := r.run.h.disks.Get(k); err != nil || rec.Raw || rec.State != disk.Clean {
		t.Fatalf("got %+v, %v", rec, err)
	}

	weak := ref("vm", 1, 2)
	_, err = r.wake(weak, func(w *hostv1.WakeRequest) {
		w.Fresh, w.ImageDigest, w.Manifest, w.LastActiveEpoch = false, "sha256:x", head, one.GetEpoch()
	})
	if !errs.Is(err, errkind.Refused) || !strings.Contains(err.Error(), errkind.VMWritten) {
		t.Fatalf("a weaker tier: %v", err)
	}

	three := ref("vm", 1, 3)
	r.mustWake(three, inMachine(false, one, head))
	if text, err := os.ReadFile(filepath.Join(m.point(driver.ID(k.Session, k.Generation, grant.EpochOf(three.GetEpoch()))), disk.Upper, "f")); err != nil || string(text) != "two" {
		t.Errorf("got %q, %v", text, err)
	}
	reply, err = r.sleep(three, time.Time{}, true)
	if err != nil {
		t.Fatal(err)
	}
	head = reply.GetManifest().GetId()
	if err := r.run.h.disks.(*disk.Store).Evict(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	four := ref("vm", 1, 4)
	r.mustWake(four, inMachine(false, three, head))
	if rec, err := r.run.h.disks.Get(k); err != nil || !rec.VMWritten || !rec.Raw {
		t.Errorf("from the store: %+v, %v", rec, err)
	}
	if err := r.delete(four); err != nil {
		t.Fatal(err)
	}
}

// exported reads an export, which the guest makes.
func exported(t *testing.T, g *gate) {
	t.Helper()
	var b bytes.Buffer
	if st, err := g.Export(t.Context(), &b); err != nil || st.Bytes != uint64(b.Len()) {
		t.Fatalf("%+v, %v", st, err)
	}
	names := map[string]string{}
	for a := tar.NewReader(&b); ; {
		h, err := a.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(a)
		names[h.Name] = string(text)
	}
	if names["f"] != "one" {
		t.Errorf("the export holds %v", names)
	}
}

// TestAMachineThatIsKilledIsSealedAsItWas: the snapshot of its sleep says so, and its next kernel finds
// what was on the disk.
func TestAMachineThatIsKilledIsSealedAsItWas(t *testing.T) {
	r, m := machineRig(t)
	r.start()
	one := ref("vm", 1, 1)
	r.mustWake(one, inMachine(true, nil, ""))
	id := m.specs[0].ID()
	write(t, filepath.Join(m.point(id), disk.Upper, "f"), "one")
	r.client(one).exec("x1", "true")
	m.murder(id)
	eventually(t, 10*time.Second, "the host says that the machine is gone", func() bool { return r.sched.reported() > 0 })
	r.sched.set(one, corev1.State_STATE_SLEEPING)
	reply, err := r.sleep(one, time.Time{}, true)
	if err != nil || !reply.GetManifest().GetVmWritten() || !reply.GetManifest().GetCrashConsistent() {
		t.Fatalf("%+v, %v", reply, err)
	}
	if err := r.delete(one); err != nil {
		t.Fatal(err)
	}
}

// TestAGrownDiskReachesTheMachine, and it is the guest who says how full it is.
func TestAGrownDiskReachesTheMachine(t *testing.T) {
	r, m := machineRig(t)
	r.start()
	one := ref("vm", 1, 1)
	r.mustWake(one, inMachine(true, nil, ""))
	m.take()
	h := r.run.h
	s := h.session(key("vm"))
	s.mu.Lock()
	rec, sb := s.rec, s.sb
	s.mu.Unlock()
	if u, err := h.usage(t.Context(), rec, sb); err != nil || u.Size == 0 || u.Size > 64<<20 {
		t.Errorf("usage %+v, %v", u, err)
	}
	reply, err := h.rpcGrow(t.Context(), bus.Request{}, &hostv1.GrowRequest{Session: one, SizeBytes: 96 << 20})
	if err != nil || reply.GetSizeBytes() != 96<<20 || !slices.Equal(m.take(), []string{"resize"}) {
		t.Errorf("%+v, %v", reply, err)
	}
	if st, err := os.Stat(m.specs[0].DiskImage); err != nil || st.Size() != 96<<20 {
		t.Errorf("%v, %v", st, err)
	}
	if err := r.delete(one); err != nil {
		t.Fatal(err)
	}
}
