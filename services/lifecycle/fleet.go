package lifecycle

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
)

const (
	// askHosts is how long scheduler may take to list its hosts.
	askHosts = 2 * time.Second
	// fleetStale counts in intervals of asking: an older view is no view, and what is configured counts.
	fleetStale = 3
	// fleetFresh is how old a view may be that an open is refused by.
	fleetFresh = 50 * time.Millisecond
)

// fleet remembers what hosts offer, as scheduler listed them last. It may be
// asked from any goroutine.
type fleet struct {
	list  func(context.Context) ([]*schedulerv1.HostRecord, error)
	every time.Duration
	log   *slog.Logger

	asking sync.Mutex // one question at a time
	mu     sync.Mutex
	view   core.Fleet
	at     time.Time // of the answer; zero: never
}

func newFleet(conn *bus.Conn, every time.Duration, log *slog.Logger) *fleet {
	return &fleet{every: every, log: log, list: func(ctx context.Context) ([]*schedulerv1.HostRecord, error) {
		reply, err := bus.Invoke[*schedulerv1.HostsReply](ctx, conn, "scheduler", "hosts", &schedulerv1.HostsRequest{})
		return reply.GetHosts(), err
	}}
}

// run asks again and again until ctx ends.
func (f *fleet) run(ctx context.Context) {
	for ctx.Err() == nil {
		if _, err := f.fresh(ctx, 0); err != nil && ctx.Err() == nil {
			f.log.Debug("asking scheduler which tiers hosts offer", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(f.every):
		}
	}
}

// known is the last view, or nothing when it is too old to go by.
func (f *fleet) known() core.Fleet {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.at.IsZero() || time.Since(f.at) > fleetStale*f.every {
		return core.Fleet{}
	}
	return f.view
}

// fresh is a view that is at most so old; it asks scheduler if need be. On an
// error nothing is known.
func (f *fleet) fresh(ctx context.Context, most time.Duration) (core.Fleet, error) {
	f.asking.Lock()
	defer f.asking.Unlock()
	f.mu.Lock()
	view, age := f.view, time.Since(f.at)
	f.mu.Unlock()
	if age < most {
		return view, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askHosts)
	defer cancel()
	asked := time.Now()
	hosts, err := f.list(ctx)
	if err != nil {
		return core.Fleet{}, err
	}
	view = core.FleetOf(hosts)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.view, f.at = view, asked
	return view, nil
}
