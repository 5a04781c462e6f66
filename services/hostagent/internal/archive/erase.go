package archive

import (
	"context"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Erase deletes every object of the generation, whoever wrote it and whatever it is, and returns
// nil only once a listing found none. It is idempotent. Kinds: Invalid, Unavailable, and Busy when
// somebody keeps writing.
func (d *Depot) Erase(ctx context.Context, disk Disk) error {
	const op = "erase disk"
	if err := disk.check(); err != nil {
		return errs.Wrap(op, disk.String(), err)
	}
	for range 3 {
		if err := d.fault("erase.list"); err != nil {
			return errs.Wrap(op, disk.String(), err)
		}
		found := 0
		err := d.list(ctx, disk.prefix(), func(page []object) error {
			found += len(page)
			return d.removeAll(ctx, page)
		})
		if err != nil {
			return errs.Wrap(op, disk.String(), err)
		}
		if found == 0 {
			return nil
		}
	}
	return errs.E(op, errkind.Busy, disk.String(), "objects of it appear while they are deleted")
}

func (d *Depot) removeAll(ctx context.Context, page []object) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	next := make(chan object, len(page))
	for _, o := range page {
		next <- o
	}
	close(next)
	var wg sync.WaitGroup
	for range fetchers {
		wg.Go(func() {
			for o := range next {
				err := d.fault("erase.delete")
				if err == nil {
					err = d.remove(ctx, o.key)
				}
				if err != nil {
					stop(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return ended(ctx)
}
