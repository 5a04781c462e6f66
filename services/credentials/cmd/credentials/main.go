// Command credentials runs the credentials service: grants and keys.
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
	"github.com/berth-dev/berth/services/credentials"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "credentials:", err)
		os.Exit(1)
	}
}

func run() error {
	config := flag.String("config", "", "configuration file (YAML); see services/credentials/credentials.example.yaml")
	login := flag.String("login", "", "bus login file of svc-credentials (JSON: url, name, nkey_seed)")
	url := flag.String("bus", "", "URL of the bus, instead of the one in the login file")
	flag.Parse()
	cfg := credentials.NewConfig()
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
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil)).With("service", "credentials")
	starting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := bus.Connect(starting, l, bus.WithLogger(log))
	if err != nil {
		return err
	}
	defer conn.Close()
	return credentials.Run(ctx, cfg, conn, log, func() { log.Info("ready") })
}
