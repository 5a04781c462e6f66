package egress

import (
	"context"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/svcmain"
)

// Program is the service as a process of its own: in a fleet, and as a member of a cluster on one
// machine.
func Program() svcmain.Program {
	cfg := NewConfig()
	return svcmain.Program{Name: "egress", Config: &cfg,
		Run: func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error {
			return Run(ctx, cfg, conn, log, ready)
		}}
}
