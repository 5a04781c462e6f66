package hostagent

import (
	"context"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// disks is what the host needs of a store of disks; *disk.Store is one. Errors, idempotency and
// concurrency are as said there.
type disks interface {
	attacher
	sealer
	keeper
}

type attacher interface {
	Attach(ctx context.Context, w disk.Want) (disk.Attachment, error)
	Activate(k disk.Key, epoch ids.Epoch) error
	Detach(ctx context.Context, k disk.Key) error
	Delete(ctx context.Context, k disk.Key) error
}

type sealer interface {
	Seal(ctx context.Context, k disk.Key, epoch ids.Epoch) (disk.Manifest, error)
	Commit(m disk.Manifest) error
	Checkpoint(ctx context.Context, k disk.Key, epoch ids.Epoch) (disk.Manifest, error)
	Checkpointed(m disk.Manifest) error
}

type keeper interface {
	List() (disk.Inventory, error)
	Sweep(ctx context.Context, judge func(disk.Disk) disk.Verdict) (disk.Swept, error)
	Space() (disk.Space, error)
	Close() error
}

// images is what the host needs of a store of unpacked images.
type images interface {
	Get(digest string) (driver.Image, error)
	Ensure(ctx context.Context, ref string) (driver.Image, error)
}
