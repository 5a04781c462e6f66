package hostagent

import (
	"context"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

// disks is what the host needs of a store of disks; *disk.Store is one. Errors, idempotency and
// concurrency are as said there.
type disks interface {
	attacher
	minder
	keeper
	Get(k disk.Key) (disk.Record, error)
}

type attacher interface {
	Attach(ctx context.Context, w disk.Want) (disk.Attachment, error)
	Activate(k disk.Key, epoch ids.Epoch) error
	LetGo(k disk.Key) error
	Detach(ctx context.Context, k disk.Key) error
	Delete(ctx context.Context, k disk.Key) error
}

// minder looks after an attached disk.
type minder interface {
	Dirty(k disk.Key) (bool, error)
	Doubt(k disk.Key) error
	Usage(k disk.Key) (disk.Usage, error)
	Grow(ctx context.Context, k disk.Key, size uint64) (uint64, error)
	View(ctx context.Context, k disk.Key, epoch ids.Epoch) (*disk.View, error)
	SetWriters(k disk.Key, epoch ids.Epoch, w disk.Writers) error
}

type keeper interface {
	List() (disk.Inventory, error)
	Sweep(ctx context.Context, judge func(disk.Disk) disk.Verdict) (disk.Swept, error)
	Space() (disk.Space, error)
	Close() error
	Drop(ctx context.Context, k disk.Key, epoch ids.Epoch) error
}

// images is what the host needs of a store of unpacked images.
type images interface {
	Get(digest string) (driver.Image, error)
	Ensure(ctx context.Context, ref string) (driver.Image, error)
	// Block makes the image's file for machines, if it is missing.
	Block(ctx context.Context, digest string) (driver.Image, error)
	// Known lists digests and references that need no unpacking. It does not wait for one under way.
	Known() []string
}

// saves is what brings disks to the store and back; *saver.Saver is one.
type saves interface {
	Save(ctx context.Context, on saver.Session) (saver.Result, error)
	Seal(ctx context.Context, on saver.Session) (saver.Result, error)
	Fetch(ctx context.Context, on saver.Session, want saver.Wanted) (saver.Fetched, error)
	Stop(ctx context.Context, k disk.Key) error
}

// vault is what the store of disks has of a session, apart from any key; nil where disks are in
// memory.
type vault interface {
	Snapshots(ctx context.Context, d archive.Disk, head string) ([]archive.Info, error)
	Verify(ctx context.Context, d archive.Disk, head, after string, budget uint64) (archive.Verified, error)
	Sweep(ctx context.Context, d archive.Disk, epoch ids.Epoch, head string, alive func() error, inFlight ...string) (archive.Swept, error)
	Erase(ctx context.Context, d archive.Disk) error
}
