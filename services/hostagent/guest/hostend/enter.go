package hostend

import (
	"context"
	"slices"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Waits says whether the guest claims that it was started before its sandbox was anybody's: it answers
// nothing but Ping before Enter.
func (c *Conn) Waits() bool { return slices.Contains(c.guest.Capabilities, wire.CapabilityEnter) }

// Enter has the guest make a folder, below which the session's root has been mounted, the root of the
// sandbox, and give up for good what it needed for that. It is nil as well when the folder was made the
// root before. ErrInvalid: the root has no place for what must be mounted in it; nothing was changed.
// After any error the sandbox is of no use for its session.
func (c *Conn) Enter(ctx context.Context, folder string) error {
	return c.call(ctx, "enter root", wire.MethodEnter, wire.Enter{Folder: folder}, nil)
}
