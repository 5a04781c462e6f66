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
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
)

// bucketName holds what is declared, the caps, the leader and the demand.
const bucketName = "BERTH_POOLS"

// server is one instance, leading or not.
type server struct {
	cfg      Config
	conn     *bus.Conn
	bucket   kv
	election *election
	events   *events
	m        *metrics
	log      *slog.Logger
	// file is what the configuration declares, until it is declared.
	file []*poolv1.Spec
}

// Run serves until ctx ends. conn is the identity svc-pool. Of several instances one leads and
// answers; the others wait for it to be silent. ready, when not nil, is called once this one does its
// part.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	s := &server{cfg: cfg, conn: conn, log: log}
	var err error
	if s.file, err = cfg.declared(); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	bucket, err := conn.OpenBucket(ctx, bucketName)
	if err != nil {
		return err
	}
	return s.run(ctx, bucket, ready)
}

// run leads, again and again.
func (s *server) run(ctx context.Context, bucket kv, ready func()) (err error) {
	cfg, log := s.cfg, s.log
	if s.m, err = newMetrics(); err != nil {
		return err
	}
	defer s.m.close()
	s.bucket = bucket
	s.election = &election{kv: bucket, instance: nuid.Next(), lease: cfg.Lease, every: cfg.RenewEvery, log: log, alone: cfg.Alone}
	s.events = newEvents(s.conn, log)
	defer s.events.close()
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
		sleep(ctx, againTime) // it may have ended at once
	}
}
