// Package svcmain is the main program that every service of a fleet shares:
// flags, configuration, login, telemetry and signals. It guarantees that a
// configuration with an unknown key, or one that cannot work, ends the program
// with one sentence before it connects to anything.
package svcmain

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/berth-dev/berth/internal/bus"
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
}

// Main runs the program and ends the process with status 1 if it failed.
func Main(p Program) {
	if err := p.run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", p.Name, err)
		os.Exit(1)
	}
}

func (p Program) run(args []string) error {
	flags := flag.NewFlagSet(p.Name, flag.ExitOnError)
	config := flags.String("config", "", fmt.Sprintf("configuration file (YAML); see services/%[1]s/%[1]s.example.yaml", p.Name))
	login := flags.String("login", "", "bus login file (JSON: url, name, nkey_seed)")
	url := flags.String("bus", "", "URL of the bus, instead of the one in the login file")
	otlp := flags.String("otlp", "", "where traces and metrics go, for example http://localhost:4317")
	check := flags.Bool("check", false, "only say whether the configuration is good and this machine can run the service")
	_ = flags.Parse(args) // ExitOnError
	if err := svc.LoadConfig(*config, p.Config); err != nil {
		return err
	}
	if p.Preflight != nil {
		if err := p.Preflight(); err != nil {
			return err
		}
	}
	if *check {
		return nil
	}
	l, err := bus.ReadLogin(*login)
	if err != nil {
		return err
	}
	if *url != "" {
		l.URL = *url
	}
	return p.serve(l, *otlp)
}

func (p Program) serve(l bus.Login, otlp string) (err error) {
	ctx, stop := svc.SignalContext(context.Background())
	defer stop()
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil)).With("service", p.Name)
	tel, err := obs.Setup(ctx, p.Name, "", obs.Config{OTLPEndpoint: otlp})
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, tel.Shutdown(end))
	}()
	starting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := bus.Connect(starting, l, bus.WithLogger(log))
	if err != nil {
		return err
	}
	defer conn.Close()
	return p.Run(ctx, conn, log, func() { log.Info("ready") })
}
