package hostagent

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/containerd"
	"github.com/berth-dev/berth/services/hostagent/internal/diskpool"
)

// Config of one host. NewConfig gives the defaults; Host and Dir have none.
type Config struct {
	// Host is this host's id and the name of its bus identity, host-<id>.
	Host   string            `yaml:"host"`
	Zone   string            `yaml:"zone"`
	Labels map[string]string `yaml:"labels"`
	// Dir holds everything: disks, images, sandboxes, containerd, inventory.db, host.key.
	Dir string `yaml:"dir"`
	// Driver may say null: sandboxes in memory, for tests and benchmarks, with null as the only tier.
	// Otherwise the tiers decide which drivers are opened.
	Driver string `yaml:"driver"`
	// Tiers to offer: container, gvisor, kata, microvm and wasm. Each is offered once a real sandbox of
	// it came up on this host; one that cannot run keeps the others from nothing.
	Tiers []string `yaml:"tiers"`
	// Ahead are snapshots that sandboxes start from, made once their tier is offered.
	Ahead []Ahead `yaml:"ahead"`
	// Handlers are containerd's runtime handlers of tiers whose runtime is installed apart from Berth,
	// by tier: kata (docs/howto/kata.md).
	Handlers map[string]containerd.Handler `yaml:"handlers"`
	// Runtimes is the folder with containerd, runc, runsc and their shims.
	Runtimes string `yaml:"runtimes"`
	// Socket of an existing containerd; empty starts a private one.
	Socket string `yaml:"socket"`
	// Guest is the path of the guest agent's binary, berth-guest.
	Guest string `yaml:"guest"`
	// Images maps a name that templates use to a reference: a registry reference, an OCI layout
	// folder or an archive. A name that is not listed is taken as a reference.
	Images map[string]string `yaml:"images"`
	// ImageStore is where unpacked images are kept, by digest; empty means the folder images in Dir.
	// One process at a time.
	ImageStore string `yaml:"image_store"`
	// Capacity is what sessions may use in all; zero parts are measured.
	Capacity Capacity `yaml:"capacity"`
	// Disk settings.
	Disk DiskConfig `yaml:"disk"`
	// Network settings.
	Network NetworkConfig `yaml:"network"`
	// MaxWakes is how many wakes run at once; more wait in line.
	MaxWakes int `yaml:"max_wakes"`
	// Hello is how long a new guest may take to answer.
	Hello time.Duration `yaml:"hello"`
	// Grace is what processes get between SIGTERM and SIGKILL when their session sleeps.
	Grace time.Duration `yaml:"grace"`
	// Sweep is how often the host is compared with what scheduler says it owns.
	Sweep time.Duration `yaml:"sweep"`
	// Poll is how often sandboxes are looked for that ended without an event.
	Poll time.Duration `yaml:"poll"`
	// Margin is how long before the end of its lease this host stops to act on sessions, and its
	// sandboxes are frozen; a quarter of it before the end they are stopped. At most a quarter of the
	// lease is taken.
	Margin time.Duration `yaml:"margin"`
	// Fence says what becomes of sandboxes when the lease ends: stop, or freeze where no other host could
	// take a session over.
	Fence string `yaml:"fence"`
}

// What Config.Fence may be.
const (
	fenceStop   = "stop"
	fenceFreeze = "freeze"
)

// minMargin leaves the watchdog, which looks ten times a second, a look between the freeze and the
// stop, and one between the stop and the end of the lease.
const minMargin = 400 * time.Millisecond

// Capacity of a host.
type Capacity struct {
	CPUMillis   uint32 `yaml:"cpu_millis"`
	MemoryBytes uint64 `yaml:"memory_bytes"`
	PIDs        uint32 `yaml:"pids"`
	DiskBytes   uint64 `yaml:"disk_bytes"`
}

// DiskConfig says how disks are kept.
type DiskConfig struct {
	// Store is where disks are saved: nats:// (the bus's own object store), file:///folder, s3://bucket,
	// gs://bucket or azblob://container; options as in docs/howto/disks.md.
	Store string `yaml:"store"`
	// Pool says where images are kept on this host: auto, loop (an XFS file system in a file), device
	// or folder. auto is loop, unless the folder shares extents itself or this machine has no XFS.
	Pool string `yaml:"pool"`
	// Device of pool device: blank, or XFS.
	Device string `yaml:"device"`
	// PoolBytes is the size of pool loop; 0: that of the file system that it is on. It takes space only
	// as it fills.
	PoolBytes uint64 `yaml:"pool_bytes"`
	// EvictAbove is the share of the pool, in percent, above which images of sleeping sessions are
	// removed that the store has.
	EvictAbove int `yaml:"evict_above"`
	// Reserve is never promised to sessions, in bytes.
	Reserve uint64 `yaml:"reserve"`
	// Ready is how many formatted disks wait per size, Sizes of which sizes in bytes at least.
	Ready int      `yaml:"ready"`
	Sizes []uint64 `yaml:"sizes"`
}

// NetworkConfig says whether sandboxes have a network, whose only way out is this host's gate.
type NetworkConfig struct {
	// Enabled: tiers that can have one get a network; where it cannot be walled off they are not offered.
	// Otherwise no sandbox here has one. The null driver never has.
	Enabled bool `yaml:"enabled"`
	// GateTimeout is how long a wake waits for the gate; without it the session has no way out for now.
	GateTimeout time.Duration `yaml:"gate_timeout"`
	// Trust are PEM files with certificates that sandboxes trust besides this machine's and the cell's.
	Trust []string `yaml:"trust"`
}

const gib = 1 << 30

// NewConfig returns the defaults.
func NewConfig() Config {
	return Config{
		Tiers:    []string{"container", "gvisor"},
		Disk:     DiskConfig{Store: "nats://", Pool: "auto", EvictAbove: 85, Reserve: 2 * gib, Ready: 2},
		Network:  NetworkConfig{Enabled: true, GateTimeout: 2 * time.Second},
		MaxWakes: 4 * runtime.NumCPU(), Hello: 20 * time.Second, Grace: 2 * time.Second,
		Sweep: time.Minute, Poll: 2 * time.Second, Margin: 2 * time.Second, Fence: fenceStop,
	}
}

// check refuses what cannot work, with one sentence.
func (c Config) check() error {
	bad := func(why string) error { return errs.E("configure hostagent", errkind.Invalid, "", why) }
	if _, err := ids.ParseHost(c.Host); err != nil {
		return errs.E("configure hostagent", errkind.Invalid, "", err)
	}
	if !filepath.IsAbs(c.Dir) {
		return bad("dir must be an absolute path")
	}
	if err := c.checkTiers(); err != nil {
		return err
	}
	if c.MaxWakes < 1 {
		return bad("max_wakes must be at least 1")
	}
	for name, d := range map[string]time.Duration{"hello": c.Hello, "sweep": c.Sweep, "poll": c.Poll, "network.gate_timeout": c.Network.GateTimeout} {
		if d <= 0 {
			return bad(name + " must be longer than zero")
		}
	}
	for _, path := range c.Network.Trust {
		if !filepath.IsAbs(path) {
			return bad(fmt.Sprintf("network.trust: %.128q is no absolute path", path))
		}
	}
	if c.Disk.EvictAbove < 1 || c.Disk.EvictAbove > 100 {
		return bad("disk.evict_above must lie between 1 and 100 percent")
	}
	if c.Grace < 0 || c.Margin < 0 {
		return bad("grace and margin must not be negative")
	}
	return c.checkFence()
}

func (c Config) checkTiers() error {
	bad := func(format string, args ...any) error {
		return errs.Errorf("configure hostagent", errkind.Invalid, format, args...)
	}
	switch {
	case c.Driver != "" && c.Driver != driverContainerd && c.Driver != driverNull:
		return bad("there is no driver %.32q", c.Driver)
	case len(c.Tiers) == 0:
		return bad("no tier is offered")
	case (c.Driver == driverNull) != c.bare(), c.bare() && len(c.Tiers) > 1:
		return bad("tier null needs driver null, and stands alone")
	}
	for _, t := range c.Tiers {
		if !c.bare() && !slices.Contains(contract, driver.Tier(t)) {
			return bad("there is no tier %.32q", t)
		}
	}
	for t, h := range c.Handlers {
		if t != string(driver.Kata) {
			return bad("tier %.32q has no runtime handler of its own; only %s has", t, driver.Kata)
		}
		for _, path := range []string{h.Shim, h.Config} {
			if path != "" && !filepath.IsAbs(path) {
				return bad("handlers.%s: %.128q is no absolute path", t, path)
			}
		}
	}
	return nil
}

func (c Config) checkFence() error {
	bad := func(why string) error { return errs.E("configure hostagent", errkind.Invalid, "", why) }
	switch {
	case c.Fence != fenceStop && c.Fence != fenceFreeze:
		return bad(fmt.Sprintf("fence must be stop or freeze, not %.32q", c.Fence))
	case !c.bare() && c.Margin < minMargin:
		return bad(fmt.Sprintf("margin must be at least %s: the watchdog looks ten times a second, and stops sandboxes a quarter of it before the lease ends", minMargin))
	}
	return nil
}

// measured fills the parts of a capacity that were not given from what the machine has.
func (c Capacity) measured(room uint64) Capacity {
	if c.CPUMillis == 0 {
		c.CPUMillis = uint32(runtime.NumCPU()) * 1000
	}
	if c.MemoryBytes == 0 {
		c.MemoryBytes = memTotal() / 10 * 8
	}
	if c.PIDs == 0 {
		c.PIDs = 32768
	}
	if c.DiskBytes == 0 {
		c.DiskBytes = room
	}
	return c
}

func memTotal() uint64 { return memInfo("MemTotal:") }

// memAvailable is what the machine can give without taking it from anybody.
func memAvailable() uint64 { return memInfo("MemAvailable:") }

// memInfo is a field of /proc/meminfo in bytes, 1 GiB where it is not told.
func memInfo(field string) uint64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return gib
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, field); ok {
			kb, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err == nil {
				return kb << 10
			}
		}
	}
	return gib
}

// pool says where disks are kept.
func (c Config) pool(log *slog.Logger) diskpool.Config {
	return diskpool.Config{Dir: filepath.Join(c.Dir, "disks"), Mode: c.Disk.Pool, Device: c.Disk.Device, Bytes: c.Disk.PoolBytes, Log: log}
}
