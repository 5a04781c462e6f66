package hostagent

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
)

// TestAHostThatStandsStillBeyondItsLease: hostagent is paused in the middle of its work (real processes,
// both tiers). Its sandboxes are dead before scheduler gives the sessions away, and when it goes on it
// commits nothing of them, removes what it does not own, and keeps the disks.
func TestAHostThatStandsStillBeyondItsLease(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	const term = 4 * time.Second
	r := realRig(t)
	r.sched.lease = term
	r.cfg.Sweep = time.Second
	p := newPeer(t, r)
	p.start()
	tree, err := cgroup.Detect()
	must(t, err)
	path := r.cfg.sandboxes(nil).cgroup()
	ours := map[*corev1.SessionRef]corev1.Tier{ref("ann", 5, 6): corev1.Tier_TIER_CONTAINER, ref("bob", 7, 8): corev1.Tier_TIER_GVISOR}
	for one, tier := range ours {
		_, err := r.wake(one, func(w *hostv1.WakeRequest) {
			tierTerms(tier)(w)
			w.Terms.Snapshots = &corev1.Snapshots{Every: durationpb.New(time.Second)}
		})
		must(t, err)
		p.client(one).mustOpen(execOp("x1", "sh", "-c", "while :; do echo x >> /root/beats; sleep 0.05; done"))
	}
	eventually(t, 20*time.Second, "snapshots are taken", func() bool { return r.commits() >= 2 })
	if !tree.Populated(path) {
		t.Fatal("no sandbox is there")
	}
	must(t, p.cmd.Process.Signal(syscall.SIGSTOP))
	paused := watchdog.Now()
	for end := time.Now().Add(3 * term); tree.Populated(path) && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
	}
	if at := watchdog.Now() - paused; tree.Populated(path) || at > term+leaseDrift {
		t.Errorf("sandboxes were there %s after the host stood still; the sessions are given away after %s", at, term+leaseDrift)
	} else {
		t.Logf("dead %s after the host stood still, %s before the sessions are given away", at, term+leaseDrift-at)
	}
	// Everything is given away: one session to another host, of the other nothing is here any more.
	r.sched.set(ref("ann", 5, 16), corev1.State_STATE_ACTIVE)
	r.sched.disown(ref("bob", 7, 8))
	heads := []string{r.sched.head(ref("ann", 5, 6)), r.sched.head(ref("bob", 7, 8))}
	before := r.sched.committed()
	must(t, p.cmd.Process.Signal(syscall.SIGCONT))
	eventually(t, 30*time.Second, "the host has removed what it does not own", func() bool {
		left, _ := os.ReadDir(filepath.Join(r.cfg.Dir, "run"))
		return len(left) == 0 && len(tree.Children(path)) == 0
	})
	if now := r.sched.committed(); now != before {
		t.Errorf("%d manifests were committed after the session was given away", now-before)
	}
	if now := []string{r.sched.head(ref("ann", 5, 6)), r.sched.head(ref("bob", 7, 8))}; !slices.Equal(now, heads) {
		t.Errorf("heads %v became %v", heads, now)
	}
	images, _ := filepath.Glob(filepath.Join(r.cfg.Dir, "disks", "**", "sessions", "*", "disk.img"))
	more, _ := filepath.Glob(filepath.Join(r.cfg.Dir, "disks", "sessions", "*", "disk.img"))
	if n := len(images) + len(more); n != 2 {
		t.Errorf("%d disks are left, want both", n)
	}
	log, _ := os.ReadFile(filepath.Join(r.cfg.Dir, "watchdog.log"))
	if !strings.Contains(string(log), "sandboxes are stopped") {
		t.Errorf("the watchdog said %q", log)
	}
	// It goes on as a host.
	next := ref("cat", 1, 2)
	_, err = r.wake(next, tierTerms(corev1.Tier_TIER_CONTAINER))
	must(t, err)
	must(t, r.delete(next))
	must(t, r.delete(ref("ann", 5, 16)))
	must(t, r.delete(ref("bob", 7, 8)))
	p.stop()
}

// TestFrozenSandboxesAreTakenOverOrRemoved: hostagent is away for so long that its sandboxes are frozen,
// but not stopped. The next one removes what it does not own without letting it run, and only then lets
// the rest run.
func TestFrozenSandboxesAreTakenOverOrRemoved(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	r := realRig(t)
	r.cfg.Fence = fenceFreeze
	r.start()
	tree, err := cgroup.Detect()
	must(t, err)
	kept, gone := ref("ann", 5, 6), ref("bob", 7, 8)
	for _, one := range []*corev1.SessionRef{kept, gone} {
		r.mustWake(one, tierTerms(corev1.Tier_TIER_CONTAINER))
		r.client(one).mustOpen(execOp("x1", "sh", "-c", "while :; do sleep 0.05; done"))
	}
	path := r.cfg.sandboxes(nil).cgroup()
	cpu := func(one *corev1.SessionRef) time.Duration {
		st, err := tree.Stats(path + "/" + string(driverID(one)))
		if err != nil {
			return -1
		}
		return st.CPU
	}
	r.halt()
	time.Sleep(r.sched.lease + 200*time.Millisecond)
	before := cpu(gone)
	time.Sleep(300 * time.Millisecond)
	if cpu(gone) != before || before < 0 {
		t.Fatalf("it is not frozen: %s, then %s", before, cpu(gone))
	}
	r.sched.disown(gone)
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan time.Duration, 1)
	go func() {
		last := before
		for ctx.Err() == nil {
			if now := cpu(gone); now >= 0 {
				last = now
			}
			time.Sleep(time.Millisecond)
		}
		ran <- last
	}()
	r.start()
	cancel()
	// What the kernel does to end it counts too; a process that ran would use much more.
	if now := <-ran; now-before > 20*time.Millisecond {
		t.Errorf("it used %s between the freeze and its end", now-before)
	}
	if cpu(gone) >= 0 {
		t.Error("what is not owned is there when the host serves")
	}
	if o := r.client(kept).exec("x2", "echo", "goes on"); string(o.stdout) != "goes on\n" {
		t.Errorf("%q", o.stdout)
	}
	must(t, r.delete(kept))
	must(t, r.delete(gone))
}

func (f *fakeScheduler) committed() (n int) {
	f.with(func() { n = f.accepted })
	return n
}
