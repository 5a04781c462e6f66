package hostend

import (
	"context"
	"slices"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// OwnDisk says whether the guest claims that its kernel writes the session's disk, so that Freeze,
// Thaw and Grow work.
func (c *Conn) OwnDisk() bool { return slices.Contains(c.guest.Capabilities, wire.CapabilityDisk) }

// Freeze has the guest write its file system out and keep it as it is. It thaws by itself after hold,
// at most 10 s, whatever becomes of the host. A guest may lie: what is read meanwhile is a snapshot
// only if Thaw says that the freeze had lasted.
func (c *Conn) Freeze(ctx context.Context, hold time.Duration) error {
	return c.call(ctx, "freeze disk", wire.MethodFreeze, wire.DiskFreeze{Hold: int64(hold)}, nil)
}

// Thaw ends a Freeze; expired says that it had ended before. Idempotent.
func (c *Conn) Thaw(ctx context.Context) (expired bool, err error) {
	var thawed wire.DiskThawed
	err = c.call(ctx, "thaw disk", wire.MethodThaw, nil, &thawed)
	return thawed.Expired, err
}

// Grow has the guest grow its file system to its device, once that has bytes, and returns its size.
func (c *Conn) Grow(ctx context.Context, bytes uint64) (uint64, error) {
	var grown wire.DiskGrown
	err := c.call(ctx, "grow disk", wire.MethodGrow, wire.DiskGrow{Bytes: bytes}, &grown)
	return grown.Bytes, err
}

// DiskUsage is how full the session's file system is; the guest's claim.
type DiskUsage = wire.DiskUsage

// Usage asks how full the session's file system is.
func (c *Conn) Usage(ctx context.Context) (DiskUsage, error) {
	var u DiskUsage
	err := c.call(ctx, "measure disk", wire.MethodUsage, nil, &u)
	return u, err
}
