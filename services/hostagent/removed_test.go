package hostagent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/internal/diskpool"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
)

// deny has scheduler refuse this host from now on.
func (f *fakeScheduler) deny(why string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.denied, f.unknown = why, true
}

func (f *fakeScheduler) joined() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.joins
}

const removedWord = "host h1 was removed from the cell; it may join under another id"

// ended checks what a removed host leaves and says.
func (r *rig) ended(drv *procs, err error) {
	r.t.Helper()
	if !errs.Is(err, errkind.Denied) || !strings.Contains(err.Error(), "host h1 was removed from the cell") ||
		!strings.Contains(err.Error(), "nothing of it runs here any more") {
		r.t.Errorf("it ended with %v", err)
	}
	if n := drv.count(); n != 0 {
		r.t.Errorf("%d sandboxes are left", n)
	}
}

// TestAHostThatIsRemovedWhileItRunsLeavesNothingRunning.
func TestAHostThatIsRemovedWhileItRunsLeavesNothingRunning(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	r.mustWake(ref("ann", 5, 6), nil)
	r.mustWake(ref("bob", 7, 8), nil)
	r.sched.deny(removedWord)
	select {
	case err := <-r.run.done:
		r.ended(drv, err)
	case <-time.After(30 * time.Second):
		t.Fatal("it runs on")
	}
	r.run.stop()
	r.run.conn.Close()
	r.run = nil
}

// TestAHostThatWasRemovedStartsAgainToEnd: what an earlier process left is ended too.
func TestAHostThatWasRemovedStartsAgainToEnd(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	r.mustWake(ref("ann", 5, 6), nil)
	r.halt()
	if drv.count() != 1 {
		t.Fatal("the sandbox did not stay")
	}
	r.sched.deny(removedWord)
	conn := bustest.Connect(t, r.bus, subjects.Host(testHost))
	h, err := open(t.Context(), r.cfg, conn, r.load, testLog())
	must(t, err)
	h.drv, h.caps, h.bare, h.disks, h.saves = drv, drv.Capabilities(), false, r.disks, nullSaves{r.disks.(*nullDisks), h}
	r.ended(drv, errsJoin(h.run(t.Context(), nil), h.close()))
}

// TestAnotherRefusalIsNoRemoval: a host whose login is not its own, or that reads of another, ends nothing.
func TestAnotherRefusalIsNoRemoval(t *testing.T) {
	for _, why := range []string{"host h2 may not speak for host h1", "host h11 was removed from the cell", "svc-x may not publish to join"} {
		drv := newProcs(t)
		r := newRig(t, drv)
		r.start()
		r.mustWake(ref("ann", 5, 6), nil)
		before := r.sched.joined()
		r.sched.deny(why)
		eventually(t, 20*time.Second, "it asked again", func() bool { return r.sched.joined() >= before+2 })
		select {
		case <-r.run.h.removed:
			t.Errorf("%q was taken for a removal", why)
		default:
		}
		if drv.count() != 1 {
			t.Errorf("%q ended a sandbox", why)
		}
		r.halt()
	}
}

// leavings is what is left on the machine of a folder, but files: mounts, loop devices, processes.
func leavings(t *testing.T, dir string) (out []string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir+"/") {
			out = append(out, "mount: "+line)
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range loops {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), dir+"/") {
			out = append(out, "loop: "+string(b))
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range procs {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), dir) {
			out = append(out, "process: "+strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return out
}

// TestARemovedHostLeavesOnlyFiles: real sandboxes and disks, removed as it runs and at its next start.
func TestARemovedHostLeavesOnlyFiles(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	for name, again := range map[string]bool{"as it runs": false, "at its next start": true} {
		t.Run(name, func(t *testing.T) {
			r := realRig(t)
			r.start()
			r.mustWake(ref("ann", 5, 6), tierTerms(corev1.Tier_TIER_CONTAINER))
			if r.run.h.offers(corev1.Tier_TIER_GVISOR) {
				r.mustWake(ref("bob", 7, 8), tierTerms(corev1.Tier_TIER_GVISOR))
			}
			if len(leavings(t, r.cfg.Dir)) == 0 {
				t.Fatal("nothing is seen while it runs")
			}
			var err error
			if again {
				r.halt()
				r.sched.deny(removedWord)
				err = Run(t.Context(), r.cfg, bustest.Connect(t, r.bus, subjects.Host(testHost)), r.load, testLog(), nil)
			} else {
				r.sched.deny(removedWord)
				err = <-r.run.done
				r.run.stop()
				r.run.conn.Close()
				r.run = nil
			}
			if !errs.Is(err, errkind.Denied) || !strings.Contains(err.Error(), "nothing of it runs here any more") {
				t.Errorf("it ended with %v", err)
			}
			if held, err := watchdog.Held(r.cfg.Dir); held || err != nil {
				t.Errorf("the watchdog is there: %v %v", held, err)
			}
			if left := leavings(t, r.cfg.Dir); len(left) > 0 {
				t.Errorf("left:\n%s", strings.Join(left, "\n"))
			}
			pool, err := diskpool.Open(t.Context(), r.cfg.pool(nil))
			must(t, err)
			if disks, _ := filepath.Glob(filepath.Join(pool.Dir(), "sessions", "*", "disk.img")); len(disks) == 0 {
				t.Error("the disks did not stay")
			}
			must(t, pool.Close())
		})
	}
}
