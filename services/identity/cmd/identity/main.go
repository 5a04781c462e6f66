// Command identity runs the identity service of a fleet: who is asking.
package main

import (
	"context"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/identity"
)

func main() {
	cfg := identity.NewConfig()
	svcmain.Main(svcmain.Program{Name: "identity", Config: &cfg,
		Run: func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error {
			return identity.Run(ctx, cfg, conn, log, ready)
		}})
}
