package hostile

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// wasmTier runs modules alone: rows of its own, without users.
const wasmTier = "wasm"

const insideWasm = "/root/probe.wasm"

// module builds the attacker of tier wasm.
func module(t *testing.T) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "probe.wasm")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "./wasmprobe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=wasip1", "GOARCH=wasm")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the module: %v\n%s", err, out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// wasmTraces are those that need more than one call.
var wasmTraces = []struct {
	name string
	do   func(*world, *testing.T)
}{
	{"a loop without end ends with the call's time, and other calls run meanwhile", (*world).times},
	{"no two calls draw the same random numbers, and the clock is right", (*world).randoms},
	{"the memory of a call is new", (*world).earlier},
	{"links in the place of its own folders lead nowhere", (*world).ownFolders},
}

// moduleRows runs every row of tier wasm.
func moduleRows(t *testing.T, e *testenv.Env) {
	t.Run(wasmTier, func(t *testing.T) {
		w := enterWasm(t, e)
		t.Run("control", w.wasmControl)
		before := look(t)
		for _, g := range wasmGroups {
			t.Run(strings.ReplaceAll(g.Name, " ", "-"), func(t *testing.T) {
				for _, row := range g.Rows {
					t.Run(row.Name, func(t *testing.T) { counted(t, wasmTier); w.mustFail(t, row) })
				}
			})
		}
		t.Run("programs", w.programs)
		t.Run("scripts", w.scripts)
		for _, r := range wasmTraces {
			t.Run(r.name, func(t *testing.T) { counted(t, wasmTier); r.do(w, t) })
		}
		for what, was := range before {
			if is := look(t)[what]; is != was {
				t.Errorf("the host's %s was %q and is %q", what, was, is)
			}
		}
		w.aliveWasm(t)
	})
}

// enterWasm opens the two sessions; the victim has its mark in a file, and in the arguments and the
// environment of a call that runs all the time.
func enterWasm(t *testing.T, e *testenv.Env) *world {
	t.Helper()
	w := sessions(t, e, wasmTier)
	program := module(t)
	for _, s := range []*sdk.Session{w.attacker, w.victim} {
		put(t, s, insideWasm, program)
	}
	put(t, w.victim, "/root/"+w.mark, []byte(w.mark))
	p, err := w.victim.Exec(t.Context(), sdk.Cmd{Args: []string{insideWasm, "sleep", w.mark}, Env: map[string]string{"SECRET": w.mark}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Detach)
	return w
}

func (w *world) mustFail(t *testing.T, row Row) {
	o, err := w.try("", row.Do...)
	switch {
	case err != nil:
		t.Fatal(err)
	case o.Through:
		t.Errorf("it came through: %s", o.Detail)
	default:
		t.Logf("refused: %s", o.Detail)
	}
}

// wasmControl: what is looked for is there, and the module finds it in its own session.
func (w *world) wasmControl(t *testing.T) {
	own := *w
	own.attacker = w.victim
	for _, do := range [][]string{{"look-files", "MARK"}, {"look-names", "MARK"}, {"read", "/etc/passwd"}, {"list", "/"}, {"put", "/root/own", "x"}} {
		if o, err := own.try("", do...); err != nil || !o.Through {
			t.Errorf("the module cannot %v in its own session: %s, %v", do, o.Detail, err)
		}
	}
	if o, err := own.try("", "look-self", "none", w.mark); err != nil || o.Through {
		t.Errorf("look-self finds the words that it was asked for: %s, %v", o.Detail, err)
	}
}

// runWasm runs a program of the attacker and returns what it printed.
func (w *world) runWasm(t *testing.T, c sdk.Cmd) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out, errOut bytes.Buffer
	c.Stdout, c.Stderr = &out, &errOut
	err := w.attacker.Run(ctx, c)
	if ctx.Err() != nil {
		t.Errorf("it did not end within a minute: %v", err)
	}
	var exit *sdk.ExitError
	if errors.As(err, &exit) && exit.Code == notWalled {
		t.Errorf("nothing of it ran: %.200s", errOut.String())
	}
	t.Logf("%v: %.200s", err, errOut.String())
	return out.String(), err
}

func (w *world) programs(t *testing.T) {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	contents := map[string][]byte{
		"ELF": self[:min(len(self), 1<<20)], "CUT": module(t)[:100_000],
		// One import, env.system, of a type without parameters.
		"NEEDS": []byte("\x00asm\x01\x00\x00\x00\x01\x04\x01\x60\x00\x00\x02\x0e\x01\x03env\x06system\x00\x00"),
		// One memory of 65536 pages and a function _start that does nothing.
		"LARGE": []byte("\x00asm\x01\x00\x00\x00\x01\x04\x01\x60\x00\x00\x03\x02\x01\x00\x05\x05\x01\x00\x80\x80\x04\x07\x0a\x01\x06_start\x00\x00\x0a\x04\x01\x02\x00\x0b"),
	}
	for _, p := range wasmPrograms {
		t.Run(p.name, func(t *testing.T) {
			counted(t, wasmTier)
			if p.content != "" {
				b, known := contents[p.content]
				if !known {
					b = []byte(p.content)
				}
				put(t, w.attacker, p.path, b)
			}
			out, err := w.runWasm(t, sdk.Cmd{Args: []string{p.path, "-c", "id"}})
			if err == nil || out != "" {
				t.Errorf("it ran and said %q", out)
			}
		})
	}
}

func (w *world) scripts(t *testing.T) {
	if out, err := w.runWasm(t, sdk.Cmd{Args: []string{"js", "-e", "globalThis.left = 'left'; print('yes')"}}); err != nil || out != "yes" {
		t.Fatalf("JavaScript does not run here: %q, %v", out, err)
	}
	for _, s := range wasmScripts {
		t.Run(s.name, func(t *testing.T) {
			counted(t, wasmTier)
			if out, err := w.runWasm(t, sdk.Cmd{Args: []string{"js", "-e", s.text}}); out != "" {
				t.Errorf("it came through: %q, %v", out, err)
			}
		})
	}
}

// times: a loop without end, in a module and in a script, ends with the call's time, and the session
// answers meanwhile.
func (w *world) times(t *testing.T) {
	for _, args := range [][]string{{insideWasm, "loop"}, {"js", "-e", "for(;;);"}} {
		began := time.Now()
		p, err := w.attacker.Exec(t.Context(), sdk.Cmd{Args: args, Timeout: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if o, err := w.try("", "clock"); err != nil || !o.Through {
			t.Errorf("another call beside an endless one: %s, %v", o.Detail, err)
		}
		err = p.Wait()
		if took := time.Since(began); took > 30*time.Second || err == nil {
			t.Errorf("%v ended after %s: %v", args, took, err)
		}
	}
}

func (w *world) randoms(t *testing.T) {
	seen := map[string]bool{}
	other := *w
	other.attacker = w.victim
	for _, x := range []*world{w, w, &other, &other} {
		o, err := x.try("", "random")
		if err != nil || !o.Through || len(o.Detail) != 64 || seen[o.Detail] {
			t.Errorf("random numbers %q, %v", o.Detail, err)
		}
		seen[o.Detail] = true
	}
	o, err := w.try("", "clock")
	ms, perr := strconv.ParseInt(o.Detail, 10, 64)
	if off := time.Since(time.UnixMilli(ms)); errors.Join(err, perr) != nil || off < -time.Second || off > 30*time.Second {
		t.Errorf("its clock is off by %s: %v, %v", off, err, perr)
	}
}

// earlier: a call that filled its memory is followed by one whose memory is looked through from its
// first page to its last: it traps at the first byte that is not zero.
func (w *world) earlier(t *testing.T) {
	if o, err := w.try("", "keep", "left-behind"); err != nil || !o.Through {
		t.Fatalf("%s, %v", o.Detail, err)
	}
	// (memory 512) (func $_start (local i32) (loop (if (i64.ne (i64.load (local 0)) (0)) (unreachable))
	//   (local 0 += 8) (br_if (local 0 < 512 * 65536))))
	code := "\x01\x01\x7f\x03\x40\x20\x00\x29\x03\x00\x42\x00\x52\x04\x40\x00\x0b\x20\x00\x41\x08\x6a\x22\x00\x41\x80\x80\x80\x10\x49\x0d\x00\x0b\x0b"
	text := "\x00asm\x01\x00\x00\x00\x01\x04\x01\x60\x00\x00\x03\x02\x01\x00\x05\x04\x01\x00\x80\x04\x07\x0a\x01\x06_start\x00\x00" +
		"\x0a" + string(rune(len(code)+2)) + "\x01" + string(rune(len(code))) + code
	put(t, w.attacker, "/root/zero.wasm", []byte(text))
	if out, err := w.runWasm(t, sdk.Cmd{Args: []string{"/root/zero.wasm"}}); err != nil || out != "" {
		t.Errorf("memory that is not new: %q, %v", out, err)
	}
}

// ownFolders: a session puts links to the host's folders where its sandbox is mounted together, and
// sleeps. The wake leads nowhere else, or fails with a reason; the host's folder stays as it is.
func (w *world) ownFolders(t *testing.T) {
	canary := t.TempDir()
	o, err := w.try("", "leave", canary)
	if err != nil || !o.Through {
		t.Fatalf("%s, %v", o.Detail, err)
	}
	t.Logf("left: %s", o.Detail)
	if err := w.rewake(t); err != nil {
		t.Logf("the wake is refused: %v", err)
	} else {
		w.ownAtMost(t, "/root/left-up", "/etc/shadow")
		w.mustFail(t, Row{Do: []string{"read", "/root/left-one", "/proc/version", "/proc/1/environ"}})
		w.mustFail(t, Row{Do: []string{"make", "/run/berth/session.json", "/dev/new"}})
	}
	if entries, err := os.ReadDir(canary); err != nil || len(entries) > 0 {
		t.Errorf("the host's folder holds %v, %v", entries, err)
	}
}

// ownAtMost: a link leads to the file of the session's own image, or nowhere.
func (w *world) ownAtMost(t *testing.T, link, file string) {
	t.Helper()
	to, err := w.try("", "read", link)
	if err != nil {
		t.Fatal(err)
	}
	own, err := w.try("", "read", file)
	if err != nil {
		t.Fatal(err)
	}
	if to.Through && (!own.Through || strings.ReplaceAll(to.Detail, link, file) != own.Detail) {
		t.Errorf("%s leads to something that is not the session's: %s, not %s", link, to.Detail, own.Detail)
	}
}

func (w *world) aliveWasm(t *testing.T) {
	t.Helper()
	if b, err := w.victim.Files().ReadAll(t.Context(), "/root/"+w.mark); err != nil || string(b) != w.mark {
		t.Errorf("the other session's file holds %q, %v", b, err)
	}
	other := *w
	other.attacker = w.victim
	if o, err := other.try("", "read", "/root/"+w.mark); err != nil || !o.Through {
		t.Errorf("the other session does not answer any more: %s, %v", o.Detail, err)
	}
}
