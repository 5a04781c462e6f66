package gate

import (
	"context"
	"log/slog"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/policy"
)

// Follower is the part of a gate that knows the cell's policies, by itself: for what measures a gate without
// its host. While the bus is away what was last heard holds on.
type Follower struct{ p *policies }

// NewFollower makes one that knows nothing until Run. conn is the identity of a gate.
func NewFollower(conn *bus.Conn, log *slog.Logger) *Follower {
	return &Follower{newPolicies(conn, log)}
}

// Run keeps up with the bus until ctx ends and calls changed after each change, from one goroutine.
func (f *Follower) Run(ctx context.Context, changed func()) {
	f.p.changed, f.p.applied = changed, func(time.Duration) {}
	f.p.follow(ctx)
}

// Known is false while no policy could be read yet.
func (f *Follower) Known() bool { return f.p.Known() }

// Of is the policy of a session, and never nil.
func (f *Follower) Of(b *egressv1.Binding) *policy.Policy { return f.p.Of(b) }
