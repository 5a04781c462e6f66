package cgroup

import (
	"context"
	"errors"
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
		"b/x/memory.events": "low 0\noom 2\noom_kill 1\n", "b/x/io.max": "", "b/x/memory.high": "max",
		"b/x/pids.events": "max 0\n", "b/x/box/pids.events": "max 2\n",
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
	if err := tree.Create("b/x", Limits{CPUMillis: 500, MemoryBytes: 1 << 20, PIDs: 20, IO: IO{"7:3", 1 << 20, 0}}); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"cgroup.subtree_control": "+cpu +memory +pids +io", "b/x/cgroup.subtree_control": "+cpu +memory +pids +io",
		"b/x/io.max":  "7:3 rbps=524288 wbps=524288 riops=max wiops=max",
		"b/x/cpu.max": "50000 100000", "b/x/memory.max": "1048576", "b/x/memory.swap.max": "0", "b/x/pids.max": "20",
	} {
		if b, _ := os.ReadFile(filepath.Join(dir, file)); string(b) != want {
			t.Errorf("%s: got %q, want %q", file, b, want)
		}
	}
	s, err := tree.Stats("b/x")
	if want := (Stats{CPU: 1500 * time.Microsecond, MemoryBytes: 4096, Processes: 3, OOMKills: 1, PIDsHits: 2}); err != nil || s != want {
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

// TestAMemoryLimitBelowUseIsRefused: a running sandbox is not killed by a smaller limit.
func TestAMemoryLimitBelowUseIsRefused(t *testing.T) {
	dir := fake2(t, "cpu io memory pids")
	tree, err := detect(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := tree.Create("b/x", Limits{CPUMillis: 500, MemoryBytes: 1 << 20, PIDs: 20}); err != nil {
		t.Fatal(err)
	}
	read := func(file string) string { b, _ := os.ReadFile(filepath.Join(dir, "b/x", file)); return string(b) }
	refuse := func(name string, l Limits) {
		before := read("cpu.max") + read("memory.max") + read("pids.max")
		if err := tree.Update(t.Context(), "b/x", l); !errors.Is(err, ErrInUse) {
			t.Errorf("%s: %v", name, err)
		}
		if after := read("cpu.max") + read("memory.max") + read("pids.max"); after != before || !strings.HasPrefix(read("memory.high"), "max") {
			t.Errorf("%s: %q became %q, memory.high is %q", name, before, after, read("memory.high"))
		}
	}
	refuse("below use", Limits{CPUMillis: 100, MemoryBytes: 2048, PIDs: 10}) // memory.current is 4096
	for _, l := range []Limits{{CPUMillis: 100, MemoryBytes: 8192, PIDs: 10, IO: IO{"7:3", 0, 100}}, {CPUMillis: 900, MemoryBytes: 1 << 21, PIDs: 30}} {
		if err := tree.Update(t.Context(), "b/x", l); err != nil {
			t.Error(err)
		}
		if got := read("memory.max"); !strings.HasPrefix(got, strconv.FormatUint(l.MemoryBytes, 10)) {
			t.Errorf("memory.max is %q", got)
		}
	}
	if got := read("io.max"); !strings.HasPrefix(got, "7:3 rbps=max wbps=max riops=50 wiops=50") {
		t.Errorf("io.max is %q", got)
	}
}

// TestUpdateOfALiveCgroup: the same on this machine's own kernel, with memory that is really used.
func TestUpdateOfALiveCgroup(t *testing.T) {
	tree, name := hostTree(t)
	name += "-update"
	if err := tree.Create(name, Limits{CPUMillis: 500, MemoryBytes: 64 << 20, PIDs: 20}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tree.Remove(context.Background(), name); err != nil {
			t.Error(err)
		}
	}()
	// Memory of a shell variable cannot be taken back without swap that is accounted.
	cmd := exec.Command("sh", "-c", "read go; x=$(head -c 20000000 /dev/zero | tr '\\0' x); echo full; read go")
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, d := range tree.dirs(name) {
		if _, err := os.Stat(d); err == nil {
			_ = write(filepath.Join(d, "cgroup.procs"), strconv.Itoa(cmd.Process.Pid))
		}
	}
	_, _ = in.Write([]byte("\n"))
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if err := tree.Update(t.Context(), name, Limits{CPUMillis: 500, MemoryBytes: 4 << 20, PIDs: 20}); !errors.Is(err, ErrInUse) {
		t.Errorf("below use: %v", err)
	}
	if got, err := tree.memoryLimit(name); err != nil || got != 64<<20 {
		t.Errorf("the limit is %d, %v", got, err)
	}
	for _, bytes := range []uint64{48 << 20, 96 << 20} {
		if err := tree.Update(t.Context(), name, Limits{CPUMillis: 700, MemoryBytes: bytes, PIDs: 30}); err != nil {
			t.Error(err)
		}
		if got, err := tree.memoryLimit(name); err != nil || got != bytes {
			t.Errorf("the limit is %d, %v; want %d", got, err, bytes)
		}
	}
	_, _ = in.Write([]byte("\n"))
	if err := cmd.Wait(); err != nil {
		t.Errorf("it was killed: %v", err)
	}
	if s, err := tree.Stats(name); err != nil || s.OOMKills != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestHitsOfThePIDsLimitAreCounted by the kernel of this machine.
func TestHitsOfThePIDsLimitAreCounted(t *testing.T) {
	tree, name := hostTree(t)
	name += "-pids"
	if err := tree.Create(name+"/box", Limits{CPUMillis: 500, MemoryBytes: 64 << 20, PIDs: 100}); err != nil {
		t.Fatal(err)
	}
	if err := tree.Create(name, Limits{CPUMillis: 500, MemoryBytes: 64 << 20, PIDs: 2}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tree.Remove(context.Background(), name); err != nil {
			t.Error(err)
		}
	}()
	cmd := exec.Command("sh", "-c", "read go; sleep 9 & sleep 9 & sleep 9 & wait")
	in, _ := cmd.StdinPipe()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, d := range tree.dirs(name + "/box") {
		if _, err := os.Stat(d); err == nil {
			_ = write(filepath.Join(d, "cgroup.procs"), strconv.Itoa(cmd.Process.Pid))
		}
	}
	_, _ = in.Write([]byte("\n"))
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		s, err := tree.Stats(name)
		if err == nil && s.PIDsHits > 0 {
			break
		}
		if time.Now().After(end) {
			t.Errorf("nothing was counted: %+v, %v", s, err)
			break
		}
	}
	tree.Kill(name)
	_ = cmd.Wait()
}
