//go:build linux

package microvm

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// warmSpec is what a warm sandbox for the spec is prepared for.
func warmSpec(spec driver.Spec) driver.WarmSpec {
	return driver.WarmSpec{ID: ids.NewWarmID(), Tier: spec.Tier, Image: spec.Image, RunDir: spec.RunDir, Init: spec.Init, Guest: spec.Guest,
		Limits: driver.Limits{CPUMillis: spec.Limits.CPUMillis, MemoryBytes: spec.Limits.MemoryBytes, PIDs: 32}}
}

func prepare(t testing.TB, d *Driver, spec driver.Spec) driver.Sandbox {
	t.Helper()
	sb, err := d.Prepare(t.Context(), warmSpec(spec))
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// startWarm is start by way of a warm sandbox.
func startWarm(t testing.TB, d *Driver, spec driver.Spec) (driver.Sandbox, *drivertest.Talk) {
	t.Helper()
	w := prepare(t, d, spec)
	sb, err := d.Claim(t.Context(), w.ID, spec)
	if err != nil {
		t.Fatal(err)
	}
	k, err := drivertest.Open(sb.Channel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Close)
	if _, err := k.Do("echo", "hello"); err != nil {
		t.Fatal(err)
	}
	return sb, k
}

// files are what a process has open, without what differs from one to the next of the same kind.
func files(t *testing.T, pid int) []string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue
		}
		if i := strings.Index(to, ":["); i > 0 {
			to = to[:i]
		}
		flags := ""
		info, _ := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, e.Name()))
		for line := range strings.Lines(string(info)) {
			if f, ok := strings.CutPrefix(line, "flags:"); ok {
				flags = strings.TrimSpace(f)
			}
		}
		out = append(out, to+" "+flags)
	}
	slices.Sort(out)
	return out
}

// TestAClaimedMachineIsThatOfAColdOne: a QEMU that was prepared and claimed holds the files that a cold
// one does and no other, is confined in the same way, and its guest sees the disk it was given.
func TestAClaimedMachineIsThatOfAColdOne(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	one, two := h.Spec(t, 1, 1), h.Spec(t, 2, 1)
	one.Limits.DiskBytesPerSecond, one.Limits.DiskOpsPerSecond = 50<<20, 2000
	two.Limits = one.Limits
	cold, kc := start(t, d, one)
	warm, kw := startWarm(t, d, two)
	same := func(what string, a, b []string) {
		t.Helper()
		if !slices.Equal(a, b) {
			t.Errorf("%s:\ncold %q\nwarm %q", what, a, b)
		}
	}
	own := func(list []string, spec driver.Spec) []string {
		for i := range list {
			list[i] = strings.ReplaceAll(list[i], filepath.Dir(spec.DiskImage), "OWN")
		}
		return list
	}
	same("open files", own(files(t, cold.PID), one), own(files(t, warm.PID), two))
	if got := files(t, prepare(t, d, two).PID); slices.ContainsFunc(got, func(f string) bool { return strings.Contains(f, "disk.ext4") }) {
		t.Errorf("one that is nobody's has a disk: %q", got)
	}
	same("rights", rights(t, cold.PID), rights(t, warm.PID))
	same("block devices", blocks(t, d, cold.ID), blocks(t, d, warm.ID))
	same("limits of the disk", []string{ioOf(t, d, cold.ID)}, []string{ioOf(t, d, warm.ID)})
	bytes := uint64(diskBytes + 8<<20)
	for id, k := range map[ids.SandboxID]*drivertest.Talk{cold.ID: kc, warm.ID: kw} {
		if err := d.ResizeDisk(t.Context(), id, bytes); err != nil {
			t.Errorf("grow the disk of %s: %v", id, err)
		}
		if got, err := k.Do("hostname"); err != nil || !strings.HasPrefix(got, "box-") {
			t.Errorf("%s says %q, %v", id, got, err)
		}
	}
	if st, err := os.Stat(two.DiskImage); err != nil || uint64(st.Size()) != bytes {
		t.Errorf("its image: %+v, %v", st, err)
	}
}

// rights are what the kernel holds a process to.
func rights(t *testing.T, pid int) (out []string) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		for _, name := range []string{"Cap", "NoNewPrivs", "Seccomp:", "Groups"} {
			if strings.HasPrefix(line, name) {
				out = append(out, strings.TrimSpace(line))
			}
		}
	}
	return out
}

// blocks are QEMU's nodes with how it treats them, and the sets of files that they were opened from.
func blocks(t *testing.T, d *Driver, id ids.SandboxID) (out []string) {
	t.Helper()
	var nodes []struct {
		Name     string `json:"node-name"`
		Driver   string `json:"drv"`
		ReadOnly bool   `json:"ro"`
		Zeroes   string `json:"detect_zeroes"`
		Cache    any    `json:"cache"`
		Image    struct {
			Size uint64 `json:"virtual-size"`
		} `json:"image"`
	}
	if err := d.vmOf(id).call(t.Context(), "query-named-block-nodes", nil, &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		out = append(out, fmt.Sprintf("%+v", n))
	}
	slices.Sort(out)
	var sets []any
	if err := d.vmOf(id).call(t.Context(), "query-fdsets", nil, &sets); err != nil {
		t.Fatal(err)
	}
	return append(out, fmt.Sprint(len(sets), " sets"))
}

func ioOf(t *testing.T, d *Driver, id ids.SandboxID) string {
	t.Helper()
	var limits map[string]any
	if err := d.vmOf(id).call(t.Context(), "qom-get", map[string]any{"path": qomThrottle, "property": "limits"}, &limits); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(limits["bps-total"], " ", limits["iops-total"])
}

// TestWhatAMachineBeginsWithMustFit: what a claim cannot change is what a machine has from its first
// instruction on; all else it brings.
func TestWhatAMachineBeginsWithMustFit(t *testing.T) {
	d := &Driver{}
	base := driver.Spec{Tier: driver.MicroVM, Image: driver.Image{Digest: "sha256:a", Block: "/a"},
		Limits: driver.Limits{CPUMillis: 1500, MemoryBytes: 256 << 20, PIDs: 64}}
	w := warmSpec(base)
	for name, c := range map[string]struct {
		change func(*driver.Spec)
		fits   bool
	}{
		"the same":          {func(*driver.Spec) {}, true},
		"another name":      {func(s *driver.Spec) { s.Hostname, s.RunDir, s.Env = "x", "/run/x", []string{"A=b"} }, true},
		"another program":   {func(s *driver.Spec) { s.Init = []string{"/x"} }, true},
		"less of two cores": {func(s *driver.Spec) { s.Limits.CPUMillis = 1001 }, true},
		"other limits":      {func(s *driver.Spec) { s.Limits.PIDs, s.Limits.OpenFiles, s.Limits.DiskOpsPerSecond = 9, 99, 999 }, true},
		"a part of a page":  {func(s *driver.Spec) { s.Limits.MemoryBytes += 4096 }, true},
		"three cores":       {func(s *driver.Spec) { s.Limits.CPUMillis = 2001 }, false},
		"one core":          {func(s *driver.Spec) { s.Limits.CPUMillis = 1000 }, false},
		"more memory":       {func(s *driver.Spec) { s.Limits.MemoryBytes += 1 << 20 }, false},
		"another image":     {func(s *driver.Spec) { s.Image.Digest = "sha256:b" }, false},
		"a new image file":  {func(s *driver.Spec) { s.Image.Block = "/b" }, false},
		"another tier":      {func(s *driver.Spec) { s.Tier = driver.Kata }, false},
	} {
		spec := base
		c.change(&spec)
		if why := d.Fits(w, spec); (why == "") != c.fits {
			t.Errorf("%s: %q", name, why)
		}
	}
}

// TestAMachineThatStandsStillIsNotWarm: one that does not answer is given up, and another one is made.
func TestAMachineThatStandsStillIsNotWarm(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	tries := 0
	d.run.Fault = func(name string) error {
		if name != "warm.guest" {
			return nil
		}
		if tries++; tries == 1 {
			return fmt.Errorf("test: %w", errNoAnswer)
		}
		return nil
	}
	sb := prepare(t, d, h.Spec(t, 1, 1))
	if tries != 2 || !sb.Warm() {
		t.Errorf("after %d tries: %+v", tries, sb)
	}
	tries = -10 // it never answers
	d.run.Fault = func(name string) error {
		if name != "warm.machine" {
			return nil
		}
		tries++
		return fmt.Errorf("test: %w", errNoAnswer)
	}
	w := warmSpec(h.Spec(t, 2, 1))
	if _, err := d.Prepare(t.Context(), w); err == nil || tries != bootTries-10 || len(d.parts(w.ID)) > 0 {
		t.Errorf("%d tries, %v, left %v", tries+10, err, d.parts(w.ID))
	}
}

// TestWarmMachinesWithoutATemplate: they are booted, and claimed as others are.
func TestWarmMachinesWithoutATemplate(t *testing.T) {
	h := newHost(t)
	h.cfg.NoTemplates = true
	d := openDriver(t, h)
	_, k := startWarm(t, d, h.Spec(t, 1, 1))
	if got, err := k.Do("hostname"); err != nil || got != "box-1" {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestAMachineIsNotToldWhatItHas: a run folder is sent again when something of it has changed, or when it
// is not known what the machine has, and not right after the machine got it.
func TestAMachineIsNotToldWhatItHas(t *testing.T) {
	file := func(text string, mode uint32) map[string]vmwire.File {
		return map[string]vmwire.File{"a": {Data: []byte(text), Mode: mode}}
	}
	f := &folders{sent: map[ids.SandboxID]map[string]vmwire.File{"known": file("x", 0o444), "failed": nil}}
	for name, c := range map[string]struct {
		id    ids.SandboxID
		files map[string]vmwire.File
		has   bool
	}{
		"the same":      {"known", file("x", 0o444), true},
		"other content": {"known", file("y", 0o444), false},
		"another mode":  {"known", file("x", 0o400), false},
		"one more":      {"known", map[string]vmwire.File{"a": file("x", 0o444)["a"], "b": {}}, false},
		"not known":     {"failed", file("x", 0o444), false},
		"another one":   {"other", file("x", 0o444), false},
	} {
		if got := f.has(c.id, c.files); got != c.has {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestADiskThatGrewWhileNobodyHadIt: the file system fills its image after a wake of either kind, also
// when that was made larger than what it was.
func TestADiskThatGrewWhileNobodyHadIt(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	for i, start := range []func(testing.TB, *Driver, driver.Spec) (driver.Sandbox, *drivertest.Talk){start, startWarm} {
		spec := h.Spec(t, i, 1)
		if err := os.Truncate(spec.DiskImage, 2*diskBytes); err != nil {
			t.Fatal(err)
		}
		sb, k := start(t, d, spec)
		if out, err := k.Do("sync", "/var/much", "70"); err != nil || out != "70" {
			t.Errorf("%s: it does not hold more than before: %q, %v", sb.ID, out, err)
		}
	}
}
