package containerd

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// Handler is a runtime handler of containerd that is installed apart from Berth.
type Handler struct {
	// Runtime is its name for containerd, for example io.containerd.kata.v2.
	Runtime string `yaml:"runtime"`
	// Config is its configuration file; empty: where Kata's packages put it.
	Config string `yaml:"config"`
	// Shim is its program; empty: the one that the name means, in Config.Runtimes or in PATH.
	Shim string `yaml:"shim"`
}

const (
	kataRuntime = "io.containerd.kata.v2"
	// kataWord is how every shim of Kata Containers begins to tell its version.
	kataWord = "Kata Containers containerd shim"
	// kataMemory is what hypervisor, shim and file server take beside the machine's own memory, and
	// minKataPIDs how many threads they have.
	kataMemory  = 256 << 20
	minKataPIDs = 512
	versionTime = 10 * time.Second
)

// kataConfigs are where packages put the configuration, the first that is there counts.
var kataConfigs = []string{
	"etc/kata-containers/configuration.toml",
	"opt/kata/share/defaults/kata-containers/configuration.toml",
	"usr/share/defaults/kata-containers/configuration.toml",
}

// kata is an installed Kata Containers.
type kata struct {
	runtime, shim, config string
	// hypervisor is the name of its table in the configuration: qemu, clh, cloud-hypervisor,
	// firecracker, dragonball or another.
	hypervisor string
}

// findKata looks for all that the tier needs below root, and says what is missing. That everything is
// there proves nothing yet: hostagent offers the tier once a machine has really started.
func findKata(cfg Config, root string) (k kata, why string) {
	h := cfg.Handlers[driver.Kata]
	k = kata{runtime: h.Runtime, shim: h.Shim, config: h.Config}
	if k.runtime == "" {
		k.runtime = kataRuntime
	}
	if k.shim, why = findShim(k, cfg.Runtimes); why != "" {
		return k, why
	}
	if why = saysKata(k.shim); why != "" {
		return k, why
	}
	if k.config == "" {
		for _, c := range kataConfigs {
			if path := filepath.Join(root, c); k.config == "" && exists(path) {
				k.config = path
			}
		}
	}
	if k.config == "" {
		return k, "Kata Containers has no configuration: none of /" + strings.Join(kataConfigs, ", /") + " is there"
	}
	if k.hypervisor, why = readKata(k.config); why != "" {
		return k, why
	}
	devices := []string{"dev/kvm"}
	if k.hypervisor == "qemu" { // the others reach the machine through a socket of their own
		devices = append(devices, "dev/vhost-vsock")
	}
	for _, dev := range devices {
		if unix.Access(filepath.Join(root, dev), unix.R_OK|unix.W_OK) != nil {
			return k, "Kata Containers needs /" + dev + ", which is not there or not usable"
		}
	}
	return k, ""
}

var runtimeName = regexp.MustCompile(`^io\.containerd\.([a-z0-9-]+)\.(v[0-9]+)$`)

// findShim finds the program of a handler as containerd does: io.containerd.kata.v2 is
// containerd-shim-kata-v2.
func findShim(k kata, runtimes string) (path, why string) {
	if k.shim != "" {
		if unix.Access(k.shim, unix.X_OK) != nil {
			return "", fmt.Sprintf("the shim %s is not there or not executable", k.shim)
		}
		return k.shim, ""
	}
	parts := runtimeName.FindStringSubmatch(k.runtime)
	if parts == nil {
		return "", fmt.Sprintf("%.64q is no name of a runtime handler, as %s is", k.runtime, kataRuntime)
	}
	name := "containerd-shim-" + parts[1] + "-" + parts[2]
	if path = filepath.Join(runtimes, name); unix.Access(path, unix.X_OK) == nil {
		return path, ""
	}
	if path, err := exec.LookPath(name); err == nil {
		return path, ""
	}
	return "", fmt.Sprintf("Kata Containers is not installed: %s is neither in %s nor in PATH", name, runtimes)
}

// saysKata refuses a program that does not even claim to be Kata's.
func saysKata(shim string) (why string) {
	ctx, cancel := context.WithTimeout(context.Background(), versionTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, shim, "--version").CombinedOutput()
	switch {
	case err != nil:
		return fmt.Sprintf("the shim %s does not tell its version: %v", shim, err)
	case !strings.HasPrefix(string(out), kataWord):
		return fmt.Sprintf("the shim %s is not that of Kata Containers", shim)
	}
	return ""
}

var (
	kataTable = regexp.MustCompile(`^\[hypervisor\.([A-Za-z0-9_-]+)\]`)
	kataAlone = regexp.MustCompile(`(?m)^\s*sandbox_cgroup_only\s*=\s*true`)
	kataFile  = regexp.MustCompile(`^(path|kernel|image|initrd)\s*=\s*"([^"]+)"`)
)

// readKata reads which hypervisor a configuration names, and looks whether its files are there.
func readKata(config string) (hypervisor, why string) {
	b, err := os.ReadFile(config)
	if err != nil {
		return "", fmt.Sprintf("the configuration of Kata Containers cannot be read: %v", err)
	}
	if !kataAlone.Match(b) { // or nothing of the machine is in the sandbox's cgroup: no limit, no freeze
		return "", fmt.Sprintf("%s must say sandbox_cgroup_only = true, so that a session's limits hold for its machine", config)
	}
	table := ""
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			table = ""
		}
		if m := kataTable.FindStringSubmatch(line); m != nil && hypervisor == "" {
			table, hypervisor = m[1], m[1]
		}
		if m := kataFile.FindStringSubmatch(line); m != nil && table != "" && !exists(m[2]) {
			return hypervisor, fmt.Sprintf("the %s of Kata Containers, %s, is not there (%s)", m[1], m[2], config)
		}
	}
	if hypervisor == "" {
		return "", fmt.Sprintf("%s names no hypervisor", config)
	}
	return hypervisor, ""
}
