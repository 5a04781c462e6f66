// Package egress owns the policies that say what may leave a sandbox. It guarantees that a policy which is
// stored can be read and is canonical, that of two who change one policy at a time the second is told and
// changes nothing, and that the generation of every change is larger than that of all before it. The gates,
// one per host, watch what is stored; they do not ask this service, so that traffic goes on without it.
package egress

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
)

// Run serves until ctx ends. conn is the identity svc-egress. Several instances may serve at once. ready,
// when not nil, is called once this one does its part.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("egress: %w", err)
	}
	if ready != nil {
		ready()
	}
	<-ctx.Done()
	return nil
}
