package hostend

import (
	"context"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

type (
	// Stats describes the sandbox from inside; all of it is the guest's claim.
	Stats = wire.Stats
	// Quiesced is the result of Quiesce.
	Quiesced = wire.Quiesced
)

// Ping waits for an answer of the guest and returns the guest's clock.
func (c *Conn) Ping(ctx context.Context) (time.Time, error) {
	var pong wire.Pong
	err := c.call(ctx, "ping", wire.MethodPing, nil, &pong)
	return pong.Time, err
}

// Stats counts execs, processes and memory. LiveExecs and Background tell
// whether the sandbox is idle.
func (c *Conn) Stats(ctx context.Context) (Stats, error) {
	var stats Stats
	err := c.call(ctx, "stats", wire.MethodStats, nil, &stats)
	return stats, err
}

// Quiesce refuses starts from now on, sends SIGTERM to all user processes, after
// grace (at most 5 minutes) SIGKILL, and syncs the file systems. It is the step
// before a sleep. Remaining is not 0 if processes could not be ended. Starts
// stay refused until Resume, also after an error.
func (c *Conn) Quiesce(ctx context.Context, grace time.Duration) (Quiesced, error) {
	var q Quiesced
	err := c.call(ctx, "quiesce", wire.MethodQuiesce, wire.Quiesce{Grace: int64(grace)}, &q)
	return q, err
}

// Resume allows starts again after a Quiesce whose sleep was called off.
func (c *Conn) Resume(ctx context.Context) error {
	return c.call(ctx, "resume", wire.MethodResume, nil, nil)
}

// Sync has the guest write its file systems out while processes go on: what was written before the
// call is then on the disk that the host sees. A sentry has a page cache of its own, which a freeze
// of the host's mount does not reach.
func (c *Conn) Sync(ctx context.Context) error {
	return c.call(ctx, "sync", wire.MethodSync, nil, nil)
}
