//go:build linux

package microvm

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// BenchmarkColdBoot is a boot up to the hello of the guest.
func BenchmarkColdBoot(b *testing.B) {
	h := newHost(b)
	d := openDriver(b, h)
	for b.Loop() {
		helper, err := d.boot(b.Context(), probePrefix, shape{Accel: d.accel.Name, Memory: probeMemory, CPUs: 1, RootBytes: 4096}, nil)
		if err != nil {
			b.Fatal(err)
		}
		if err := helper.remove(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkClone is a sandbox from a template, with the time of its parts and the memory that it has
// for itself.
func BenchmarkClone(b *testing.B) {
	h := newHost(b)
	d := openDriver(b, h)
	first := h.Spec(b, 0, 1)
	began := time.Now()
	if err := d.Snapshot(b.Context(), driver.MicroVM, first.Image, first.Limits); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(time.Since(began).Milliseconds()), "ms/template")
	took := map[string]time.Duration{}
	var private, n uint64
	for b.Loop() {
		n++
		sb, k := start(b, d, h.Spec(b, int(n), 1))
		for _, s := range sb.Steps {
			took[strings.TrimPrefix(s.Name, "sandbox.")] += s.Took
		}
		private += privateKiB(b, sb.PID)
		b.StopTimer()
		k.Close()
		if err := d.Stop(b.Context(), sb.ID); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	for _, s := range []string{"machine", "restore", "personalise"} {
		b.ReportMetric(float64(took[s].Milliseconds())/float64(n), "ms/"+s)
	}
	b.ReportMetric(float64(private)/1024/float64(n), "MiB-private/clone")
}

// privateKiB is what a process has of memory that nobody else has.
func privateKiB(t testing.TB, pid int) (sum uint64) {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		var n uint64
		if _, err := fmt.Sscanf(line, "Private_Dirty: %d kB", &n); err == nil {
			sum += n
		}
		if _, err := fmt.Sscanf(line, "Private_Clean: %d kB", &n); err == nil {
			sum += n
		}
	}
	return sum
}
