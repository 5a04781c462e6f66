//go:build linux

package microvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail"
)

// onlyTemplate returns the one template of a driver's shape.
func (d *Driver) templateFor(t *testing.T, s shape) *template {
	t.Helper()
	one, err := d.templates.get(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return one
}

func sumOf(t *testing.T, f *os.File) string {
	t.Helper()
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, 1<<40)); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// TestNoCloneChangesWhatOthersAreMadeOf: clones that fill their memory, give it back and fill it
// again leave the template as it was; with a balloon or the reporting of free pages they would punch
// holes into it, and others would see what they wrote, or nothing where something was.
func TestNoCloneChangesWhatOthersAreMadeOf(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	one := h.Spec(t, 1, 1)
	s, err := d.shapeOf(one.Image, one.Limits)
	if err != nil {
		t.Fatal(err)
	}
	tpl := d.templateFor(t, s)
	before, state := sumOf(t, tpl.memory), sumOf(t, tpl.state)

	_, ka := start(t, d, one)
	sb, kb := start(t, d, h.Spec(t, 2, 1))
	for round := range 2 {
		for _, k := range []interface {
			Do(string, ...string) (string, error)
		}{ka, kb} {
			if out, err := k.Do("spawn", "alloc", "90"); err != nil || out != strconv.Itoa(90<<20) {
				t.Fatalf("round %d: %s, %v", round, out, err)
			}
		}
		if got := sumOf(t, tpl.memory); got != before {
			t.Fatal("the template's memory has changed: clones see each other's writes")
		}
	}
	if sumOf(t, tpl.state) != state {
		t.Error("the template's devices have changed")
	}
	for _, k := range []interface {
		Do(string, ...string) (string, error)
	}{ka, kb} {
		if got, err := k.Do("echo", "alive"); err != nil || got != "alive" {
			t.Errorf("a clone says %q, %v", got, err)
		}
	}
	_, kc := start(t, d, h.Spec(t, 3, 1)) // the template still makes machines
	if got, err := kc.Do("hostname"); err != nil || got != "box-3" {
		t.Errorf("got %q, %v", got, err)
	}
	line, err := os.ReadFile("/proc/" + strconv.Itoa(sb.PID) + "/cmdline")
	if err != nil || strings.Contains(string(line), "balloon") || strings.Contains(string(line), "free-page") {
		t.Errorf("a clone has what punches holes: %q, %v", line, err)
	}
}

// TestATemplateIsSealed: nobody who holds its files can write to them or punch holes into them, also
// through a memory map; a QEMU that was taken over has them open for writing.
func TestATemplateIsSealed(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	spec := h.Spec(t, 1, 1)
	s, err := d.shapeOf(spec.Image, spec.Limits)
	if err != nil {
		t.Fatal(err)
	}
	memory, state, err := d.templates.open(d.templateFor(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	defer state.Close()
	if _, err := memory.WriteAt([]byte("x"), 4096); err == nil {
		t.Error("it can be written")
	}
	if err := memory.Truncate(0); err == nil {
		t.Error("it can be cut")
	}
	if err := unix.Fallocate(int(memory.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 1<<20); err == nil {
		t.Error("it can be holed")
	}
	if _, err := unix.Mmap(int(memory.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("it can be mapped for writing")
	}
	if _, err := state.Write([]byte("x")); err == nil {
		t.Error("the state can be written")
	}
	m, err := unix.Mmap(int(memory.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatalf("a clone cannot have copies: %v", err)
	}
	_ = unix.Munmap(m)
}

// TestWithoutATemplateMachinesBoot: a template that cannot be made costs time, not sessions.
func TestWithoutATemplateMachinesBoot(t *testing.T) {
	h := newHost(t)
	h.cfg.NoTemplates = true
	d := openDriver(t, h)
	if d.Capabilities()["microvm"].Clones {
		t.Error("it says that it clones")
	}
	spec := h.Spec(t, 1, 1)
	if err := d.Snapshot(t.Context(), spec.Tier, spec.Image, spec.Limits); err == nil {
		t.Error("it made a template")
	}
	_, k := start(t, d, spec)
	if got, err := k.Do("hostname"); err != nil || got != "box-1" {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestTemplatesAreFew: the one that was not used for longest goes; who gives up waiting for one does
// not keep others from it.
func TestTemplatesAreFew(t *testing.T) {
	d := &Driver{cfg: Config{Templates: 2}}
	ts := newTemplates(d)
	defer ts.close()
	for i := range 4 {
		f, err := memfd("t", 4096)
		if err != nil {
			t.Fatal(err)
		}
		one := &template{made: make(chan struct{}), used: time.Unix(int64(10-i), 0), memory: f}
		close(one.made)
		ts.mu.Lock()
		ts.all[shape{Memory: uint64(i)}] = one
		ts.evict(one)
		ts.mu.Unlock()
	}
	if len(ts.all) != 2 || ts.all[shape{Memory: 0}] == nil || ts.all[shape{Memory: 3}] == nil {
		t.Errorf("left %v", ts.all)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	ts.all[shape{Memory: 9}] = &template{made: make(chan struct{})}
	if _, err := ts.get(gone, shape{Memory: 9}); err == nil {
		t.Error("it waited for ever")
	}
	delete(ts.all, shape{Memory: 9})
}

// TestATemplateHasAllOfItsPages: a hole that a clone fills is charged to it beside its own copy, and a
// machine that uses all of its memory was killed for it.
func TestATemplateHasAllOfItsPages(t *testing.T) {
	const size = 8 << 20
	f, err := memfd("t", size)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != size || st.Blocks*512 < size {
		t.Errorf("%d bytes, of which %d are there, want all of %d", st.Size, st.Blocks*512, size)
	}
}

// TestHelpersOfADeadProcessAreSwept: a template's machine whose host agent was killed is removed by
// the next one, which gives its user back.
func TestHelpersOfADeadProcessAreSwept(t *testing.T) {
	h := newHost(t)
	dead := h.Open(t).(*Driver)
	helper, err := dead.boot(t.Context(), templatePrefix, shape{Accel: dead.accel.Name, Memory: probeMemory, CPUs: 1, RootBytes: 4096}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := helper.vm.proc
	helper.vm.close()
	_ = dead.Close() // a kill closes its files as well
	d := openDriver(t, h)
	if p.Lives() || exists(filepath.Join(h.cfg.Run, helper.name)) || d.cgroup.Exists(helper.cgroup()) {
		t.Error("it is left")
	}
	if left, _ := os.ReadDir(h.cfg.UserDir); len(left) != 0 {
		t.Errorf("users in use: %v", left)
	}
	if (jail.Process{PID: 1}).Lives() {
		t.Error("another process passes for QEMU")
	}
}
