package containerd

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// openDriver opens a driver that stops everything at the end of the test.
func openDriver(t testing.TB, h *host) *Driver {
	t.Helper()
	d := h.Open(t).(*Driver)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		found, err := d.List(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, f := range found {
			if err := d.Stop(ctx, f.ID); err != nil {
				t.Error(err)
			}
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func start(t testing.TB, d *Driver, spec driver.Spec, tier driver.Tier) (driver.Sandbox, *drivertest.Talk) {
	t.Helper()
	spec.Tier = tier
	sb, err := d.Create(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	k, err := drivertest.Open(sb.Channel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Close)
	if _, err := k.Do("echo", "hello"); err != nil {
		t.Fatal(err)
	}
	return sb, k
}

// A session falls asleep while another one, whose sandbox began while the first one's disk was
// mounted, stays awake: nothing of the second may hold the first one's disk.
func TestFaultANeighbourHoldsNoDisk(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	ctx := context.Background()
	for i, tier := range h.cfg.Tiers {
		one := h.Spec(t, 10*i+1, 1)
		two := h.Spec(t, 10*i+2, 1)
		a, _ := start(t, d, one, tier)
		_, k := start(t, d, two, tier)
		other := exec.Command("sleep", "1000") // with a private copy of the mount table
		other.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = other.Process.Kill(); _ = other.Wait() }()
		if err := d.Stop(ctx, a.ID); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, _, err := h.disks.SealShot(ctx, disk.Key{Session: one.Session, Generation: one.Generation}, ids.Epoch{Incarnation: 1, Index: 1}); err != nil {
			t.Errorf("%s: %v", tier, err)
		}
		t.Logf("%s: sealed in %s", tier, time.Since(began))
		if _, err := k.Do("echo", "awake"); err != nil {
			t.Error(err)
		}
	}
}

// containerd is killed again and again: sandboxes go on, calls wait, and ends are still told.
func TestFaultContainerdIsKilled(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	events, err := d.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for i, tier := range h.cfg.Tiers {
		sb, k := start(t, d, h.Spec(t, 10*i+1, 1), tier)
		for range 3 {
			killContainerd(t, h)
			if _, err := k.Do("echo", "still here"); err != nil {
				t.Fatal(err)
			}
			found, err := d.List(ctx)
			if err != nil || len(found) == 0 || found[0].State != driver.Running {
				t.Fatalf("%s: list: %+v, %v", tier, found, err)
			}
		}
		_, k2 := start(t, d, h.Spec(t, 10*i+2, 1), tier)
		killContainerd(t, h)
		if err := k2.Raw(`{"op":"exit","args":["7"]}` + "\n"); err != nil {
			t.Fatal(err)
		}
		for told := false; !told; {
			select {
			case e := <-events:
				t.Logf("%s: %+v", tier, e)
				told = e.Kind == driver.EventExited && (e.ExitStatus == 7 || e.ExitStatus == statusGone) // never another
			case <-ctx.Done():
				t.Fatalf("%s: the exit was not told", tier)
			}
		}
		killContainerd(t, h)
		if err := d.Stop(ctx, sb.ID); err != nil {
			t.Errorf("%s: stop: %v", tier, err)
		}
	}
}

func killContainerd(t *testing.T, h *host) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(h.cfg.State, "containerd", "containerd.pid"))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(string(b))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
		t.Fatal(err)
	}
}

// A process, a shim or everything of a sandbox is killed by hand: it is told, and the same wake
// works again.
func TestFaultComputeIsRemovedFromOutside(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	events, err := d.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for i, tier := range h.cfg.Tiers {
		for n, victims := range []func(driver.Sandbox) []int{
			func(sb driver.Sandbox) []int { return []int{sb.PID} },
			func(sb driver.Sandbox) []int { return naming(string(sb.ID)) },
		} {
			spec := h.Spec(t, 10*i+n+1, 1)
			sb, _ := start(t, d, spec, tier)
			for _, pid := range victims(sb) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			began := time.Now()
			for told := false; !told; {
				select {
				case e := <-events:
					told = e.Kind == driver.EventExited && e.ID == sb.ID
				case <-ctx.Done():
					t.Fatalf("%s, kind %d: not told", tier, n)
				}
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("%s, kind %d: told after %s", tier, n, took)
			}
			again, k := start(t, d, spec, tier)
			if again.ID != sb.ID {
				t.Errorf("another sandbox: %+v", again)
			}
			k.Close()
		}
	}
}

// naming lists the processes whose command line has the word.
func naming(word string) []int {
	var out []int
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f))); err == nil && pid != os.Getpid() && strings.Contains(string(b), word) {
			out = append(out, pid)
		}
	}
	return out
}

// A shim that containerd has forgotten, as it does when whoever asked for a task ended before the task
// was made, goes with its sandbox; a shim of another sandbox, or of another containerd, stays.
func TestFaultAForgottenShimIsEnded(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	id, other := h.Spec(t, 1, 1).ID(), h.Spec(t, 2, 1).ID()
	shim := func(id ids.SandboxID, socket string) *exec.Cmd {
		t.Helper()
		cmd := exec.Command("sh", "-c", `trap "" TERM; while :; do sleep 0.1; done`)
		cmd.Args = append([]string{"containerd-shim-berthrunc-v1"}, append(cmd.Args[1:], "sh", "-namespace", namespace, "-id", string(id), "-address", socket)...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	lost, neighbour, foreign := shim(id, d.ctrd.socket), shim(other, d.ctrd.socket), shim(id, "/run/containerd/containerd.sock")
	if err := d.Stop(context.Background(), id); err != nil {
		t.Fatal(err)
	}
	if err := lost.Wait(); err == nil || lost.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("the forgotten shim ended with %v", err)
	}
	for _, cmd := range []*exec.Cmd{neighbour, foreign} {
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("%v was ended: %v", cmd.Args[len(cmd.Args)-4:], err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}
