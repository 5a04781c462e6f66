package wasm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

// TestFaults runs hostile and broken calls in sandboxes of one host.
func TestFaults(t *testing.T) {
	h := newHost(t, true)
	h.cfg.CallTime, h.cfg.CallOutput = 1500*time.Millisecond, 1<<20
	d := openDriver(t, h)
	h.short = h.open(t, d, 2)
	d.cfg.CallTime = 30 * time.Second
	b := h.open(t, d, 1)
	for _, c := range []struct {
		name string
		run  func(*testing.T, *host, *box)
	}{
		{"an exit code is the module's own", exitCodes},
		{"a link out of the mount", links},
		{"descriptors of another call", descriptors},
		{"memory without end", memory},
		{"a loop without end", loop},
		{"output without end", flood},
		{"files without end", files},
		{"what is no module", notModules},
		{"a compile bomb", compileBomb},
		{"memory of another call", otherMemory},
		{"the end of standard input", stdinEnds},
		{"bad pointers", badPointers},
		{"a native program", native},
		{"terminals and users", refusals},
		{"a call's process", process1},
		{"javascript", javascript},
		{"one call each", oneUse},
		{"a module of the session's own", ownModule},
		{"quiesce", quiesce},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, h, b) })
	}
}

func exitCodes(t *testing.T, _ *host, b *box) {
	for _, n := range []int{0, 1, 42, 255} {
		b.call(t, "tool", "exit", strconv.Itoa(n)).want(t, n, "")
	}
	big := module(importing("wasi_snapshot_preview1", "proc_exit", "i", ""), body(i32(256), callOp(0)))
	b.put(t, "/big.wasm", big)
	b.call(t, "/big.wasm").want(t, order.ExitTooBig, "exit code")
}

// links: a link that a module or a user made leads nowhere outside the sandbox's own files.
func links(t *testing.T, h *host, b *box) {
	secret := filepath.Join(h.dir, "secret")
	if err := os.WriteFile(secret, []byte("TOP-SECRET"), 0o644); err != nil {
		t.Fatal(err)
	}
	for i, target := range []string{secret, "../../../../../../.." + secret, "/proc/1/root" + secret, "/../.." + secret} {
		name := fmt.Sprintf("/link%d", i)
		if err := os.Symlink(target, filepath.Join(b.spec.Disk, "upper", name)); err != nil {
			t.Fatal(err)
		}
		if e := b.call(t, "tool", "cat", name); e.code() != 3 || strings.Contains(e.out, "SECRET") {
			t.Errorf("%s: code %d, %q", target, e.code(), e.out)
		}
		if e := b.call(t, "tool", "cat", target); e.code() != 3 || strings.Contains(e.out, "SECRET") {
			t.Errorf("direct %s: code %d, %q", target, e.code(), e.out)
		}
		if e := b.call(t, "tool", "write", name, "mine"); e.code() == 0 {
			// It may have written a file of its own at that path of its own root, nothing else.
			if got, _ := os.ReadFile(secret); string(got) != "TOP-SECRET" {
				t.Errorf("%s: the host's file says %q", target, got)
			}
		}
	}
	for _, path := range []string{"/proc/self/environ", "/proc/1/root", "/sys/kernel", h.dir, "/dev/mem", "/dev/kmsg"} {
		b.call(t, "tool", "cat", path).want(t, 3, "")
	}
}

func descriptors(t *testing.T, _ *host, b *box) {
	for range 2 {
		e := b.call(t, "tool", "fds")
		e.want(t, 0, "")
		if e.out != "0 1 2 3 " {
			t.Errorf("open descriptors: %s", e.out)
		}
	}
}

// memory: a module that takes all it can is told no, and its sandbox goes on.
func memory(t *testing.T, _ *host, b *box) {
	e := b.call(t, "tool", "grow")
	e.want(t, order.ExitMemory, "berth-wasm: memory limit")
	if s, err := b.d.Stats(t.Context(), b.sb.ID); err != nil || s.OOMKills != 0 {
		t.Errorf("the kernel had to kill: %+v, %v", s, err)
	}
	greedy := module(memoryOf(65536), body())
	b.put(t, "/greedy.wasm", greedy)
	b.call(t, "/greedy.wasm").want(t, order.ExitMemory, "memory limit")
	// One page after the other, as far as it goes: the answer is -1 and no trap.
	grow := module(memoryOf(1), body(block(loopOp(i32(1), []byte{0x40, 0}, i32(-1), []byte{0x47, 0x0d, 0}))))
	b.put(t, "/grow.wasm", grow)
	b.call(t, "/grow.wasm").want(t, 0, "")
	b.call(t, "tool", "exit", "7").want(t, 7, "")
}

func loop(t *testing.T, h *host, b *box) {
	e := h.short.call(t, "tool", "loop")
	e.want(t, order.ExitTime, "time limit")
	if e.took > h.cfg.CallTime+5*time.Second {
		t.Errorf("it took %s", e.took)
	}
	tight := module(body(loopOp([]byte{0x0c, 0})))
	b.put(t, "/tight.wasm", tight)
	s, err := b.begin(t, hostend.ExecSpec{Argv: []string{"/tight.wasm"}, Timeout: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if e := finish(t, s); !e.exit.TimedOut || e.exit.Code != nil {
		t.Errorf("its own time-out: %+v", e.exit)
	}
}

func flood(t *testing.T, _ *host, b *box) {
	e := b.call(t, "tool", "flood")
	e.want(t, order.ExitOutput, "output limit")
	if len(e.out) != 1<<20 {
		t.Errorf("%d bytes of output", len(e.out))
	}
}

func files(t *testing.T, h *host, b *box) {
	b.put(t, "/open.wasm", nil)
	e := b.call(t, "/usr/lib/wasm/tool.wasm", "files")
	if n, err := strconv.Atoi(e.out); err != nil || n == 0 || n > int(h.cfg.OpenFiles) {
		t.Errorf("it opened %q files with a limit of %d", e.out, h.cfg.OpenFiles)
	}
}

func notModules(t *testing.T, h *host, b *box) {
	whole, err := os.ReadFile(filepath.Join(h.lower, "usr/lib/wasm/tool.wasm"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{
		"empty": {}, "text": []byte("#!/bin/sh\necho hi\n"), "header alone": []byte("\x00asm"), "another version": []byte("\x00asm\x02\x00\x00\x00"),
		"cut short": whole[:len(whole)/2], "cut at the end": whole[:len(whole)-1], "elf": []byte("\x7fELF" + strings.Repeat("\x00", 64)),
		"unknown import": module(importing("env", "system", "i", "i"), body(i32(1), callOp(0), []byte{0x1a})),
	} {
		b.put(t, "/odd.wasm", text)
		e := b.call(t, "/odd.wasm")
		if e.code() != order.ExitNotModule || !strings.Contains(e.err, "not a module") {
			t.Errorf("%s: code %d, %q", name, e.code(), e.err)
		}
	}
	b.put(t, "/trap.wasm", module(body([]byte{0})))
	b.call(t, "/trap.wasm").want(t, order.ExitTrap, "trap: wasm error: unreachable")
	if _, err := b.begin(t, hostend.ExecSpec{Argv: []string{"nothing"}}); !errors.Is(err, hostend.ErrStartFailed) {
		t.Errorf("a name that nothing has: %v", err)
	}
	if _, err := b.begin(t, hostend.ExecSpec{Argv: []string{"/etc"}}); !errors.Is(err, hostend.ErrStartFailed) {
		t.Errorf("a folder: %v", err)
	}
}

// compileBomb: a small file that is much work to compile ends in bounded time and memory.
func compileBomb(t *testing.T, h *host, b *box) {
	var deep [][]byte
	for range 40_000 {
		deep = append(deep, []byte{0x02, 0x40}) // block
	}
	for i := range 40_000 {
		deep = append(deep, append([]byte{0x41, 0, 0x0d}, uleb(uint64((i*7919)%(40_000-i)))...), []byte{0x0b}) // br_if to somewhere, end
	}
	h.short.put(t, "/bomb.wasm", module(body(deep...)))
	e := h.short.call(t, "/bomb.wasm")
	if !slices.Contains([]int{0, order.ExitTime, order.ExitMemory, order.ExitNotModule}, e.code()) || e.took > h.cfg.CallTime+8*time.Second {
		t.Errorf("code %d, signal %d after %s: %.200q", e.code(), e.exit.Signal, e.took, e.err)
	}
	t.Logf("code %d after %s: %.120q", e.code(), e.took.Round(time.Millisecond), e.err)
	if _, err := h.short.conn.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func otherMemory(t *testing.T, _ *host, b *box) {
	const secret = "the-other-call-holds-this"
	s, err := b.begin(t, hostend.ExecSpec{Key: "keeper", Argv: []string{"tool", "keep", secret}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	if ev, err := s.Next(t.Context()); err != nil || !bytes.HasPrefix(ev.Data, []byte("kept")) {
		t.Fatalf("%+v, %v", ev, err)
	}
	if e := b.call(t, "tool", "scan", secret); e.out != "0" {
		t.Errorf("it found %s of them", e.out)
	}
	if err := b.conn.CloseStdin(t.Context(), "keeper", 0); err != nil {
		t.Fatal(err)
	}
	finish(t, s).want(t, 0, "")
}

func stdinEnds(t *testing.T, _ *host, b *box) {
	for _, argv := range [][]string{{"tool", "stdin"}, {"js", "-"}} {
		key := "in-" + argv[0]
		s, err := b.begin(t, hostend.ExecSpec{Key: key, Argv: argv, Stdin: true})
		if err != nil {
			t.Fatal(err)
		}
		text := "console.log('hello', 1+1)"
		if err := b.conn.WriteStdin(t.Context(), key, 0, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if err := b.conn.CloseStdin(t.Context(), key, uint64(len(text))); err != nil {
			t.Fatal(err)
		}
		e := finish(t, s)
		e.want(t, 0, "")
		if want := map[string]string{"tool": "25:" + text, "js": "hello 2\n"}[argv[0]]; e.out != want {
			t.Errorf("%v: %q, want %q", argv, e.out, want)
		}
	}
	b.call(t, "tool", "stdin").want(t, 0, "") // without a pipe there is nothing to read
}

// badPointers calls every function of WASI with pointers and lengths that lie outside the memory.
func badPointers(t *testing.T, _ *host, b *box) {
	for _, fd := range []int64{3, 1, -16} {
		b.put(t, "/pointers.wasm", everyCall(fd))
		e := b.call(t, "/pointers.wasm")
		if c := e.code(); c != 0 && c != order.ExitTrap && c != order.ExitOutput {
			t.Errorf("descriptor %d: code %d, signal %d, %.300q", fd, c, e.exit.Signal, e.err)
		}
	}
	b.call(t, "tool", "exit", "6").want(t, 6, "")
}

// native: a program of the machine never runs, wherever it lies and whatever its mode is.
func native(t *testing.T, _ *host, b *box) {
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	text = text[:min(len(text), 8<<20)]
	for _, path := range []string{"/program", "/tmp/program", "/usr/lib/wasm/program.wasm"} {
		if _, err := b.conn.WriteFile(t.Context(), hostend.Path{Name: path}, bytes.NewReader(text), hostend.WriteOptions{Mode: mode(0o755)}); err != nil {
			t.Fatal(err)
		}
		b.call(t, path).want(t, order.ExitNotModule, "not a module")
	}
	b.call(t, order.Binary).want(t, order.ExitNotModule, "not a module")
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", b.sb.PID))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if point, flags := f[4], f[5]; point != order.Binary && !strings.Contains(flags, "noexec") || !strings.Contains(flags, "nosuid") {
			t.Errorf("%s is mounted %s", point, flags)
		}
		if !slices.Contains([]string{"/", "/dev", "/dev/null", order.Binary, "/run", "/run/berth", "/tmp"}, f[4]) {
			t.Errorf("it has a mount at %s", f[4])
		}
	}
}

func refusals(t *testing.T, _ *host, b *box) {
	for name, spec := range map[string]hostend.ExecSpec{
		"a terminal": {Argv: []string{"tool"}, PTY: &hostend.Size{Rows: 24, Cols: 80}},
		"a user":     {Argv: []string{"tool"}, User: "nobody"},
	} {
		if _, err := b.begin(t, spec); err == nil || !strings.Contains(err.Error(), "WebAssembly sandbox has no") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// process1 looks at supervisor and call from the host.
func process1(t *testing.T, _ *host, b *box) {
	s, err := b.begin(t, hostend.ExecSpec{Key: "looked-at", Argv: []string{"tool", "keep", "x"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	pids := b.processes(t)
	if len(pids) < 2 {
		t.Fatalf("processes: %v", pids)
	}
	for _, pid := range pids {
		status := statusOf(t, pid)
		for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if strings.Trim(status[set], "0") != "" {
				t.Errorf("process %d: %s is %s", pid, set, status[set])
			}
		}
		if status["NoNewPrivs"] != "1" || status["Seccomp"] != "2" || strings.HasPrefix(status["Uid"], "0\t") {
			t.Errorf("process %d: no_new_privs %s, seccomp %s, user %s", pid, status["NoNewPrivs"], status["Seccomp"], status["Uid"])
		}
		for _, kind := range []string{"user", "mnt", "pid", "net", "ipc", "uts"} {
			mine, _ := os.Readlink("/proc/self/ns/" + kind)
			theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
			first, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", b.sb.PID, kind))
			if err != nil || theirs == mine || pid != b.sb.PID && theirs == first {
				t.Errorf("process %d shares its %s namespace", pid, kind)
			}
		}
	}
	if err := b.conn.CloseStdin(t.Context(), "looked-at", 0); err != nil {
		t.Fatal(err)
	}
	finish(t, s).want(t, 0, "")
}

func (b *box) processes(t testing.TB) []int {
	t.Helper()
	var out []int
	for _, dir := range b.d.cgroupFolders(b.sb.Cgroup)[:1] {
		text, err := os.ReadFile(dir + "/box/cgroup.procs")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range strings.Fields(string(text)) {
			pid, _ := strconv.Atoi(f)
			out = append(out, pid)
		}
	}
	return out
}

func statusOf(t testing.TB, pid int) map[string]string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			out[k] = strings.TrimSpace(v)
		}
	}
	return out
}

func javascript(t *testing.T, h *host, b *box) {
	for _, c := range []struct {
		script, out, err string
		code             int
	}{
		{"console.log(JSON.stringify({a: [1, 2]}), args.length, args[0])", "{\"a\":[1,2]} 1 x y\n", "", 0},
		{"writeFile('/note', 'text'); console.log(readFile('/note'), exists('/none'), listDir('/usr/lib/wasm').length > 0)", "text false true\n", "", 0},
		{"console.log('before'); throw new Error('broken')", "before\n", "Uncaught Error: broken", 1},
		{"let x = ;", "", "SyntaxError", 1},
		{"exit(9)", "", "", 9},
		{"readFile('/none')", "", "No such file", 1},
		{"function f() { f() } f()", "", "", 1},
	} {
		e := b.call(t, "js", "-e", c.script, "x y")
		e.want(t, c.code, c.err)
		if e.out != c.out {
			t.Errorf("%s: %q, want %q", c.script, e.out, c.out)
		}
	}
	h.short.call(t, "js", "-e", "for(;;){}").want(t, order.ExitTime, "time limit")
	b.call(t, "js", "/none.js").want(t, 2, "/none.js")
}

// oneUse: what a script leaves in its world is not there for the next, also in a process that was
// started ahead.
func oneUse(t *testing.T, _ *host, b *box) {
	pids := map[int]bool{}
	for range 4 {
		s, err := b.begin(t, hostend.ExecSpec{Argv: []string{"js", "-e", "console.log(typeof left, env.MINE); left = 1"}, Env: []string{"MINE=yes"}})
		if err != nil {
			t.Fatal(err)
		}
		if pids[s.Info().Pid] {
			t.Error("two calls had one process")
		}
		pids[s.Info().Pid] = true
		if e := finish(t, s); e.out != "undefined yes\n" {
			t.Errorf("it says %q %q, %+v", e.out, e.err, e.exit)
		}
	}
}

// ownModule: a session's module in the place of the template's is what runs, with machine code of its
// own.
func ownModule(t *testing.T, _ *host, b *box) {
	b.put(t, "/usr/lib/wasm/mine.wasm", module(importing("wasi_snapshot_preview1", "proc_exit", "i", ""), body(i32(11), callOp(0))))
	for range 2 {
		b.call(t, "mine").want(t, 11, "")
	}
	b.put(t, "/usr/lib/wasm/mine.wasm", module(importing("wasi_snapshot_preview1", "proc_exit", "i", ""), body(i32(12), callOp(0))))
	b.call(t, "mine").want(t, 12, "")
}

func quiesce(t *testing.T, _ *host, b *box) {
	s, err := b.begin(t, hostend.ExecSpec{Key: "long", Argv: []string{"tool", "keep", "x"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(t.Context()); err != nil { // it runs
		t.Fatal(err)
	}
	q, err := b.conn.Quiesce(t.Context(), 2*time.Second)
	if err != nil || q.Remaining != 0 {
		t.Errorf("%+v, %v", q, err)
	}
	if e := finish(t, s); e.code() != 128+int(unix.SIGTERM) {
		t.Errorf("code %d, signal %d", e.code(), e.exit.Signal)
	}
}

// TestFaultMachineCodeIsOutOfReach: what a module writes anywhere changes no machine code that a later
// call runs, and the host's folder is not in its sight.
func TestFaultMachineCodeIsOutOfReach(t *testing.T) {
	h := newHost(t, true)
	d := openDriver(t, h)
	a, b := h.open(t, d, 1), h.open(t, d, 2)
	before := codeSum(t, d.code.dir)
	script := `let seen = []; function walk(p, n) { if (n > 6) return; let l = []; try { l = listDir(p) } catch (e) { return }
	  for (const f of l) { const q = p + '/' + f; seen.push(q); try { if (stat(q).isDir) walk(q, n + 1) } catch (e) {} } }
	  walk('', 0); console.log(seen.filter(f => f.includes('wazero')).length)`
	if e := a.call(t, "js", "-e", script); e.out != "0\n" {
		t.Errorf("it sees machine code: %q %q", e.out, e.err)
	}
	for _, path := range []string{"/wazero-v1/x", "/done", "/dev/x", "/dev/berth-wasm", "/run/berth/x"} {
		_ = a.call(t, "tool", "write", path, "poison")
	}
	if e := a.call(t, "tool", "write", "/dev/berth-wasm", "x"); e.code() == 0 {
		t.Error("it wrote to the program")
	}
	if after := codeSum(t, d.code.dir); after != before {
		t.Error("the host's machine code changed")
	}
	b.call(t, "tool", "exit", "3").want(t, 3, "")
}

// codeSum is a word that changes with any of the files below dir.
func codeSum(t testing.TB, dir string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		st, err := e.Info()
		if err == nil {
			fmt.Fprintln(&out, path, st.Size(), st.ModTime(), st.Mode())
			if st.Mode().Perm()&0o022 != 0 {
				t.Errorf("%s is writable by others", path)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// put writes a file of the session.
func (b *box) put(t testing.TB, path string, text []byte) {
	t.Helper()
	if _, err := b.conn.WriteFile(t.Context(), hostend.Path{Name: path}, bytes.NewReader(text), hostend.WriteOptions{Mode: mode(0o644)}); err != nil {
		t.Fatal(err)
	}
}
