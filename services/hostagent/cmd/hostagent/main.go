// Command hostagent runs the hostagent service of a fleet: the sandboxes, disks and data plane of one host.
package main

import (
	"context"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/ociimage"
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/hostagent"
)

func main() {
	cfg := hostagent.NewConfig()
	svcmain.Main(svcmain.Program{Name: "hostagent", Config: &cfg,
		Preflight: func() error { return hostagent.Preflight(cfg) },
		Run: func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error {
			return hostagent.Run(ctx, cfg, conn, ociimage.LoadContext, log, ready)
		}})
}
