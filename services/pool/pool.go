// Package pool owns how many sandboxes wait that are nobody's yet, of which template, and where. It
// guarantees that of each pool never more than its ceiling exist that nobody has claimed, whatever
// fails or restarts: what a host may have is stored before the host is told, and hosts refuse the term
// of an earlier leader. What it reserves is advice: a reservation that is lost, stale or made twice
// costs a session a cold start and nothing else, because only a host's claim gives a sandbox away.
package pool

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/nats-io/nuid"

	"github.com/berth-dev/berth/internal/bus"
)

// bucketName holds what is declared, the caps, the leader and the demand.
const bucketName = "BERTH_POOLS"

// server is one instance, leading or not.
type server struct {
	cfg      Config
	conn     *bus.Conn
	bucket   kv
	election *election
	log      *slog.Logger
}

// Run serves until ctx ends. conn is the identity svc-pool. Of several instances one leads and
// answers; the others wait for it to be silent. ready, when not nil, is called once this one does its
// part.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	bucket, err := conn.OpenBucket(ctx, bucketName)
	if err != nil {
		return err
	}
	s := &server{cfg: cfg, conn: conn, bucket: bucket, log: log, election: &election{kv: bucket, instance: nuid.Next(),
		lease: cfg.Lease, every: cfg.RenewEvery, log: log, alone: cfg.Alone}}
	if ready != nil {
		ready()
	}
	for {
		t := s.election.take(ctx)
		if t == nil {
			return nil
		}
		if err := s.lead(ctx, t); err != nil {
			return err
		}
	}
}
