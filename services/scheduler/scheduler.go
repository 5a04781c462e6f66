package scheduler

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/scheduler/internal/replica"
)

// Run runs one replica of the scheduler until ctx ends: it opens its state,
// and whenever it leads it drives what is under way and serves its methods on
// conn, which must be logged in as the service scheduler. It returns nil after
// an orderly stop; no request is answered after it returned.
func Run(ctx context.Context, cfg Config, conn *bus.Conn) error {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	cfg.Log = cfg.Log.With("service", "scheduler")
	if err := cfg.Validate(); err != nil {
		return err
	}
	rcfg, err := cfg.replica()
	if err != nil {
		return errs.E("run scheduler", errkind.Invalid, "", err)
	}
	rep, err := replica.OpenContext(ctx, rcfg)
	if err != nil {
		return errs.Wrap("run scheduler", "", err)
	}
	m, err := newMetrics()
	if err != nil {
		_ = rep.Close()
		return errs.Wrap("run scheduler", "", err)
	}
	s := &server{cfg: cfg, conn: conn, rep: rep, m: m}
	s.follow(ctx)
	return errs.Wrap("stop scheduler", "", rep.Close())
}

// server is one replica, leading or not.
type server struct {
	cfg  Config
	conn *bus.Conn
	rep  *replica.Replica
	m    *metrics
	// raised: this process has raised the incarnation of a restored cell.
	raised atomic.Bool
}

// follow runs a leader for as long as this replica leads.
func (s *server) follow(ctx context.Context) {
	var stop func()
	for {
		select {
		case <-ctx.Done():
			if stop != nil {
				stop()
			}
			return
		case is := <-s.rep.Leadership():
			if stop != nil {
				stop()
				stop = nil
			}
			if is {
				stop = s.lead(ctx)
			}
		}
	}
}

// lead starts a leader and returns how to stop it and wait for its end.
func (s *server) lead(ctx context.Context) func() {
	lctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	var now atomic.Pointer[leader]
	var hearing sync.WaitGroup
	hearing.Go(func() { s.hear(lctx, &now) })
	go func() {
		defer close(done)
		for lctx.Err() == nil && s.rep.IsLeader() {
			l := newLeader(lctx, s)
			now.Store(l)
			err := l.run(lctx)
			if err == nil || lctx.Err() != nil {
				return
			}
			s.cfg.Log.Warn("leader's work stopped, starting again", "error", err)
			select {
			case <-lctx.Done():
			case <-time.After(s.cfg.RetryMin):
			}
		}
	}()
	return func() { cancel(); <-done; hearing.Wait() }
}
