// Package stack is all of Berth in one process: an embedded bus, every service
// with a login of its own, a development issuer, and one host. It guarantees
// that nothing is made before the machine was found fit for it, that one state
// folder is used by one process at a time, and that the next start after any
// death, also kill -9, goes on from what was committed.
package stack

import (
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials"
	"github.com/berth-dev/berth/services/egress"
	"github.com/berth-dev/berth/services/egress/gate"
	"github.com/berth-dev/berth/services/hostagent"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/identity/devissuer"
	"github.com/berth-dev/berth/services/lifecycle"
	"github.com/berth-dev/berth/services/lifecycle/tierpolicy"
	"github.com/berth-dev/berth/services/pool"
	"github.com/berth-dev/berth/services/scheduler"
)

// Config of everything. Paths that are empty are derived from Dir.
type Config struct {
	// Dir holds all state. One process at a time.
	Dir string `yaml:"dir"`
	// Listen is the bus's address for clients; port 0 takes a free one.
	Listen string `yaml:"listen"`
	// MetricsListen serves Prometheus metrics on /metrics; empty: none.
	MetricsListen string `yaml:"metrics_listen"`
	// Tenants of the development issuer, each on the plan "default" with the frontends named.
	Tenants   []string `yaml:"tenants"`
	Frontends []string `yaml:"frontends"`
	// LeaveRunning keeps active sessions as they are when this process is asked to
	// stop, frozen once the host's lease ends; otherwise they are put to sleep first.
	LeaveRunning bool `yaml:"leave_running"`
	// Pools is a file of pools of warm sandboxes that are declared at each start; empty: none, and what
	// berth pool apply declared stays.
	Pools string `yaml:"pools"`

	Telemetry   obs.Config         `yaml:"telemetry"`
	Identity    identity.Config    `yaml:"identity"`
	Lifecycle   lifecycle.Config   `yaml:"lifecycle"`
	Scheduler   scheduler.Config   `yaml:"scheduler"`
	Credentials credentials.Config `yaml:"credentials"`
	Pool        pool.Config        `yaml:"pool"`
	Egress      egress.Config      `yaml:"egress"`
	Host        hostagent.Config   `yaml:"host"`
	// Gate is what lets traffic out of the host's sandboxes; there is none where they have no network.
	Gate gate.Config `yaml:"gate"`
}

// NewConfig returns the defaults for one machine.
func NewConfig() Config {
	host := hostagent.NewConfig()
	host.Host = "local"
	host.Tiers = nil      // see Tiers
	host.Fence = "freeze" // no other host could take its sessions: memory is worth more
	return Config{
		Dir: "/var/lib/berth", Listen: "127.0.0.1:4222",
		Tenants: []string{"acme", "globex"}, Frontends: []string{"web", "cli"},
		Telemetry: obs.Config{KeepSpans: 0, Prometheus: true},
		Identity:  identity.NewConfig(), Lifecycle: lifecycle.NewConfig(), Scheduler: scheduler.NewConfig(""),
		Credentials: credentials.NewConfig(), Pool: pool.NewConfig(), Egress: egress.NewConfig(),
		Host: host, Gate: gate.NewConfig(),
	}
}

// Load reads a YAML file over the defaults; unknown keys are refused.
func Load(path string) (Config, error) {
	cfg := NewConfig()
	return cfg, svc.LoadConfig(path, &cfg)
}

// SetIdle gives every plan this idle time.
func (c *Config) SetIdle(d time.Duration) {
	for name, plan := range c.Lifecycle.Policy.Plans {
		plan.Idle = d
		c.Lifecycle.Policy.Plans[name] = plan
	}
}

// DevIssuers registers the development issuer of every tenant with identity.
func (c *Config) DevIssuers() (tenants []ids.Tenant, err error) {
	for _, t := range c.Tenants {
		entry, err := devissuer.Entry(c.Keys(), ids.Tenant(t), "default")
		if err != nil {
			return nil, err
		}
		tenants = append(tenants, ids.Tenant(t))
		c.Identity.Issuers = append(c.Identity.Issuers, entry)
	}
	return tenants, nil
}

// BusLogins has identity let in those that the bus does not know itself: hosts, the operator, and the
// frontends of development tenants, whose keys lie below Dir.
func (c *Config) BusLogins(hosts ...string) error {
	callers, err := c.Callers(hosts...)
	if err != nil {
		return err
	}
	users, err := bus.ReadUsers(c.Dir, append(callers, subjects.Operator()))
	if err != nil {
		return err
	}
	c.Identity.Logins = slices.Clone(c.Identity.Logins)
	for _, u := range users {
		c.Identity.Logins = append(c.Identity.Logins, identity.Login{Name: u.Caller.Name(), NKey: u.Public})
	}
	return nil
}

// Tiers are what one machine offers unless the configuration names others: all that come with Berth, as
// far as a real sandbox of each comes up. A cluster's hosts share one machine, and offer FewTiers: each
// would boot machines of its own.
var (
	Tiers    = []string{"container", "gvisor", "microvm", "wasm"}
	FewTiers = []string{"container", "gvisor"}
)

// UseNullDriver keeps sandboxes in memory: every template runs in the tier
// "null", which has no wall. For trying the control plane and measuring it.
func (c *Config) UseNullDriver() {
	c.Host.Driver, c.Host.Tiers = "null", []string{"null"}
	c.Host.Capacity = hostagent.Capacity{CPUMillis: 1 << 30, MemoryBytes: 1 << 50, PIDs: 1 << 30, DiskBytes: 1 << 60}
	c.Lifecycle.Policy.Tiers = []string{"null"}
	for name, t := range c.Lifecycle.Policy.Templates {
		t.Tier = "null"
		c.Lifecycle.Policy.Templates[name] = t
	}
}

// Complete derives what is empty and refuses what cannot work.
func (c *Config) Complete() error {
	abs, err := filepath.Abs(c.Dir)
	if err != nil || c.Dir == "" {
		return fmt.Errorf("the state folder %q cannot be used", c.Dir)
	}
	c.Dir = abs
	if _, _, err := splitAddr(c.Listen); err != nil {
		return err
	}
	c.Scheduler.Dir = filepath.Join(c.Dir, "scheduler")
	c.Credentials.KeyDir, c.Identity.KeyDir = c.Keys(), c.Keys()
	c.Host.Dir = filepath.Join(c.Dir, "host", c.Host.Host)
	if len(c.Host.Tiers) == 0 {
		c.Host.Tiers = slices.Clone(Tiers)
	}
	c.gate()
	c.prepare()
	if len(c.Host.Disk.Sizes) == 0 {
		for _, t := range c.Lifecycle.Policy.Templates {
			if !slices.Contains(c.Host.Disk.Sizes, t.Limits.DiskBytes) {
				c.Host.Disk.Sizes = append(c.Host.Disk.Sizes, t.Limits.DiskBytes)
			}
		}
	}
	if _, err := tierpolicy.Load(c.Lifecycle.TierPolicy); err != nil {
		return err
	}
	if err := c.Lifecycle.Policy.Validate(); err != nil {
		return err
	}
	if err := c.pools(); err != nil {
		return err
	}
	_, err = c.Callers(c.Host.Host)
	return err
}

// gate gives the gate the host's router.
func (c *Config) gate() {
	c.Gate = c.GateOf(c.Host)
}

// GateOf is the configuration of the gate of a host.
func (c *Config) GateOf(h hostagent.Config) gate.Config {
	g := c.Gate
	g.Host, g.Router, g.Dir = h.Host, filepath.Join(h.Dir, "net", "router"), filepath.Join(c.Dir, "gate", h.Host)
	return g
}

// Gated reports whether sandboxes have a way out that a gate guards: those in memory have none, and
// a host may be told that none has.
func (c *Config) Gated() bool { return c.Host.Driver != "null" && c.Host.Network.Enabled }

// cloning tiers start sandboxes from something that is made once.
var cloning = []string{"microvm", "wasm"}

// prepare has the host make ahead what the templates' sandboxes start from, unless it is told what.
func (c *Config) prepare() {
	if c.Host.Ahead != nil {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(c.Lifecycle.Policy.Templates)) {
		t := c.Lifecycle.Policy.Templates[name]
		if slices.Contains(cloning, t.Tier) && slices.Contains(c.Host.Tiers, t.Tier) {
			c.Host.Ahead = append(c.Host.Ahead, hostagent.Ahead{Tier: t.Tier, Image: t.Image,
				CPUMillis: t.Limits.CPUMillis, MemoryBytes: t.Limits.MemoryBytes, PIDs: t.Limits.Pids})
		}
	}
}

// pools gives the pool service lifecycle's templates, so that what waits is what a session asks for.
func (c *Config) pools() error {
	if c.Pools != "" {
		path, err := filepath.Abs(c.Pools)
		if err != nil {
			return fmt.Errorf("the file of pools %q cannot be used: %w", c.Pools, err)
		}
		c.Pools, c.Pool.Pools = path, path
	}
	c.Pool.Templates = map[string]pool.Template{}
	for name, t := range c.Lifecycle.Policy.Templates {
		c.Pool.Templates[name] = pool.Template{Image: t.Image, Tier: t.Tier, Limits: pool.Limits(t.Limits)}
	}
	if err := c.Pool.Validate(); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	return nil
}

// Keys is where services and the development issuer keep their secrets.
func (c *Config) Keys() string { return filepath.Join(c.Dir, "keys") }

func splitAddr(addr string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(addr)
	if err == nil {
		port, err = strconv.Atoi(p)
	}
	if err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("%q is not an address of the form host:port", addr)
	}
	return host, port, nil
}

// Callers are the bus identities besides the services: the hosts, their gates and the
// frontends of every development tenant.
func (c *Config) Callers(hosts ...string) (out []subjects.Caller, err error) {
	for _, name := range hosts {
		host, err := ids.ParseHost(name)
		if err != nil {
			return nil, err
		}
		out = append(out, subjects.Host(host), subjects.Gate(host))
	}
	for _, t := range c.Tenants {
		tenant, err := ids.ParseTenant(t)
		if err != nil {
			return nil, err
		}
		for _, f := range c.Frontends {
			frontend, err := ids.ParseFrontend(f)
			if err != nil {
				return nil, err
			}
			out = append(out, subjects.Frontend(tenant, frontend))
		}
	}
	return out, nil
}
