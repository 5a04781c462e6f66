package wasm

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/containerd"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// figure collects times and reports their smallest, median and largest.
type figure []time.Duration

func (f figure) report(b *testing.B, name string) {
	slices.Sort(f)
	b.ReportMetric(float64(f[len(f)/2].Microseconds())/1000, name+"-ms-p50")
	b.ReportMetric(float64(f[0].Microseconds())/1000, name+"-ms-min")
	b.ReportMetric(float64(f[len(f)-1].Microseconds())/1000, name+"-ms-max")
}

// BenchmarkBesideContainer measures, in one run and in turns, what a sandbox and a call cost here and in
// tier container. Use -benchtime=10x.
func BenchmarkBesideContainer(b *testing.B) {
	h := newHost(b, true)
	h.cfg.CallTime = time.Minute
	d := openDriver(b, h)
	if err := d.Snapshot(b.Context(), driver.WASM, driver.Image{Lower: h.lower}, driver.Limits{}); err != nil {
		b.Fatal(err)
	}
	c := newContainers(b, h)
	var create, first, small, smallCPU, tiny, tinyCPU, cold, warm, box, boxFirst, boxExec, boxCPU figure
	var idle uint64
	for n := 0; b.Loop(); n++ {
		began := time.Now()
		w := h.open(b, d, 100+n)
		create = append(create, time.Since(began))
		first = append(first, create[n]+w.call(b, "tool", "exit", "0").took)
		if s, err := d.Stats(b.Context(), w.sb.ID); err == nil {
			idle = s.MemoryBytes
		}
		cpu := cpuOf(b, d, w.sb.ID)
		small = append(small, w.call(b, "tool", "exit", "0").took)
		smallCPU = append(smallCPU, cpuOf(b, d, w.sb.ID)-cpu)
		w.put(b, "/tiny.wasm", module(body()))
		w.call(b, "/tiny.wasm")
		cpu = cpuOf(b, d, w.sb.ID)
		tiny = append(tiny, w.call(b, "/tiny.wasm").took)
		tinyCPU = append(tinyCPU, cpuOf(b, d, w.sb.ID)-cpu)
		e := w.call(b, "js", "-e", "console.log(6*7)")
		if e.out != "42\n" {
			b.Fatalf("%+v", e)
		}
		cold = append(cold, e.took)
		waitAhead(b, w)
		warm = append(warm, w.call(b, "js", "-e", "console.log(6*7)").took)
		_ = d.Stop(b.Context(), w.sb.ID)

		began = time.Now()
		k := c.open(b, h, 1000+n)
		box = append(box, time.Since(began))
		boxFirst = append(boxFirst, box[n]+k.call(b, "/bin/nothing").took)
		cpu = cpuOf(b, c.d, k.sb.ID)
		boxExec = append(boxExec, k.call(b, "/bin/nothing").took)
		boxCPU = append(boxCPU, cpuOf(b, c.d, k.sb.ID)-cpu)
		_ = c.d.Stop(b.Context(), k.sb.ID)
	}
	create.report(b, "wasm-create")
	first.report(b, "wasm-create+call")
	small.report(b, "wasm-call")
	smallCPU.report(b, "wasm-call-cpu")
	tiny.report(b, "wasm-tiny")
	tinyCPU.report(b, "wasm-tiny-cpu")
	boxCPU.report(b, "runc-exec-cpu")
	cold.report(b, "js-cold")
	warm.report(b, "js-warm")
	box.report(b, "runc-create")
	boxFirst.report(b, "runc-create+exec")
	boxExec.report(b, "runc-exec")
	b.ReportMetric(float64(idle>>10), "wasm-idle-KiB")
}

// cpuOf is the processor time of a sandbox: what other work on the machine does not change.
func cpuOf(b *testing.B, m driver.Meter, id ids.SandboxID) time.Duration {
	b.Helper()
	s, err := m.Stats(b.Context(), id)
	if err != nil {
		b.Fatal(err)
	}
	return s.CPU
}

// waitAhead returns when the process that was started ahead waits for its call: it uses no processor.
func waitAhead(b *testing.B, w *box) {
	b.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for last := time.Duration(-1); time.Now().Before(deadline); time.Sleep(150 * time.Millisecond) {
		s, err := w.d.Stats(b.Context(), w.sb.ID)
		if err != nil {
			b.Fatal(err)
		}
		if s.CPU-last < time.Millisecond && len(w.processes(b)) > 1 {
			return
		}
		last = s.CPU
	}
	b.Fatal("no process waits")
}

type containers struct {
	d     *containerd.Driver
	guest string
}

func newContainers(b *testing.B, h *host) *containers {
	b.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		b.Skip(err)
	}
	cfg := containerd.NewConfig(filepath.Join(h.dir, "containers"), filepath.Join(cache, "berth/runtimes/current/bin"))
	cfg.Tiers = []driver.Tier{driver.Container}
	if err := containerd.Preflight(cfg); err != nil {
		b.Skipf("skipped: %v", err)
	}
	c := &containers{guest: filepath.Join(h.dir, "berth-guest")}
	source := filepath.Join(h.dir, "nothing.go")
	if err := os.WriteFile(source, []byte("package main\nfunc main() {}\n"), 0o644); err != nil {
		b.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(h.lower, "bin"), 0o755); err != nil {
		b.Fatal(err)
	}
	for out, what := range map[string]string{
		c.guest: "github.com/berth-dev/berth/services/hostagent/guest/cmd/berth-guest", filepath.Join(h.lower, "bin/nothing"): source,
	} {
		cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", out, what)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if said, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, said)
		}
	}
	if c.d, err = containerd.Open(context.Background(), cfg); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		found, _ := c.d.List(context.Background())
		for _, f := range found {
			_ = c.d.Stop(context.Background(), f.ID)
		}
		_ = c.d.Close()
	})
	return c
}

func (c *containers) open(b *testing.B, h *host, session int) *box {
	b.Helper()
	spec := h.Spec(b, session, 1)
	spec.Tier, spec.Init, spec.Guest = driver.Container, nil, c.guest
	sb, err := c.d.Create(b.Context(), spec)
	if err != nil {
		b.Fatal(err)
	}
	ch, err := hostend.OpenFIFOs(sb.Channel.Stdin, sb.Channel.Stdout)
	if err != nil {
		b.Fatal(err)
	}
	conn, err := hostend.Attach(b.Context(), ch, ch, hostend.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close(); _ = ch.Close() })
	return &box{sb: sb, spec: spec, conn: conn}
}

// BenchmarkClaim measures, in turns, a cold start, a Prepare and a Claim; a start and a claim also until the
// guest agent is there. Use -benchtime=20x.
func BenchmarkClaim(b *testing.B) {
	h := newHost(b, true)
	d := openDriver(b, h)
	if err := d.Snapshot(b.Context(), driver.WASM, driver.Image{Lower: h.lower}, driver.Limits{}); err != nil {
		b.Fatal(err)
	}
	var create, prepare, claim, createAgent, claimAgent figure
	agent := func(sb driver.Sandbox) {
		b.Helper()
		ch, err := hostend.OpenFIFOs(sb.Channel.Stdin, sb.Channel.Stdout)
		if err != nil {
			b.Fatal(err)
		}
		conn, err := hostend.Attach(b.Context(), ch, ch, hostend.Options{})
		if err != nil {
			b.Fatal(err)
		}
		_, _ = conn.Close(), ch.Close()
	}
	var idle uint64
	for n := 0; b.Loop(); n++ {
		spec := h.Spec(b, 100+2*n, 1)
		spec.Init, spec.Guest = nil, h.cfg.Program
		began := time.Now()
		sb, err := d.Create(b.Context(), spec)
		create = append(create, time.Since(began))
		if err != nil {
			b.Fatal(err)
		}
		agent(sb)
		createAgent = append(createAgent, time.Since(began))
		_ = d.Stop(b.Context(), sb.ID)

		spec = h.Spec(b, 101+2*n, 1)
		spec.Init, spec.Guest = nil, h.cfg.Program
		w := driver.WarmSpec{ID: ids.NewWarmID(), Tier: driver.WASM, Image: spec.Image, RunDir: spec.RunDir, Guest: spec.Guest, Limits: spec.Limits}
		began = time.Now()
		if _, err := d.Prepare(b.Context(), w); err != nil {
			b.Fatal(err)
		}
		prepare = append(prepare, time.Since(began))
		time.Sleep(50 * time.Millisecond) // it waits
		if s, err := d.Stats(b.Context(), w.ID); err == nil {
			idle = s.MemoryBytes
		}
		began = time.Now()
		sb, err = d.Claim(b.Context(), w.ID, spec)
		claim = append(claim, time.Since(began))
		if err != nil {
			b.Fatal(err)
		}
		agent(sb)
		claimAgent = append(claimAgent, time.Since(began))
		_ = d.Stop(b.Context(), sb.ID)
	}
	create.report(b, "create")
	prepare.report(b, "prepare")
	claim.report(b, "claim")
	createAgent.report(b, "create+agent")
	claimAgent.report(b, "claim+agent")
	b.ReportMetric(float64(idle>>10), "waiting-KiB")
}
