package hostagent

import (
	"context"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/ociimage"
	"github.com/berth-dev/berth/internal/svcmain"
)

// Program is the service as a process of its own: in a fleet, and as a member of a cluster on one
// machine.
func Program() svcmain.Program {
	cfg := NewConfig()
	return svcmain.Program{Name: "hostagent", Config: &cfg,
		Preflight: func() error { return Preflight(cfg) },
		Run: func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error {
			return Run(ctx, cfg, conn, ociimage.LoadContext, log, ready)
		}}
}
