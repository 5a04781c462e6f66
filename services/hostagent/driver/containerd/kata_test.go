package containerd

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
)

var rewrite = flag.Bool("rewrite", false, "rewrite golden files")

// fakeHost is a folder that looks like a host with Kata Containers, as far as files can. Nothing in it
// is Kata, and nothing of it is ever started as a sandbox.
func fakeHost(t *testing.T, hypervisor string) (root string, cfg Config) {
	t.Helper()
	root = t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("bin/containerd-shim-kata-v2", "#!/bin/sh\necho '"+kataWord+" (test file): id: none'\n", 0o755)
	write("kernel", "", 0o644)
	write("dev/kvm", "", 0o666)
	write("dev/vhost-vsock", "", 0o666)
	write("etc/kata-containers/configuration.toml",
		fmt.Sprintf("[hypervisor.%s]\npath = %q\nkernel = %q\n\n[runtime]\nsandbox_cgroup_only = true\n", hypervisor, filepath.Join(root, "bin/containerd-shim-kata-v2"), filepath.Join(root, "kernel")), 0o644)
	cfg = NewConfig(filepath.Join(root, "state"), filepath.Join(root, "bin"))
	cfg.Tiers = []driver.Tier{driver.Kata}
	return root, cfg
}

// TestWhatIsMissingForKataIsSaid: each part that is not there, in one sentence that names it.
func TestWhatIsMissingForKataIsSaid(t *testing.T) {
	t.Setenv("PATH", "/usr/bin:/bin")
	edit := func(root, from, to string) {
		path := filepath.Join(root, kataConfigs[0])
		b, _ := os.ReadFile(path)
		_ = os.WriteFile(path, []byte(strings.ReplaceAll(string(b), from, to)), 0o644)
	}
	for name, c := range map[string]struct {
		hypervisor string
		breaks     func(root string, cfg *Config)
		say        string
	}{
		"nothing":           {"qemu", func(string, *Config) {}, ""},
		"no vsock, other":   {"clh", func(r string, _ *Config) { _ = os.Remove(r + "/dev/vhost-vsock") }, ""},
		"no vsock":          {"qemu", func(r string, _ *Config) { _ = os.Remove(r + "/dev/vhost-vsock") }, "needs /dev/vhost-vsock"},
		"no kvm":            {"firecracker", func(r string, _ *Config) { _ = os.Remove(r + "/dev/kvm") }, "needs /dev/kvm"},
		"no shim":           {"qemu", func(r string, _ *Config) { _ = os.Remove(r + "/bin/containerd-shim-kata-v2") }, "Kata Containers is not installed"},
		"no configuration":  {"qemu", func(r string, _ *Config) { _ = os.RemoveAll(r + "/etc") }, "has no configuration"},
		"no kernel":         {"qemu", func(r string, _ *Config) { _ = os.Remove(r + "/kernel") }, "the kernel of Kata Containers"},
		"no hypervisor":     {"qemu", func(r string, _ *Config) { edit(r, "[hypervisor.qemu]", "[agent.kata]") }, "names no hypervisor"},
		"machine elsewhere": {"qemu", func(r string, _ *Config) { edit(r, "only = true", "only = false") }, "sandbox_cgroup_only"},
		"another program": {"qemu", func(r string, _ *Config) {
			_ = os.WriteFile(r+"/bin/containerd-shim-kata-v2", []byte("#!/bin/sh\necho runc\n"), 0o755)
		}, "is not that of Kata"},
		"a program that fails": {"qemu", func(r string, _ *Config) {
			_ = os.WriteFile(r+"/bin/containerd-shim-kata-v2", []byte("#!/bin/sh\nexit 1\n"), 0o755)
		}, "does not tell its version"},
		"another handler": {"qemu", func(_ string, c *Config) {
			c.Handlers = map[driver.Tier]Handler{driver.Kata: {Runtime: "io.containerd.kata-fc.v2"}}
		}, "containerd-shim-kata-fc-v2"},
		"a handler that is none": {"qemu", func(_ string, c *Config) { c.Handlers = map[driver.Tier]Handler{driver.Kata: {Runtime: "kata"}} }, "is no name of a runtime handler"},
		"a shim that is named":   {"qemu", func(_ string, c *Config) { c.Handlers = map[driver.Tier]Handler{driver.Kata: {Shim: "/no/such"}} }, "/no/such is not there"},
	} {
		root, cfg := fakeHost(t, c.hypervisor)
		c.breaks(root, &cfg)
		k, why := findKata(cfg, root)
		if (c.say == "") != (why == "") || !strings.Contains(why, c.say) || strings.Contains(why, "\n") {
			t.Errorf("%s: %q", name, why)
		}
		if c.say == "" && (k.hypervisor != c.hypervisor || k.runtime != kataRuntime || k.config == "" || k.shim == "") {
			t.Errorf("%s: found %+v", name, k)
		}
	}
}

// TestKataThatIsMissingKeepsNoOtherTier.
func TestKataThatIsMissingKeepsNoOtherTier(t *testing.T) {
	h := newHost(t)
	cfg := h.cfg
	cfg.Tiers = append([]driver.Tier{driver.Kata}, cfg.Tiers...)
	cfg.Handlers = map[driver.Tier]Handler{driver.Kata: {Shim: "/no/such/shim"}}
	if err := Preflight(cfg); err != nil {
		t.Fatal(err)
	}
	d := openDriver(t, &host{cfg: cfg})
	caps := d.Capabilities()
	if !strings.Contains(caps[driver.Kata].Absent, "/no/such/shim") || caps[driver.Container].Absent != "" {
		t.Errorf("%+v", caps)
	}
	spec := h.Spec(t, 1, 1)
	spec.Tier = driver.Kata
	if _, err := d.Create(t.Context(), spec); !errs.Is(err, errkind.Unimplemented) {
		t.Errorf("a sandbox of a tier that is absent: %v", err)
	}
	cfg.Tiers = cfg.Tiers[:1]
	if err := Preflight(cfg); !errs.Is(err, errkind.Unavailable) || !strings.Contains(err.Error(), "/no/such/shim") {
		t.Errorf("nothing but Kata: %v", err)
	}
}

// TestKataSpecGolden: what a runtime handler is told of the machine, of the session's container and of
// the disk. It was run by nothing: no Kata runs on the project's machines.
func TestKataSpecGolden(t *testing.T) {
	key := ids.DeriveSessionKey([]byte("k"), "t", "u", "n", "default")
	spec := driver.Spec{
		Session: key, Generation: ids.Generation{Incarnation: 1, Index: 2}, Epoch: ids.Epoch{Incarnation: 1, Index: 3}, Tier: driver.Kata,
		DiskImage: "/pool/disk.img", RunDir: "/state/run", Guest: "/lib/berth-guest", Image: driver.Image{Block: "/images/rootfs.erofs", Env: []string{"LANG=C"}},
		Limits: driver.Limits{CPUMillis: 1500, MemoryBytes: 512 << 20, PIDs: 300, OpenFiles: 1024},
	}
	d := &Driver{cfg: NewConfig("/state", "/runtimes")}
	m := &making{d: d, spec: spec, id: spec.ID(), linked: true, machine: &machine{kata: kata{runtime: kataRuntime, config: "/etc/kata.toml"}}}
	opts, handler := m.kataOptions()
	directVolumes = t.TempDir()
	if err := writeVolume(d.volume(m.id), "/dev/loop8"); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(volumeFolder(d.volume(m.id)), "mountInfo.json"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]any{
		"handler": handler, "config_path": opts.GetConfigPath(), "machine_id": podOf(m.id), "machine": m.machineSpec(),
		"container_id": m.id, "container": m.guestSpec(), "volume": d.volume(m.id),
		"volume_folder": filepath.Base(volumeFolder(d.volume(m.id))), "volume_file": json.RawMessage(raw),
		"cgroup": d.limits(record{Tier: driver.Kata}, spec.Limits),
	}
	b, err := json.MarshalIndent(out, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got := string(b) + "\n"
	const file = "testdata/kata.golden.json"
	if *rewrite {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil || got != string(want) {
		t.Errorf("differs from %s (%v); got:\n%s", file, err, got)
	}
	for _, name := range []string{podOf(m.id), string(m.id)} {
		if id, ok := isPod(name); ok != (name != string(m.id)) || ok && id != m.id {
			t.Errorf("%s is taken for %s, %v", name, id, ok)
		}
	}
	if err := d.removeVolume(m.id); err != nil || exists(volumeFolder(d.volume(m.id))) {
		t.Errorf("the volume stays: %v", err)
	}
}

// kataHost gives the suite's sandboxes image files instead of a mounted disk.
type kataHost struct{ *host }

func (h kataHost) Spec(t testing.TB, session int, epoch uint64) driver.Spec {
	spec := h.host.Spec(t, session, epoch)
	dir := filepath.Join(h.dir, "kata", string(spec.Session))
	spec.Tier, spec.Disk = driver.Kata, ""
	spec.DiskImage, spec.Image.Block = filepath.Join(dir, "disk.img"), filepath.Join(h.dir, "rootfs.erofs")
	if exists(spec.DiskImage) {
		return spec
	}
	for _, d := range []string{"upper", "work"} {
		if err := os.MkdirAll(filepath.Join(dir, "disk", d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"truncate", "-s", "64M", spec.DiskImage}, {"mkfs.ext4", "-q", "-F", "-d", filepath.Join(dir, "disk"), spec.DiskImage},
		{"mkfs.erofs", "-zlz4", spec.Image.Block, h.lower}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	return spec
}

// TestKataSuite runs the conformance suite where Kata Containers is installed, and says elsewhere that
// it did not.
func TestKataSuite(t *testing.T) {
	if _, why := findKata(NewConfig(t.TempDir(), runtimes(t)), "/"); why != "" {
		t.Skipf("kata suite did not run: %s", why)
	}
	h := newHost(t)
	h.cfg.Tiers = []driver.Tier{driver.Kata}
	drivertest.Run(t, kataHost{h})
}

// TestLimitsOfARunningSandbox: more and less of everything, never less memory than is in use; open files
// are as promised or refused; the network namespace is the sandbox's own.
func TestLimitsOfARunningSandbox(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{own: true}
	for i, tier := range h.cfg.Tiers {
		spec := h.Spec(t, 40+i, 1)
		spec.Tier, spec.Limits.OpenFiles = tier, mostFiles()+1
		if _, err := d.Create(t.Context(), spec); !errs.Is(err, errkind.Unimplemented) {
			t.Errorf("%s: more open files than the host has: %v", tier, err)
		}
		spec.Limits.OpenFiles = 333
		sb, _ := start(t, d, spec, tier)
		more := spec.Limits
		more.CPUMillis, more.MemoryBytes = 2000, 512<<20
		processes := spec.Limits
		processes.PIDs = 500
		switch err := d.Resize(t.Context(), sb.ID, processes); {
		case tier == driver.GVisor && !errs.Is(err, errkind.Unimplemented):
			t.Errorf("%s: another number of processes: %v", tier, err)
		case tier != driver.GVisor && err != nil:
			t.Errorf("%s: %v", tier, err)
		}
		for _, l := range []driver.Limits{more, spec.Limits} {
			if err := d.Resize(t.Context(), sb.ID, l); err != nil {
				t.Errorf("%s: %v", tier, err)
			}
		}
		files := spec.Limits
		files.OpenFiles = 334
		small := spec.Limits
		small.MemoryBytes = 1
		if err := d.Resize(t.Context(), sb.ID, files); !errs.Is(err, errkind.Unimplemented) {
			t.Errorf("%s: other open files: %v", tier, err)
		}
		if err := d.Resize(t.Context(), sb.ID, small); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%s: no memory: %v", tier, err)
		}
		ns, err := d.Netns(t.Context(), sb.ID)
		link, lerr := os.Readlink(ns)
		if err != nil || lerr != nil || seen[link] {
			t.Errorf("%s: network namespace %s %s: %v, %v", tier, ns, link, err, lerr)
		}
		seen[link] = true
		if err := d.Stop(t.Context(), sb.ID); err != nil {
			t.Error(err)
		}
		if err := d.Resize(t.Context(), sb.ID, more); !errs.Is(err, errkind.NotFound) {
			t.Errorf("%s: after the stop: %v", tier, err)
		}
	}
}
