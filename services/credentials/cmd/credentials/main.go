// Command credentials runs the credentials service of a fleet: grants and keys.
package main

import (
	"context"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/credentials"
)

func main() {
	cfg := credentials.NewConfig()
	svcmain.Main(svcmain.Program{Name: "credentials", Config: &cfg,
		Run: func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error {
			return credentials.Run(ctx, cfg, conn, log, ready)
		}})
}
