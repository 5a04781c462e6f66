// Command lifecycle runs the lifecycle service of a fleet: when, and under what terms.
package main

import (
	"context"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/lifecycle"
)

func main() {
	cfg := lifecycle.NewConfig()
	svcmain.Main(svcmain.Program{Name: "lifecycle", Config: &cfg,
		Run: func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error {
			return lifecycle.Run(ctx, cfg, conn, log, ready)
		}})
}
