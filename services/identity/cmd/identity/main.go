// Command identity runs the identity service: who is asking.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/services/identity"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "identity:", err)
		os.Exit(1)
	}
}

func run() error {
	config := flag.String("config", "", "configuration file (YAML); see services/identity/identity.example.yaml")
	login := flag.String("login", "", "bus login file of svc-identity (JSON: url, name, nkey_seed)")
	url := flag.String("bus", "", "URL of the bus, instead of the one in the login file")
	flag.Parse()
	cfg := identity.NewConfig()
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
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil)).With("service", "identity")
	starting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := bus.Connect(starting, l, bus.WithLogger(log))
	if err != nil {
		return err
	}
	defer conn.Close()
	return identity.Run(ctx, cfg, conn, log, func() { log.Info("ready") })
}
