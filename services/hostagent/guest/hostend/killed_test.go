package hostend_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// TestChannelKilledInMidFrame kills a host 100 times, half of them after a
// random number of bytes read and half in the middle of a write, while execs
// give and take megabytes. The execs go on, and no byte of output or stdin is
// lost, doubled or invented; the exit codes are those of the processes.
func TestChannelKilledInMidFrame(t *testing.T) {
	kills := 100
	if testing.Short() {
		kills = 20
	}
	const output, input = 48 << 20, 24 << 20
	g := startGuest(t)
	dir := t.TempDir()
	jobs := []job{
		{Spec: spec(t, "talker", "generate", fmt.Sprint(output), "7")},
		{Spec: spec(t, "listener", "swallow", fmt.Sprint(input)), Input: input},
		{Spec: spec(t, "parrot", "echo"), Input: input},
	}
	jobs[1].Spec.Stdin, jobs[2].Spec.Stdin = true, true
	b, err := json.Marshal(jobs)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/jobs.json", b, 0o600); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	const unlimited = 1 << 60
	for i := range kills {
		// Log-uniform: deaths within the first bytes, and after a while.
		budget := 1 + rng.Int64N(1<<(6+rng.Int64N(15)))
		read, write := budget, int64(unlimited)
		if i%2 == 1 {
			read, write = unlimited, budget
		}
		if killed := runHost(t, g, dir, read, write); !killed {
			t.Fatalf("host %d ended by itself with budgets %d and %d", i, read, write)
		}
	}
	if killed := runHost(t, g, dir, unlimited, unlimited); killed {
		t.Fatal("the last host was killed")
	}
	checkFile(t, dir+"/talker.out", 1, output)
	checkFile(t, dir+"/talker.err", 2, output/3)
	checkFile(t, dir+"/parrot.out", 3, input)
	checkFile(t, dir+"/parrot.err", 3, 0)
	checkExit(t, dir, "talker", 7)
	checkExit(t, dir, "listener", 0)
	checkExit(t, dir, "parrot", 5)
}

func spec(t *testing.T, key, role string, args ...string) hostend.ExecSpec {
	argv, env := program(t, role, args...)
	return hostend.ExecSpec{Key: key, Argv: argv, Env: env}
}

// runHost runs one host to its end and says whether it was killed.
func runHost(t *testing.T, g *guest, dir string, read, write int64) bool {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", g.in, g.out, dir, fmt.Sprint(read), fmt.Sprint(write))
	cmd.Env = append(os.Environ(), "BERTH_TEST_ROLE=host")
	cmd.Stderr = os.Stderr
	err := cmd.Run()
	var status *exec.ExitError
	if errors.As(err, &status) && status.ExitCode() == -1 {
		return true
	}
	if err != nil {
		t.Fatalf("host with budgets %d and %d: %v", read, write, err)
	}
	return false
}

func checkFile(t *testing.T, path string, seed uint64, size int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if bad := checkPattern(b, seed, 0); bad >= 0 || len(b) != size {
		t.Errorf("%s: %d bytes of %d, first wrong one at %d", path, len(b), size, bad)
	}
}

func checkExit(t *testing.T, dir, key string, code int) {
	t.Helper()
	b, err := os.ReadFile(dir + "/" + key + ".exit")
	if err != nil {
		t.Fatal(err)
	}
	var exit hostend.Exit
	if err := json.Unmarshal(b, &exit); err != nil {
		t.Fatal(err)
	}
	outcome{exit: &exit}.wantCode(t, code)
}
