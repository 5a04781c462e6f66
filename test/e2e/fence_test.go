package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// leaseTime is how long a host may act after it renewed.
const leaseTime = 9 * time.Second

// TestSandboxesAreFrozenWhenEverythingIsKilled: nobody renews the lease any more, so nothing of a
// session runs when it ends; the next start takes the same sandboxes over and they go on.
func TestSandboxesAreFrozenWhenEverythingIsKilled(t *testing.T) {
	e := common.For(t)
	c := e.Client("acme", "ann")
	sessions := map[string]*sdk.Session{}
	for tier, template := range offered(t, e) {
		s := open(t, c, sdk.OpenOptions{Template: template, Name: tier})
		p, err := s.Exec(t.Context(), sdk.Cmd{Key: "xcount", Args: []string{"sh", "-c", "while :; do echo x >> /root/beats; sleep 0.1; done"}})
		if err != nil {
			t.Fatal(err)
		}
		p.Detach()
		sessions[tier] = s
	}
	watcher := watchdogs(t, e)
	if len(watcher) != 1 {
		t.Fatalf("watchdogs: %v", watcher)
	}
	e.Kill()
	killed := time.Now()
	for busy := true; busy; {
		before := cpuTime(t, e)
		time.Sleep(300 * time.Millisecond)
		busy = cpuTime(t, e) != before
		if time.Since(killed) > leaseTime {
			t.Fatal("the sandboxes run on without a lease")
		}
	}
	t.Logf("frozen %s after the kill", time.Since(killed).Round(100*time.Millisecond))
	time.Sleep(time.Second)
	e.Up()
	c = e.Client("acme", "ann")
	for tier, template := range offered(t, e) {
		s := open(t, c, sdk.OpenOptions{Template: template, Name: tier})
		if s.Epoch() != sessions[tier].Epoch() {
			t.Errorf("%s: epoch %s became %s (%s)", tier, sessions[tier].Epoch(), s.Epoch(), s.Origin())
		}
		if got := sh(t, s, "a=$(wc -l < /root/beats); sleep 0.5; b=$(wc -l < /root/beats); test $b -gt $a && echo goes on"); got != "goes on" {
			t.Errorf("%s: what ran before the kill does not go on", tier)
		}
	}
	if now := watchdogs(t, e); len(now) != 1 || now[0] != watcher[0] {
		t.Errorf("watchdogs %v, before %v", now, watcher)
	}
	e.Down()
	if left := watchdogs(t, e); len(left) != 0 {
		t.Errorf("watchdogs %v are left after an orderly stop", left)
	}
}

// watchdogs are the processes that watch this installation.
func watchdogs(t *testing.T, e *testenv.Env) (pids []string) {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		raw, _ := os.ReadFile(f)
		if args := strings.Split(string(raw), "\x00"); args[0] == "berth-watchdog" && strings.HasPrefix(args[1], e.Dir) {
			pids = append(pids, filepath.Base(filepath.Dir(f)))
		}
	}
	return pids
}

// cpuTime is what all processes in the sandboxes' cgroups have used, in nanoseconds.
func cpuTime(t *testing.T, e *testenv.Env) (used int) {
	t.Helper()
	for _, pid := range sandboxed(e) {
		raw, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/schedstat")
		ns, _, _ := strings.Cut(string(raw), " ")
		n, _ := strconv.Atoi(ns)
		used += n
	}
	return used
}
