package fence

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
)

// What a lease is in these tests: renewed every third of term, not acted on in the last margin.
const (
	term   = 3 * time.Second
	margin = 1500 * time.Millisecond
)

// TestMain plays a hostagent that renews its lease until it is killed, one that dies in a freeze, or a
// watchdog of the format before.
func TestMain(m *testing.M) {
	if dir := os.Getenv("BERTH_TEST_OLDDOG"); dir != "" {
		fmt.Println(oldWatchdog(dir))
		os.Exit(1)
	}
	if point := os.Getenv("BERTH_TEST_FREEZE"); point != "" {
		fmt.Println(freezeAndDie(os.Getenv("BERTH_TEST_DIR"), point))
		os.Exit(1)
	}
	if dir := os.Getenv("BERTH_TEST_FENCE"); dir != "" {
		f, err := Start(dir, os.Getenv("BERTH_TEST_CGROUP"), slog.New(slog.DiscardHandler))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		for {
			stop := time.Duration(0)
			if os.Getenv("BERTH_TEST_STOPS") != "" {
				stop = watchdog.Now() + term - margin/4
			}
			f.Until(watchdog.Now()+term-margin, stop)
			fmt.Println("renewed")
			time.Sleep(term / 6)
		}
	}
	os.Exit(m.Run())
}

// place is a host's folder and the cgroup of one sandbox, in which a process counts.
type place struct {
	t         *testing.T
	dir, path string
	tree      cgroup.Tree
	beats     string
	stops     bool // the hostagent is configured to stop what runs
}

func newPlace(t *testing.T) *place {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("not root: cgroups cannot be made")
	}
	tree, err := cgroup.Detect()
	if err != nil {
		t.Skip(err)
	}
	p := &place{t: t, dir: t.TempDir(), path: fmt.Sprintf("berth-fencetest-%d-%d", os.Getpid(), time.Now().UnixNano()), tree: tree}
	box := p.path + "/box"
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		p.dismiss()
		tree.Kill(box)
		_ = tree.Freeze(ctx, p.path, false)
		if err := tree.Remove(ctx, p.path); err != nil {
			t.Error(err)
		}
	})
	if err := tree.Create(box, cgroup.Limits{CPUMillis: 1000, MemoryBytes: 64 << 20, PIDs: 16}); err != nil {
		t.Fatal(err)
	}
	p.beats = filepath.Join(p.dir, "beats")
	cmd := exec.Command("sh", "-c", "while :; do echo >> "+p.beats+"; sleep 0.02; done")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait() }()
	dirs, _ := filepath.Glob("/sys/fs/cgroup/*/" + box + "/cgroup.procs")
	if tree.V2() {
		dirs = []string{"/sys/fs/cgroup/" + box + "/cgroup.procs"}
	}
	for _, d := range dirs {
		if err := os.WriteFile(d, []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// dismiss ends the watchdog that a test leaves.
func (p *place) dismiss() {
	lease, err := watchdog.OpenLease(p.dir)
	if err != nil {
		p.t.Error(err)
		return
	}
	defer lease.Close()
	lease.Dismiss()
	held := true
	for end := time.Now().Add(20 * time.Second); held && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		held, err = watchdog.Held(p.dir)
	}
	if held || err != nil {
		p.t.Errorf("a watchdog is left: %v", err)
	}
}

// runs reports whether the process in the sandbox gets on. One that is silent does not stand still by
// that alone, for a busy machine may not have come to it: it is frozen, too, or gone.
func (p *place) runs() bool {
	for end := time.Now().Add(10 * time.Second); ; {
		still := p.tree.Frozen(p.path+"/box") || !p.tree.Populated(p.path)
		before := p.size()
		time.Sleep(200 * time.Millisecond)
		if p.size() > before {
			return true
		}
		if still || time.Now().After(end) {
			return false
		}
	}
}

// becomes waits until the sandbox runs or stands still, and returns since when it stands still, or
// when it was seen to run.
func (p *place) becomes(running bool) time.Duration {
	p.t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		at := watchdog.Now()
		if p.runs() == running {
			if running {
				at = watchdog.Now()
			}
			return at
		}
	}
	p.t.Fatalf("running: %v, wanted %v", !running, running)
	return 0
}

// hostagent starts the process that renews, and returns once it did.
func (p *place) hostagent() *exec.Cmd {
	p.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "BERTH_TEST_FENCE="+p.dir, "BERTH_TEST_CGROUP="+p.path)
	if p.stops {
		cmd.Env = append(cmd.Env, "BERTH_TEST_STOPS=1")
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if _, err := out.Read(make([]byte, 8)); err != nil {
		p.t.Fatalf("the hostagent did not renew: %v", err)
	}
	go func() { // what it says later
		b := make([]byte, 64)
		for err == nil {
			_, err = out.Read(b)
		}
	}()
	return cmd
}

func (p *place) watchdog() int {
	p.t.Helper()
	// An empty file: a successor has the lock and is about to write its name.
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		raw, err := os.ReadFile(watchdog.Lock(p.dir))
		if err != nil {
			p.t.Fatal(err)
		}
		if pid, err := strconv.Atoi(strings.SplitN(string(raw), "\n", 2)[0]); err == nil {
			return pid
		} else if time.Now().After(end) {
			p.t.Fatal(err)
		}
	}
}

// TestFrozenBeforeTheLeaseEnds: killed or stopped, a hostagent that does not renew has its sandboxes
// frozen before its lease is over at scheduler; the next one's first lease lets them run, and takes
// the same watchdog over.
func TestFrozenBeforeTheLeaseEnds(t *testing.T) {
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			first := p.hostagent()
			p.becomes(true)
			time.Sleep(term) // longer than one lease: it is renewed
			if !p.runs() {
				t.Fatal("frozen although the lease was renewed")
			}
			pid := p.watchdog()
			last := watchdog.Now()
			if err := first.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if at := p.becomes(false); at > last+term {
				t.Errorf("frozen %s after the end of the lease", at-last-term)
			} else {
				t.Logf("frozen %s before the end of the lease", last+term-at)
			}
			if sig == syscall.SIGSTOP {
				if err := first.Process.Signal(syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
			} else {
				p.hostagent()
			}
			renewed := watchdog.Now()
			t.Logf("seen to run %s after the renewal", p.becomes(true)-renewed)
			if now := p.watchdog(); now != pid {
				t.Errorf("watchdog %d instead of %d", now, pid)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(20 * time.Second); p.watchdog() == pid && time.Now().Before(end); {
				time.Sleep(10 * time.Millisecond)
			}
			if p.watchdog() == pid {
				t.Error("a watchdog that was killed is not replaced")
			}
		})
	}
}

// TestWhatBeginsWithoutALeaseIsFrozen, and the watchdog stays for as long as there is a sandbox.
func TestWhatBeginsWithoutALeaseIsFrozen(t *testing.T) {
	p := newPlace(t)
	log := slog.New(slog.DiscardHandler)
	f, err := Start(p.dir, p.path, log)
	if err != nil {
		t.Fatal(err)
	}
	p.becomes(false)
	f.Until(watchdog.Now()+time.Minute, 0)
	p.becomes(true)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if held, err := watchdog.Held(p.dir); err != nil || !held {
		t.Errorf("the watchdog left a sandbox: %v %v", held, err)
	}
	if f, err = Start(p.dir, p.path, log); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	p.tree.Kill(p.path)
	if err := p.tree.Remove(ctx, p.path); err != nil {
		t.Fatal(err)
	}
	pid := p.watchdog()
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if held, err := watchdog.Held(p.dir); err != nil || held {
		t.Errorf("the watchdog stays: %v %v", held, err)
	}
	if cmd, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && strings.Contains(string(cmd), watchdog.Name) {
		t.Errorf("process %d is left: %q", pid, cmd)
	}
	f, err = Start(p.dir, p.path, log) // and it can begin anew
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}
