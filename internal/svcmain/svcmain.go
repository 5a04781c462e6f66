// Package svcmain is the main program that every service of a fleet shares:
// flags, configuration, login, telemetry and signals. It guarantees that a
// configuration with an unknown key, or one that cannot work, ends the program
// with one sentence before it connects to anything.
package svcmain

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/certs/spiffe"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/internal/svc"
)

// Program is one service as a program of its own.
type Program struct {
	// Name of the service, and of its folder.
	Name string
	// Config points to the defaults; the file of -config is read over them.
	Config any
	// Preflight, when set, says why this machine cannot run the service; -check does only that.
	Preflight func() error
	// Run runs the service until ctx ends.
	Run func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error
	// Alone, instead of Run, runs a service that is no user of the bus.
	Alone func(ctx context.Context, log *slog.Logger, ready func()) error
}

// Options of one run of a program.
type Options struct {
	Config string // configuration file
	Login  string // bus login file
	Bus    string // URL, instead of the login's
	// Instance tells several of one service apart in logs and traces; default: the service's name.
	Instance string
	LogLevel string // default info
	// Metrics is where Prometheus metrics are served: host:port, or unix:/path; empty: nowhere.
	Metrics   string
	Telemetry obs.Config
	// SPIFFE is the address of an agent whose certificates the connection to the bus uses; empty: the login's.
	SPIFFE string
	// Ready, if set, is called whenever the service is able to serve, and Running once the program has
	// all it needs: of several replicas that may be all that it ever does.
	Ready, Running func()
}

// Main runs the program and ends the process with status 1 if it failed.
func Main(p Program) {
	if err := p.run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", p.Name, err)
		os.Exit(1)
	}
}

func (p Program) run(args []string) error {
	var o Options
	flags := flag.NewFlagSet(p.Name, flag.ExitOnError)
	flags.StringVar(&o.Config, "config", "", "configuration file (YAML); the example is below services/")
	flags.StringVar(&o.Login, "login", "", "bus login file (JSON: url, name, nkey_seed)")
	flags.StringVar(&o.Bus, "bus", "", "URL of the bus, instead of the one in the login file")
	flags.StringVar(&o.Telemetry.OTLPEndpoint, "otlp", "", "where traces and metrics go, for example https://collector:4317; http:// only on this machine")
	flags.StringVar(&o.Telemetry.OTLPCA, "otlp-ca", "", "PEM file of the roots that the collector is verified by; default: the machine's own")
	flags.StringVar(&o.Telemetry.OTLPCert, "otlp-cert", "", "PEM file of the certificate that is shown to the collector")
	flags.StringVar(&o.Telemetry.OTLPKey, "otlp-key", "", "PEM file of its key")
	flags.StringVar(&o.Telemetry.MetricsCert, "metrics-cert", "", "PEM file of the certificate for -metrics, needed if other machines reach it")
	flags.StringVar(&o.Telemetry.MetricsKey, "metrics-key", "", "PEM file of its key")
	flags.StringVar(&o.SPIFFE, "spiffe", "", "address of a SPIFFE agent, for example unix:///run/spire/agent.sock: the bus is shown and verified by its certificates instead of the login's")
	flags.StringVar(&o.Metrics, "metrics", "", "serve Prometheus metrics on /metrics here: host:port, or unix:/path")
	check := flags.Bool("check", false, "only say whether the configuration is good and this machine can run the service")
	_ = flags.Parse(args) // ExitOnError
	if *check {
		return p.check(o)
	}
	return p.Serve(o)
}

// check reads the configuration and says why it cannot work here.
func (p Program) check(o Options) error {
	if err := svc.LoadConfig(o.Config, p.Config); err != nil || p.Preflight == nil {
		return err
	}
	return p.Preflight()
}

// Serve runs the program until SIGINT or SIGTERM.
func (p Program) Serve(o Options) (err error) {
	if err := p.check(o); err != nil {
		return err
	}
	var l bus.Login
	if p.Alone == nil {
		if l, err = bus.ReadLogin(o.Login); err != nil {
			return err
		}
		l.URL = cmp.Or(o.Bus, l.URL)
	}
	log, err := obs.NewLogger(os.Stderr, obs.LogConfig{Level: o.LogLevel, Format: "json"})
	if err != nil {
		return err
	}
	log = log.With("service", cmp.Or(o.Instance, p.Name))
	ctx, stop := svc.SignalContext(context.Background())
	defer stop()
	o.Telemetry.Prometheus = o.Telemetry.Prometheus || o.Metrics != ""
	tel, err := obs.Setup(ctx, cmp.Or(o.Instance, p.Name), "", o.Telemetry)
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, tel.Shutdown(end))
	}()
	stopMetrics, err := serveMetrics(o.Metrics, o.Telemetry, tel, log)
	if err != nil {
		return err
	}
	defer stopMetrics()
	ready := func() {
		log.Info("ready")
		if o.Ready != nil {
			o.Ready()
		}
	}
	if p.Alone != nil {
		return p.Alone(ctx, log, ready)
	}
	opts := []bus.Option{bus.WithLogger(log)}
	if o.SPIFFE != "" {
		src, err := spiffe.Open(ctx, o.SPIFFE)
		if err != nil {
			return err
		}
		defer src.Close()
		opts = append(opts, bus.WithTLS(src))
	}
	return p.connected(ctx, l, opts, log, ready, o.Running)
}

// connected runs the service with a connection of its own.
func (p Program) connected(ctx context.Context, l bus.Login, opts []bus.Option, log *slog.Logger, ready, running func()) error {
	starting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := bus.Connect(starting, l, opts...)
	if err != nil {
		return err
	}
	defer conn.Close()
	if running != nil {
		running()
	}
	return p.Run(ctx, conn, log, ready)
}

// serveMetrics listens where it is told.
func serveMetrics(at string, cfg obs.Config, tel *obs.Telemetry, log *slog.Logger) (stop func(), err error) {
	if at == "" {
		return func() {}, nil
	}
	l, err := cfg.Listen(at)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", tel.MetricsHandler())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("metrics are not served any more", "error", err)
		}
	}()
	return func() { server.Close() }, nil
}
