// Command scheduler runs one replica of the scheduler.
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
	"github.com/berth-dev/berth/services/scheduler"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "scheduler:", err)
		os.Exit(1)
	}
}

func run() error {
	config := flag.String("config", "", "configuration file (YAML); see services/scheduler/scheduler.example.yaml")
	login := flag.String("login", "", "bus login file of svc-scheduler (JSON: url, name, nkey_seed)")
	url := flag.String("bus", "", "URL of the bus, instead of the one in the login file")
	otlp := flag.String("otlp", "", "where traces and metrics go, for example http://localhost:4317")
	flag.Parse()
	cfg := scheduler.NewConfig("")
	if err := svc.LoadConfig(*config, &cfg); err != nil {
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
	cfg.Log = slog.New(slog.NewJSONHandler(os.Stderr, nil))
	cfg.Ready = func() { cfg.Log.Info("leads and serves") }
	tel, err := obs.Setup(ctx, "scheduler", "", obs.Config{OTLPEndpoint: *otlp})
	if err != nil {
		return err
	}
	defer func() { _ = tel.Shutdown(context.WithoutCancel(ctx)) }()
	starting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := bus.Connect(starting, l, bus.WithLogger(cfg.Log))
	if err != nil {
		return err
	}
	defer conn.Close()
	return scheduler.Run(ctx, cfg, conn)
}
