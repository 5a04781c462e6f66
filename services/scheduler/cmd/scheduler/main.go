// Command scheduler runs the scheduler service of a fleet: where, and the truth about every session.
package main

import (
	"context"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/scheduler"
)

func main() {
	cfg := scheduler.NewConfig("")
	svcmain.Main(svcmain.Program{Name: "scheduler", Config: &cfg,
		Run: func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error {
			cfg.Log, cfg.Ready = log, ready
			return scheduler.Run(ctx, cfg, conn)
		}})
}
