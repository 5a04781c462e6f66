package hostagent

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// links is what the host needs of the links of its sandboxes; *network.Router is one. Safe for concurrent
// use; every method is idempotent. Errors are of the kernel: after one what was asked for is not so, and may
// be asked for again.
type links interface {
	linkMaker
	linkGuard
}

type linkMaker interface {
	// Make gives a sandbox its link, not bound; asked again, the same one.
	Make(ctx context.Context, sandbox string, tap bool) (network.Link, error)
	// Remove takes a link away, bound or not; one that is not there is fine.
	Remove(ctx context.Context, sandbox string) error
	// List tells every link, those of an earlier process too, and which are bound.
	List(ctx context.Context) ([]network.Found, error)
	// Close lets go and changes nothing; Destroy leaves nothing.
	Close() error
	Destroy(ctx context.Context) error
}

type linkGuard interface {
	// Bind lets the link through while the lease holds; Unbind ends that, also of a link that is gone.
	Bind(ctx context.Context, l network.Link) error
	Unbind(ctx context.Context, l network.Link) error
	// Lease lets what is bound through for so long from now, by the kernel's clock; 0 ends it at once.
	Lease(left time.Duration) error
	// Check restores the rules if somebody took them away, and says so.
	Check(ctx context.Context) (restored bool, err error)
	// Drops counts packets that went nowhere since the rules were made, by reason.
	Drops() (map[string]uint64, error)
}

// openLinks takes over the links in a folder, or makes their router, and proves that what is not bound
// reaches nothing.
func openLinks(ctx context.Context, dir string, log *slog.Logger) (links, error) {
	r, err := network.Open(ctx, network.Config{Dir: dir, Log: log})
	if err != nil {
		return nil, err
	}
	if err := r.Canary(ctx); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}
