package hostagent

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// vacateTime bounds the end of all that a removed host has; what is left then is said.
const vacateTime = time.Minute

// wasRemoved reports that scheduler said that this very host was removed for good. Other refusals, of
// a login for one, are not that word.
func (h *host) wasRemoved(err error) bool {
	return errs.Is(err, errkind.Denied) && strings.Contains(err.Error(), "host "+string(h.id)+" "+errkind.HostRemoved)
}

// dismiss ends a host that was removed: it takes no more requests, and of what it made only files are
// left. close lets go of the disks' file system and dismisses the watchdog.
func (h *host) dismiss(svc *bus.Service) error {
	h.log.Warn("this host was removed from the cell; it stops what runs here and ends")
	ctx, cancel := context.WithTimeout(context.Background(), vacateTime)
	defer cancel()
	left := h.vacate(ctx)
	h.cancel()
	left = errors.Join(left, h.finish(svc))
	const said = errkind.HostRemoved + "; its files stay in %s, it may join under another id"
	if left != nil {
		return errs.Errorf("", errkind.Denied, "host %s "+said+", and not all of it could be ended: %w", h.id, h.cfg.Dir, left)
	}
	return errs.Errorf("", errkind.Denied, "host %s "+said+", and nothing of it runs here any more", h.id, h.cfg.Dir)
}

// vacate stops all sandboxes and detaches all disks.
func (h *host) vacate(ctx context.Context) error {
	h.keeper.shut(errkind.HostRemoved)
	found, err := h.drv.List(ctx)
	if err != nil {
		return err
	}
	// A session that does not come to rest is no reason to leave its sandbox.
	if err := h.partWith(ctx, ownership{}, found); err != nil {
		h.log.Warn("a session of a removed host did not end in order", "error", err)
	}
	rest, err := h.drv.List(ctx)
	failed := []error{err}
	for _, f := range rest {
		failed = append(failed, h.stop(ctx, f.ID))
	}
	_, err = h.disks.Sweep(ctx, func(disk.Disk) disk.Verdict { return disk.KeepDetached })
	return errors.Join(append(failed, err)...)
}
