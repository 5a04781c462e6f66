//go:build linux

package microvm

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// shellImage is an image with a shell, or the one that BERTH_BENCH_IMAGE names.
func shellImage(b *testing.B) string {
	b.Helper()
	if own := os.Getenv("BERTH_BENCH_IMAGE"); own != "" {
		return own
	}
	shell, err := exec.LookPath("busybox")
	if err != nil {
		b.Skipf("skipped: %v", err)
	}
	dir := b.TempDir()
	lower := filepath.Join(dir, "image")
	for _, d := range []string{"bin", "proc", "sys", "dev", "run", "tmp", "etc", "root"} {
		if err := os.MkdirAll(filepath.Join(lower, d), 0o755); err != nil {
			b.Fatal(err)
		}
	}
	run(b, "cp", shell, filepath.Join(lower, "bin/sh"))
	image := filepath.Join(dir, "root.erofs")
	run(b, "mkfs.erofs", "-zlz4", image, lower)
	return image
}

// firstOutput runs a command in a sandbox and returns when its output is there.
func firstOutput(b *testing.B, sb driver.Sandbox) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
	defer cancel()
	rw, err := hostend.OpenChannel(ctx, sb.Channel.Stdin, sb.Channel.Stdout, sb.Channel.Socket)
	if err != nil {
		b.Fatal(err)
	}
	c, err := hostend.Attach(ctx, rw, rw, hostend.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	s, err := c.StartExec(ctx, hostend.ExecSpec{Key: "one", Argv: []string{"/bin/sh", "-c", "echo hello"}})
	if err != nil {
		b.Fatal(err)
	}
	if ev, err := s.Next(ctx); err != nil || string(ev.Data) != "hello\n" {
		b.Fatalf("got %+v, %v", ev, err)
	}
}

// BenchmarkOpen is how long a session waits for the first output of a command in a new sandbox: one
// that is made for it, and one that was warm. Figures are medians.
func BenchmarkOpen(b *testing.B) {
	h := newHost(b)
	h.cfg.shelf = nil
	image := shellImage(b)
	d := openDriver(b, h)
	first := h.Spec(b, 0, 1)
	if err := d.Snapshot(b.Context(), driver.MicroVM, driver.Image{Digest: "sha256:bench", Block: image}, first.Limits); err != nil {
		b.Fatal(err)
	}
	for _, kind := range []string{"cold", "warm"} {
		b.Run(kind, func(b *testing.B) { benchOpen(b, h, d, image, kind == "warm") })
	}
}

func benchOpen(b *testing.B, h *host, d *Driver, image string, warm bool) {
	took := map[string][]time.Duration{}
	n := 0
	var private, waiting uint64
	for b.Loop() {
		n++
		b.StopTimer()
		spec := h.Spec(b, n, 1)
		spec.Image = driver.Image{Digest: "sha256:bench", Block: image}
		spec.Init, spec.Guest = nil, h.guest
		w := warmSpec(spec)
		began := time.Now()
		if warm {
			sb, err := d.Prepare(b.Context(), w)
			if err != nil {
				b.Fatal(err)
			}
			took["prepare"] = append(took["prepare"], time.Since(began))
			waiting += privateKiB(b, sb.PID)
			took["cpu-of-a-waiting-second"] = append(took["cpu-of-a-waiting-second"], idleCPU(b, d, sb))
		}
		b.StartTimer()
		began = time.Now()
		var sb driver.Sandbox
		var err error
		if warm {
			sb, err = d.Claim(b.Context(), w.ID, spec)
		} else {
			sb, err = d.Create(b.Context(), spec)
		}
		if err != nil {
			b.Fatal(err)
		}
		took["made"] = append(took["made"], time.Since(began))
		for _, s := range sb.Steps {
			took[s.Name] = append(took[s.Name], s.Took)
		}
		firstOutput(b, sb)
		took["output"] = append(took["output"], time.Since(began))
		b.StopTimer()
		private += privateKiB(b, sb.PID)
		if err := d.Stop(b.Context(), sb.ID); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	for name, list := range took {
		slices.Sort(list)
		b.ReportMetric(float64(list[len(list)/2].Microseconds())/1000, "ms/"+name)
	}
	b.ReportMetric(float64(private)/1024/float64(n), "MiB-private")
	if warm {
		b.ReportMetric(float64(waiting)/1024/float64(n), "MiB-waiting")
	}
}

// idleCPU is what a sandbox takes of the processor in a second in which nobody wants anything of it.
func idleCPU(b *testing.B, d *Driver, sb driver.Sandbox) time.Duration {
	b.Helper()
	before, err := d.Stats(b.Context(), sb.ID)
	if err != nil {
		b.Fatal(err)
	}
	<-time.After(time.Second)
	after, err := d.Stats(b.Context(), sb.ID)
	if err != nil {
		b.Fatal(err)
	}
	return after.CPU - before.CPU
}
