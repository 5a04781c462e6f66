package e2e

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestCheckpointHoldsWhatWasNotSynced: bytes that a program wrote, by write and through a shared
// mapping, and never synced are on the disk when Checkpoint answers. Everything of the sandbox is
// killed at once, so that nobody can write out anything later.
func TestCheckpointHoldsWhatWasNotSynced(t *testing.T) {
	checkpointHoldsAll(t, common.For(t))
}

func checkpointHoldsAll(t *testing.T, e *testenv.Env) {
	const write = `
import mmap, os, time
f = os.open("/root/written", os.O_RDWR | os.O_CREAT)
os.write(f, b"w" * 3000000)
g = os.open("/root/mapped", os.O_RDWR | os.O_CREAT)
os.ftruncate(g, 3000000)
m = mmap.mmap(g, 3000000)
m[:] = b"m" * 3000000
print("written", flush=True)
time.sleep(1000)
`
	eachTier(t, e, func(t *testing.T, tier, template string) {
		c := e.Client("acme", "writer-"+tier)
		s := open(t, c, sdk.OpenOptions{Template: template})
		r, w := io.Pipe()
		p, err := s.Exec(t.Context(), sdk.Cmd{Args: []string{"python3", "-c", write}, Stdout: w})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Detach()
		if _, err := io.ReadFull(r, make([]byte, len("written\n"))); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		epoch := s.Epoch()
		killSandboxes(t, e)
		for end := time.Now().Add(20 * time.Second); ; {
			s = open(t, c, sdk.OpenOptions{Template: template})
			if s.Epoch() != epoch {
				break
			}
			if time.Now().After(end) {
				t.Fatal("the sandbox that was killed still counts as awake")
			}
			time.Sleep(100 * time.Millisecond)
		}
		got := sh(t, s, `for f in written mapped; do tr -d '\0' < /root/$f | wc -c; done`)
		if got != "3000000\n3000000" {
			t.Errorf("bytes of both files after the kill: %q", got)
		}
	})
}

// killSandboxes kills every process of the installation's sandboxes, a sentry and its gofer with
// them, in one go.
func killSandboxes(t *testing.T, e *testenv.Env) {
	t.Helper()
	pids := sandboxed(e)
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if len(pids) == 0 {
		t.Fatal("no process of a sandbox was found")
	}
	t.Logf("killed %d processes", len(pids))
}

// sandboxed are the processes in the cgroups of the installation's sandboxes.
func sandboxed(e *testenv.Env) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, file := range files {
		raw, _ := os.ReadFile(file)
		ours := func(mark string) bool { return strings.Contains(string(raw), mark) }
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil && slices.ContainsFunc(e.Marks, ours) {
			pids = append(pids, pid)
		}
	}
	return pids
}
