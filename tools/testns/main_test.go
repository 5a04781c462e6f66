package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain plays testns itself and PID 1 of its namespaces; both are this program.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "--outer" {
		os.Exit(runOuter(os.Args[2:]))
	}
	if len(os.Args) > 2 && os.Args[1] == initArg {
		endTime = 300 * time.Millisecond
		os.Exit(runInit(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// testns prepares testns with a shell script in place of a test binary.
func testns(t *testing.T, script string) *exec.Cmd {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: namespaces need root")
	}
	return exec.Command("/proc/self/exe", "--outer", "/bin/sh", "-c", script)
}

func TestExitStatusAndOutputPassThrough(t *testing.T) {
	for _, want := range []int{0, 1, 7} {
		out, err := testns(t, fmt.Sprintf("echo out; exit %d", want)).CombinedOutput()
		got := 0
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			got = exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if got != want || string(out) != "out\n" {
			t.Errorf("exit status %d, output %q, want %d and out", got, out, want)
		}
	}
}

func TestLeftoversAreNamed(t *testing.T) {
	out, err := testns(t, `
		sleep 4711 & mkdir $(dirname /sys/fs/cgroup/*/cgroup.procs | head -n 1)/berth-left
		mkdir $TMPDIR/mounted && mount -t tmpfs none $TMPDIR/mounted
		ip link add left type veth peer name left2`).CombinedOutput()
	if err == nil {
		t.Errorf("what was left behind is no failure")
	}
	for _, want := range []string{"sleep 4711", "berth-left", "/mounted", "link left"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%q is not named:\n%s", want, out)
		}
	}
}

func TestProcessThatEndsInTimeIsNoLeftover(t *testing.T) {
	if out, err := testns(t, "sleep 0.1 & exit 0").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestTwoRunsShareNothing(t *testing.T) {
	script := `echo $TMPDIR; ls -A $TMPDIR /run; echo $$ > /run/mark; ls /proc | grep -c '^[0-9]'`
	first, err := testns(t, script).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, first)
	}
	second, err := testns(t, script).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, second)
	}
	a, b := strings.Fields(string(first)), strings.Fields(string(second))
	if a[0] == b[0] || strings.Contains(string(second), "mark") {
		t.Errorf("the second run sees the first:\n%s\n%s", first, second)
	}
}

// A run that was killed leaves no process; the next one removes its cgroups and its temporary directory.
func TestNextRunRemovesWhatAKilledRunLeft(t *testing.T) {
	cmd := testns(t, "echo $TMPDIR; exec sleep 4712")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 200)
	n, err := stdout.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	dir := strings.TrimSpace(string(b[:n]))
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	if out, err := testns(t, "exit 0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	left, _ := filepath.Glob("/sys/fs/cgroup/*/" + filepath.Base(dir))
	if _, err := os.Stat(dir); err == nil {
		left = append(left, dir)
	}
	if len(left) > 0 {
		t.Errorf("left are %v", left)
	}
}

func TestSignalReachesTheTests(t *testing.T) {
	cmd := testns(t, "trap 'echo stopped; exit 3' TERM; echo ready; while :; do sleep 0.01; done")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, err := stdout.Read(b); err != nil || string(b[:n]) != "ready\n" {
		t.Fatalf("%q, %v", b[:n], err)
	}
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	n, _ := stdout.Read(b)
	err = cmd.Wait()
	if string(b[:n]) != "stopped\n" || cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("%q, %v", b[:n], err)
	}
}
