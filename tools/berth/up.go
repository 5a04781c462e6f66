package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/internal/heap"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/tools/berth/cluster"
	"github.com/berth-dev/berth/tools/berth/stack"
	"github.com/berth-dev/berth/tools/image/builder"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// upCmd runs everything on this machine: in one process, or in many.
type upCmd struct {
	Hosts        int           `help:"So many hosts, each a process in a network namespace of its own; with this, --schedulers or --nats everything runs in processes of its own." default:"1" placeholder:"N"`
	Schedulers   int           `help:"So many replicas of the scheduler: 1, 3 or 5." default:"1" placeholder:"N"`
	NATS         int           `name:"nats" help:"So many NATS servers: 1, 3 or 5." default:"1" placeholder:"N"`
	LinkSeed     uint64        `help:"Seed of what berth dev link does to which packet." default:"1" placeholder:"N"`
	Listen       string        `help:"Address of the bus for clients; port 0 takes a free one." placeholder:"HOST:PORT"`
	Config       string        `help:"Configuration file (YAML); flags win." type:"existingfile" placeholder:"FILE"`
	Idle         time.Duration `help:"Idle time of every plan, for trying out." placeholder:"DURATION"`
	Tenant       []string      `help:"Development tenants." placeholder:"NAME"`
	Image        string        `help:"Image of the default templates: an OCI layout or archive, or a registry reference." placeholder:"REF"`
	ImageStore   string        `help:"Keep unpacked images here instead of in the state folder; one berth up at a time." type:"path" placeholder:"DIR"`
	Store        string        `help:"Where disks are saved: nats:// (default), file:///folder, or s3://bucket, gs://bucket, azblob://container (make build CLOUD=1)." placeholder:"URL"`
	Pools        string        `help:"Declare the pools of warm sandboxes in this file: docs/howto/pools.md." type:"existingfile" placeholder:"FILE"`
	Driver       string        `help:"What makes the sandboxes: containerd or null (in memory, for trying the control plane)." enum:"containerd,null," default:""`
	Tiers        []string      `help:"Isolation tiers to offer, of container, gvisor, kata, microvm and wasm; default: all that come with Berth and that this machine proves, with --hosts container and gvisor." placeholder:"TIER"`
	Metrics      string        `help:"Serve Prometheus metrics on /metrics here." placeholder:"HOST:PORT"`
	OTLP         string        `name:"otlp" help:"Send traces and metrics to this OTLP endpoint." placeholder:"URL"`
	Spans        string        `help:"Append every span to this file, one JSON object a line." type:"path" placeholder:"FILE"`
	LeaveRunning bool          `help:"Keep active sessions in memory when stopped, frozen once the lease ends; the next start adopts them."`
	LogLevel     string        `help:"debug, info, warn or error." enum:"debug,info,warn,error" default:"warn"`
}

// heapFloor is memory that buys fewer collections: everything is in this one process.
const heapFloor = 64 << 20

// run runs until SIGINT or SIGTERM.
func (c *upCmd) run(ctx context.Context, dir string) error {
	// What was typed is judged before parts of the build are looked for.
	shape := cluster.Shape{Hosts: c.Hosts, Schedulers: c.Schedulers, NATS: c.NATS}
	if err := shape.Check(); err != nil {
		return exitCode{2, err.Error()}
	}
	if shape.Many() && c.Listen != "" {
		return usage("--listen works with one process only: servers of a cluster have addresses of their own, see up.json")
	}
	if made, ok, err := cluster.Made(dir); err != nil {
		return err
	} else if ok && !shape.Many() {
		return usage("the state folder %s was made with %s; start it with these", dir, made)
	}
	cfg, err := c.config(dir)
	if err != nil {
		return err
	}
	log, err := obs.NewLogger(os.Stderr, obs.LogConfig{Level: c.LogLevel})
	if err != nil {
		return err
	}
	ctx, stop := svc.SignalContext(ctx)
	defer stop()
	if shape.Many() {
		return c.many(ctx, cfg, shape, log)
	}
	heap.Floor(heapFloor)
	return stack.Run(ctx, cfg, log, func(info stack.Info) {
		fmt.Printf("ready: bus %s, issuer %s, clients in %s\n", info.URL, info.Issuer, info.Clients)
	})
}

// many runs a cluster on this machine.
func (c *upCmd) many(ctx context.Context, cfg stack.Config, shape cluster.Shape, log *slog.Logger) error {
	began := time.Now()
	cfg.Telemetry.SpansFile = "" // the members' own
	say := func(what string) { fmt.Println(what) }
	return cluster.Run(ctx, cluster.Config{Stack: cfg, Shape: shape, Seed: c.LinkSeed, LogLevel: c.memberLog(), Spans: c.Spans}, log, say,
		func(info cluster.Info) {
			fmt.Printf("ready after %.1f s: %d members, bus %s, issuer %s, clients in %s\n",
				time.Since(began).Seconds(), len(info.Members), info.URL, info.Issuer, info.Clients)
		})
}

// memberLog is the level of the members' own files, which nobody is disturbed by.
func (c *upCmd) memberLog() string {
	if c.LogLevel == "debug" {
		return "debug"
	}
	return "info"
}

// config is the file's, with the flags over it and the paths of this build.
func (c *upCmd) config(dir string) (stack.Config, error) {
	cfg, err := stack.Load(c.Config)
	if err != nil {
		return cfg, err
	}
	cfg.Dir = dir
	set(&cfg.Listen, c.Listen)
	set(&cfg.MetricsListen, c.Metrics)
	set(&cfg.Telemetry.OTLPEndpoint, c.OTLP)
	set(&cfg.Telemetry.SpansFile, c.Spans)
	set(&cfg.Host.Driver, c.Driver)
	set(&cfg.Host.ImageStore, c.ImageStore)
	set(&cfg.Host.Disk.Store, c.Store)
	set(&cfg.Pools, c.Pools)
	cfg.LeaveRunning = cfg.LeaveRunning || c.LeaveRunning
	if len(c.Tiers) > 0 {
		cfg.Host.Tiers = c.Tiers
	}
	if len(c.Tenant) > 0 {
		cfg.Tenants = c.Tenant
	}
	if c.Idle < 0 {
		return cfg, usage("--idle is %s; it must be at least 1 s", c.Idle)
	}
	if c.Idle > 0 {
		cfg.SetIdle(c.Idle)
	}
	if cfg.Host.Driver == "null" {
		cfg.UseNullDriver()
		return cfg, nil
	}
	return cfg, c.parts(&cfg)
}

// parts finds the runtimes, the guest agent and the image.
func (c *upCmd) parts(cfg *stack.Config) (err error) {
	if os.Geteuid() != 0 {
		return stack.ErrNotRoot
	}
	if cfg.Host.Runtimes == "" && cfg.Host.Socket == "" {
		if cfg.Host.Runtimes, err = locate.Dir(); err != nil {
			return err
		}
	}
	if cfg.Host.Guest == "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		cfg.Host.Guest = filepath.Join(filepath.Dir(self), "berth-guest")
	}
	if _, err := os.Stat(cfg.Host.Guest); err != nil {
		return fmt.Errorf("the guest agent %s is missing: run make build", cfg.Host.Guest)
	}
	if cfg.Host.Images == nil {
		cfg.Host.Images = map[string]string{}
	}
	if c.Image != "" {
		cfg.Host.Images["default"] = c.Image
	}
	if cfg.Host.Images["default"] == "" {
		if cfg.Host.Images["default"], err = builder.Built(); err != nil {
			return err
		}
	}
	return nil
}

// set overwrites when there is something to say.
func set(dst *string, v string) {
	if v != "" {
		*dst = v
	}
}
