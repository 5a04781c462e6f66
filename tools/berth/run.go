package main

import (
	"context"
	"log/slog"
	"os"
	"syscall"

	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/credentials"
	"github.com/berth-dev/berth/services/egress"
	"github.com/berth-dev/berth/services/egress/gate"
	"github.com/berth-dev/berth/services/hostagent"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/identity/devissuer"
	"github.com/berth-dev/berth/services/lifecycle"
	"github.com/berth-dev/berth/services/pool"
	"github.com/berth-dev/berth/services/scheduler"
	"github.com/berth-dev/berth/tools/berth/cluster"
)

// runCmd is one member of a cluster on this machine: what services/*/cmd run in a fleet, in this
// program. berth up starts it.
type runCmd struct {
	Service  string `arg:"" enum:"nats,scheduler,hostagent,egress,gate,identity,lifecycle,credentials,pool,devissuer"`
	Name     string `help:"Name of this member in logs and traces."`
	Config   string `help:"Configuration file (YAML)." type:"path"`
	Login    string `help:"Bus login file." type:"path"`
	LogLevel string `help:"debug, info, warn or error." default:"info"`
	Metrics  string `help:"Where metrics are served: host:port, or unix:/path."`
	Spans    string `help:"Append every span to this file." type:"path"`
	ReadyFD  int    `name:"ready-fd" help:"Say ready on this file descriptor."`
}

// Run runs until SIGINT or SIGTERM.
func (c *runCmd) Run(*app) error {
	o := svcmain.Options{Config: c.Config, Login: c.Login, Instance: c.Name, LogLevel: c.LogLevel, Metrics: c.Metrics,
		Telemetry: obs.Config{SpansFile: c.Spans}}
	if c.ReadyFD > 2 {
		syscall.CloseOnExec(c.ReadyFD) // no child of this process is the member
		word := os.NewFile(uintptr(c.ReadyFD), "ready")
		say := func(what string) { _, _ = word.WriteString(what + "\n") } // nobody listens any more: that is the end of this process too
		o.Ready = func() { say(cluster.Serves) }
		o.Running = func() { say(cluster.Runs) }
	}
	if c.Service != "scheduler" {
		o.Running = nil // whoever does its part serves
	}
	return programs[c.Service]().Serve(o)
}

// programs are the members, by service.
var programs = map[string]func() svcmain.Program{
	"nats": func() svcmain.Program {
		var cfg cluster.BusNode
		return svcmain.Program{Name: "nats", Config: &cfg,
			Alone: func(ctx context.Context, log *slog.Logger, ready func()) error { return cfg.Run(ctx, log, ready) }}
	},
	"devissuer": func() svcmain.Program {
		var cfg devissuer.Config
		return svcmain.Program{Name: "devissuer", Config: &cfg,
			Alone: func(ctx context.Context, log *slog.Logger, ready func()) error {
				return devissuer.Run(ctx, cfg, log, ready)
			}}
	},
	"scheduler":   scheduler.Program,
	"hostagent":   hostagent.Program,
	"credentials": credentials.Program,
	"lifecycle":   lifecycle.Program,
	"identity":    identity.Program,
	"pool":        pool.Program,
	"egress":      egress.Program,
	"gate":        gate.Program,
}
