package cgroup

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func hostTree(t *testing.T) (Tree, string) {
	t.Helper()
	tree, err := Detect()
	if os.Geteuid() != 0 || err != nil {
		t.Skipf("skipped: cgroups need root: %v", err)
	}
	t.Logf("this machine has cgroup v2: %v; the other version is tested on a copy of its files", tree.V2())
	return tree, "berth-test-" + strconv.Itoa(os.Getpid())
}

func TestLimitsFreezeKillAndRemove(t *testing.T) {
	tree, name := hostTree(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	path := name + "/box"
	for range 2 {
		if err := tree.Create(path, Limits{CPUMillis: 500, MemoryBytes: 64 << 20, PIDs: 20}); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		for range 2 {
			if err := tree.Remove(ctx, name); err != nil {
				t.Error(err)
			}
		}
		if tree.Exists(name) {
			t.Error("the cgroup is still there")
		}
	}()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, d := range tree.dirs(path) {
		if _, err := os.Stat(d); err != nil {
			continue
		}
		if err := write(filepath.Join(d, "cgroup.procs"), strconv.Itoa(cmd.Process.Pid)); err != nil {
			t.Fatal(err)
		}
	}
	if s, err := tree.Stats(path); err != nil || s.Processes != 1 {
		t.Errorf("got %+v, %v", s, err)
	}
	for _, on := range []bool{true, true, false, false} {
		if err := tree.Freeze(ctx, path, on); err != nil {
			t.Errorf("freeze %v: %v", on, err)
		}
	}
	if got := tree.Children(name); len(got) != 1 || got[0] != "box" {
		t.Errorf("got %v", got)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	if err := tree.Remove(ctx, path); err != nil {
		t.Error(err)
	}
	<-done
}

// fake2 is a copy of the files of a version 2 hierarchy.
func fake2(t *testing.T, controllers string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"cgroup.controllers": controllers, "cgroup.subtree_control": "",
		"b/cgroup.subtree_control": "", "b/x/cgroup.subtree_control": "", "b/x/cpu.max": "", "b/x/memory.max": "",
		"b/x/memory.swap.max": "", "b/x/pids.max": "", "b/x/cgroup.freeze": "", "b/x/cgroup.events": "populated 1\nfrozen 1\n",
		"b/x/memory.current": "4096\n", "b/x/pids.current": "3\n", "b/x/cpu.stat": "usage_usec 1500\nuser_usec 1\n",
		"b/x/memory.events": "low 0\noom 2\noom_kill 1\n",
	} {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestVersion2OnACopyOfItsFiles(t *testing.T) {
	dir := fake2(t, "cpuset cpu io memory pids\n")
	tree, err := detect(dir)
	if err != nil || !tree.V2() {
		t.Fatalf("got %+v, %v", tree, err)
	}
	if err := tree.Create("b/x", Limits{CPUMillis: 500, MemoryBytes: 1 << 20, PIDs: 20}); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"cgroup.subtree_control": "+cpu +memory +pids", "b/cgroup.subtree_control": "+cpu +memory +pids",
		"b/x/cpu.max": "50000 100000", "b/x/memory.max": "1048576", "b/x/memory.swap.max": "0", "b/x/pids.max": "20",
	} {
		if b, _ := os.ReadFile(filepath.Join(dir, file)); string(b) != want {
			t.Errorf("%s: got %q, want %q", file, b, want)
		}
	}
	s, err := tree.Stats("b/x")
	if want := (Stats{CPU: 1500 * time.Microsecond, MemoryBytes: 4096, Processes: 3, OOMKills: 1}); err != nil || s != want {
		t.Errorf("got %+v, %v", s, err)
	}
	if err := tree.Freeze(context.Background(), "b/x", true); err != nil {
		t.Error(err)
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "b/x/cgroup.freeze")); string(b) != "1" {
		t.Errorf("got %q", b)
	}
}

func TestMissingControllersAreOneSentence(t *testing.T) {
	for _, dir := range []string{fake2(t, "cpu io\n"), t.TempDir()} {
		if _, err := detect(dir); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v", err)
		}
	}
	if _, err := detect(fake2(t, "cpu memory pids")); err != nil {
		t.Error(err)
	}
	if err := (Tree{root: t.TempDir(), v2: true}).Create("a", Limits{}); err == nil {
		t.Error("a limit that cannot be set was ignored")
	}
}
