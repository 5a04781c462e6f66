package pool

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/pool/internal/spec"
)

// Config of the service.
type Config struct {
	// Templates that pools may be declared for. They are those of lifecycle's policy: what a session
	// is made of, so that what waits fits it.
	Templates map[string]Template `yaml:"templates"`
	// Pools is a file of pools that are declared when the service starts (docs/howto/pools.md); empty: none.
	Pools string `yaml:"pools"`
	// Lease is how long a leader that is not heard of leads; it renews every RenewEvery.
	Lease      time.Duration `yaml:"lease"`
	RenewEvery time.Duration `yaml:"renew_every"`
	// HostsEvery is how often scheduler is asked for its hosts, WarmEvery how often each host is asked
	// what waits on it.
	HostsEvery time.Duration `yaml:"hosts_every"`
	WarmEvery  time.Duration `yaml:"warm_every"`
	// WarmTimeout bounds an answer of a host to what waits there, RetireTimeout the removing of some.
	WarmTimeout   time.Duration `yaml:"warm_timeout"`
	RetireTimeout time.Duration `yaml:"retire_timeout"`
	// Steps that are under way at once on one host, over all pools.
	Steps int `yaml:"steps"`
	// Alone says that no other instance runs on this bus: what an earlier process held is taken over at once.
	Alone bool `yaml:"alone"`
}

// Template is what a session, and a warm sandbox of it, is made of.
type Template struct {
	Image  string `yaml:"image"`
	Tier   string `yaml:"tier"`
	Limits Limits `yaml:"limits"`
}

// Limits of one sandbox; the last three may be 0.
type Limits struct {
	CPUMillis          uint32 `yaml:"cpu_millis"`
	MemoryBytes        uint64 `yaml:"memory_bytes"`
	Pids               uint32 `yaml:"pids"`
	DiskBytes          uint64 `yaml:"disk_bytes"`
	DiskBytesPerSecond uint64 `yaml:"disk_bytes_per_second"`
	DiskOpsPerSecond   uint64 `yaml:"disk_ops_per_second"`
	OpenFiles          uint64 `yaml:"open_files"`
}

// NewConfig returns the defaults; there are no templates among them.
func NewConfig() Config {
	return Config{Lease: 5 * time.Second, RenewEvery: time.Second, HostsEvery: 2 * time.Second, WarmEvery: time.Second,
		WarmTimeout: 3 * time.Second, RetireTimeout: 30 * time.Second, Steps: 16}
}

// Validate says in one sentence what cannot work.
func (c *Config) Validate() error {
	for _, d := range []struct {
		name  string
		value time.Duration
		least time.Duration
	}{
		{"renew_every", c.RenewEvery, 10 * time.Millisecond}, {"lease", c.Lease, 3 * c.RenewEvery},
		{"hosts_every", c.HostsEvery, 10 * time.Millisecond}, {"warm_every", c.WarmEvery, 10 * time.Millisecond},
		{"warm_timeout", c.WarmTimeout, 10 * time.Millisecond},
		{"retire_timeout", c.RetireTimeout, 10 * time.Millisecond},
	} {
		if d.value < d.least {
			return fmt.Errorf("%s is %s, it must be at least %s", d.name, d.value, d.least)
		}
	}
	if c.Steps < 1 {
		return fmt.Errorf("steps is %d, it must be at least 1", c.Steps)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Templates)) {
		if _, err := c.Templates[name].terms(name); err != nil {
			return err
		}
	}
	_, err := c.declared()
	return err
}

// parse reads a pool file.
func (c *Config) parse(file []byte) ([]*poolv1.Spec, error) {
	tiers := map[string]corev1.Tier{}
	for name, t := range c.Templates {
		if terms, err := t.terms(name); err == nil {
			tiers[name] = terms.GetTier()
		}
	}
	return spec.Parse(file, tiers)
}

// declared reads the pools that the configuration declares.
func (c *Config) declared() ([]*poolv1.Spec, error) {
	if c.Pools == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(c.Pools)
	if err != nil {
		return nil, fmt.Errorf("read the pools to declare: %w", err)
	}
	specs, err := c.parse(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.Pools, err)
	}
	return specs, nil
}

// terms is what a host prepares.
func (t Template) terms(name string) (*corev1.Terms, error) {
	if _, err := ids.ParseTemplate(name); err != nil {
		return nil, err
	}
	tier := corev1.Tier(corev1.Tier_value["TIER_"+strings.ToUpper(t.Tier)])
	l := t.Limits
	switch {
	case tier == corev1.Tier_TIER_UNSPECIFIED:
		return nil, fmt.Errorf("template %q: %q is no isolation tier", name, t.Tier)
	case t.Image == "":
		return nil, fmt.Errorf("template %q names no image", name)
	case l.CPUMillis == 0 || l.MemoryBytes == 0 || l.Pids == 0 || l.DiskBytes == 0:
		return nil, fmt.Errorf("template %q must set every limit", name)
	}
	return &corev1.Terms{Template: name, Tier: tier, Image: t.Image, Limits: &corev1.Limits{CpuMillis: l.CPUMillis,
		MemoryBytes: l.MemoryBytes, Pids: l.Pids, DiskBytes: l.DiskBytes, DiskBytesPerSecond: l.DiskBytesPerSecond,
		DiskOpsPerSecond: l.DiskOpsPerSecond, OpenFiles: l.OpenFiles}}, nil
}

// digest tells terms that make other sandboxes from those that do not.
func digest(t *corev1.Terms) string {
	l := t.GetLimits()
	sum := sha256.Sum256(fmt.Appendf(nil, "pool template v1\n%q\n%q\n%s\n%d %d %d %d %d %d %d\n", t.GetTemplate(), t.GetImage(), t.GetTier(),
		l.GetCpuMillis(), l.GetMemoryBytes(), l.GetPids(), l.GetDiskBytes(), l.GetDiskBytesPerSecond(), l.GetDiskOpsPerSecond(), l.GetOpenFiles()))
	return hex.EncodeToString(sum[:])
}
