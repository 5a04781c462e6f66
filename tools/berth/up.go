package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/tools/berth/stack"
	"github.com/berth-dev/berth/tools/image/builder"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// upCmd runs everything on this machine in one process.
type upCmd struct {
	Listen       string        `help:"Address of the bus for clients; port 0 takes a free one." placeholder:"HOST:PORT"`
	Config       string        `help:"Configuration file (YAML); flags win." type:"existingfile" placeholder:"FILE"`
	Idle         time.Duration `help:"Idle time of every plan, for trying out." placeholder:"DURATION"`
	Tenant       []string      `help:"Development tenants." placeholder:"NAME"`
	Image        string        `help:"Image of the default templates: an OCI layout or archive, or a registry reference." placeholder:"REF"`
	ImageStore   string        `help:"Keep unpacked images here instead of in the state folder; one berth up at a time." type:"path" placeholder:"DIR"`
	Store        string        `help:"Where disks are saved: nats:// (default), file:///folder, s3://bucket, gs://bucket or azblob://container." placeholder:"URL"`
	Driver       string        `help:"What makes the sandboxes: containerd or null (in memory, for trying the control plane)." enum:"containerd,null," default:""`
	Metrics      string        `help:"Serve Prometheus metrics on /metrics here." placeholder:"HOST:PORT"`
	OTLP         string        `name:"otlp" help:"Send traces and metrics to this OTLP endpoint." placeholder:"URL"`
	Spans        string        `help:"Append every span to this file, one JSON object a line." type:"path" placeholder:"FILE"`
	LeaveRunning bool          `help:"Keep active sessions in memory when stopped, frozen once the lease ends; the next start adopts them."`
	LogLevel     string        `help:"debug, info, warn or error." enum:"debug,info,warn,error" default:"warn"`
}

// run runs until SIGINT or SIGTERM.
func (c *upCmd) run(ctx context.Context, dir string) error {
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
	return stack.Run(ctx, cfg, log, func(info stack.Info) {
		fmt.Printf("ready: bus %s, issuer %s, clients in %s\n", info.URL, info.Issuer, info.Clients)
	})
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
	cfg.LeaveRunning = cfg.LeaveRunning || c.LeaveRunning
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
