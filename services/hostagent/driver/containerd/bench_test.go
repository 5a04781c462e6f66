package containerd

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// BenchmarkCreate measures, turn by turn on the same machine, Create until the first byte on the
// channel beside 'ctr run' of the same program until its first byte of output; removal is not
// counted. It prints medians: the aim is at most 1.15 times ctr.
func BenchmarkCreate(b *testing.B) {
	h := newHost(b)
	d := openDriver(b, h)
	ctr := importForCtr(b, h)
	for _, tier := range h.cfg.Tiers {
		b.Run(string(tier), func(b *testing.B) {
			var ours, theirs, attach, stop []time.Duration
			parts := map[string][]time.Duration{}
			for n := range b.N {
				spec := h.benchSpec(b, n, tier)
				waitBlank(b, h)
				began := time.Now()
				a, err := h.disks.Attach(context.Background(), disk.Want{
					Key: disk.Key{Session: spec.Session, Generation: spec.Generation}, Epoch: spec.Epoch, Fresh: true, Size: 64 << 20, Image: "sha256:test",
				})
				if err != nil {
					b.Fatal(err)
				}
				attach = append(attach, time.Since(began))
				spec.Disk = a.Root
				began = time.Now()
				sb, err := d.Create(context.Background(), spec)
				if err != nil {
					b.Fatal(err)
				}
				k, err := drivertest.Open(sb.Channel)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := k.Do("echo", "x"); err != nil {
					b.Fatal(err)
				}
				ours = append(ours, time.Since(began))
				k.Close()
				for _, s := range sb.Steps {
					parts[s.Name] = append(parts[s.Name], s.Took)
				}
				began = time.Now()
				if err := d.Stop(context.Background(), sb.ID); err != nil {
					b.Fatal(err)
				}
				stop = append(stop, time.Since(began))
				if err := h.disks.Delete(context.Background(), disk.Key{Session: spec.Session, Generation: spec.Generation}); err != nil {
					b.Fatal(err)
				}
				theirs = append(theirs, ctr(b, tier, n))
			}
			ms := func(d []time.Duration) float64 { return float64(median(d).Microseconds()) / 1000 }
			b.ReportMetric(ms(ours), "create-ms")
			b.ReportMetric(ms(attach), "attach-ms")
			b.ReportMetric(ms(stop), "stop-ms")
			b.ReportMetric(ms(theirs), "ctr-ms")
			b.ReportMetric((ms(ours)+ms(attach))/ms(theirs), "ratio")
			for name, d := range parts {
				b.ReportMetric(ms(d), name+"-ms")
			}
		})
	}
}

// waitBlank waits for a formatted disk: in between wakes there is time for it.
func waitBlank(b *testing.B, h *host) {
	b.Helper()
	for range 10_000 {
		if inv, err := h.disks.List(); err != nil || inv.Blanks[64<<20] > 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
	b.Fatal("no blank disk")
}

func median(d []time.Duration) time.Duration {
	s := slices.Sorted(slices.Values(d))
	return s[len(s)/2]
}

func (h *host) benchSpec(b *testing.B, n int, tier driver.Tier) driver.Spec {
	run := filepath.Join(h.dir, "run", string(tier)+strconv.Itoa(n))
	if err := os.MkdirAll(run, 0o755); err != nil {
		b.Fatal(err)
	}
	return driver.Spec{
		Session:    ids.DeriveSessionKey([]byte("k"), b.Name(), "t", strconv.Itoa(n), "default"),
		Generation: ids.Generation{Incarnation: 1, Index: 1}, Epoch: ids.Epoch{Incarnation: 1, Index: 1}, Tier: tier,
		Image: driver.Image{Digest: "sha256:test", Lower: h.lower}, RunDir: run, Guest: h.probe, Hostname: "box",
		Limits: driver.Limits{CPUMillis: 2000, MemoryBytes: 256 << 20, PIDs: 512},
	}
}

// importForCtr gives containerd the same image, and returns what times one 'ctr run' of the probe.
func importForCtr(b *testing.B, h *host) func(*testing.B, driver.Tier, int) time.Duration {
	b.Helper()
	dir := filepath.Join(h.dir, "layout")
	p, err := layout.Write(dir, empty.Index)
	if err == nil {
		err = p.AppendImage(probeImage(b, h), layout.WithAnnotations(map[string]string{"io.containerd.image.name": "berth.local/probe:v1"}))
	}
	if err != nil {
		b.Fatal(err)
	}
	archive := filepath.Join(h.dir, "image.tar")
	if out, err := exec.Command("tar", "-C", dir, "-cf", archive, ".").CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	ctr := []string{filepath.Join(h.cfg.Runtimes, "ctr"), "-a", filepath.Join(h.cfg.Run, "containerd.sock"), "-n", "bench"}
	run := func(args ...string) *exec.Cmd {
		all := append(slices.Clone(ctr), args...)
		return exec.Command(all[0], all[1:]...)
	}
	if out, err := run("image", "import", "--local", archive).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	return func(b *testing.B, tier driver.Tier, n int) time.Duration {
		args := []string{"run", "--rm", "--runtime", handlerRunc}
		if tier == driver.GVisor {
			args = []string{"run", "--rm", "--runtime", handlerRunsc, "--runtime-config-path", filepath.Join(h.cfg.State, "runsc", "config.toml"),
				"--annotation", "io.kubernetes.cri.container-type=sandbox", "--annotation", "io.kubernetes.cri.sandbox-id=bench" + strconv.Itoa(n)}
		}
		args = append(args, "berth.local/probe:v1", "bench"+strconv.Itoa(n), "/probe", "euid")
		cmd := run(args...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			b.Fatal(err)
		}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		began := time.Now()
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
			b.Fatalf("ctr: %v: %s", err, stderr.Bytes())
		}
		took := time.Since(began)
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		return took
	}
}

func probeImage(b *testing.B, h *host) v1.Image {
	b.Helper()
	bin, err := os.ReadFile(h.probe)
	if err != nil {
		b.Fatal(err)
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, d := range []string{"proc", "sys", "dev", "run", "tmp", "etc", "var", "usr", "opt", "mnt"} {
		_ = w.WriteHeader(&tar.Header{Name: d + "/", Mode: 0o755, Typeflag: tar.TypeDir})
	}
	_ = w.WriteHeader(&tar.Header{Name: "probe", Mode: 0o755, Size: int64(len(bin)), Typeflag: tar.TypeReg})
	_, _ = w.Write(bin)
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil })
	if err != nil {
		b.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err == nil {
		img, err = mutate.ConfigFile(img, &v1.ConfigFile{Architecture: "amd64", OS: "linux", RootFS: v1.RootFS{Type: "layers", DiffIDs: diffIDs(b, img)}})
	}
	if err != nil {
		b.Fatal(err)
	}
	return img
}

func diffIDs(b *testing.B, img v1.Image) []v1.Hash {
	b.Helper()
	cfg, err := img.ConfigFile()
	if err != nil {
		b.Fatal(err)
	}
	return cfg.RootFS.DiffIDs
}
