// Command hostagent runs the agent of one host: its sandboxes, disks and data plane.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/services/hostagent"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "hostagent:", err)
		os.Exit(1)
	}
}

func run() error {
	config := flag.String("config", "", "configuration file (YAML); see services/hostagent/hostagent.example.yaml")
	login := flag.String("login", "", "bus login file of host-<id> (JSON: url, name, nkey_seed)")
	url := flag.String("bus", "", "URL of the bus, instead of the one in the login file")
	otlp := flag.String("otlp", "", "where traces and metrics go, for example http://localhost:4317")
	check := flag.Bool("check", false, "only say whether this host can run sessions")
	flag.Parse()
	cfg := hostagent.NewConfig()
	if err := svc.LoadConfig(*config, &cfg); err != nil {
		return err
	}
	if err := hostagent.Preflight(cfg); err != nil || *check {
		return err
	}
	l, err := bus.ReadLogin(*login)
	if err != nil {
		return err
	}
	if *url != "" {
		l.URL = *url
	}
	ctx, stop := svc.SignalContext(context.Background())
	defer stop()
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil)).With("service", "hostagent")
	tel, err := obs.Setup(ctx, "hostagent", "", obs.Config{OTLPEndpoint: *otlp})
	if err != nil {
		return err
	}
	defer func() { _ = tel.Shutdown(context.WithoutCancel(ctx)) }()
	starting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := bus.Connect(starting, l, bus.WithLogger(log))
	if err != nil {
		return err
	}
	defer conn.Close()
	return hostagent.Run(ctx, cfg, conn, loadImage, log, func() { log.Info("ready") })
}
