package archive

import (
	"context"
	"slices"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Rewind writes a new manifest whose parent is head and whose content is that of an earlier
// snapshot, head itself or one in its history; size, image and crash consistency are the
// snapshot's, epoch and time are meta's. No chunk is copied. head stays in the history. Kinds: those
// of Load and Save, and NotFound when the snapshot is not kept any more.
func (d *Depot) Rewind(ctx context.Context, disk Disk, key Key, head *Index, snapshot string, meta Meta) (*Index, error) {
	const op = "rewind disk"
	if head == nil {
		return nil, errs.E(op, errkind.Invalid, disk.String(), "it has no snapshot yet")
	}
	if err := checkSave(disk, head, meta); err != nil {
		return nil, errs.Wrap(op, disk.String(), err)
	}
	then := head
	if snapshot != head.info.ID {
		if !slices.ContainsFunc(head.history, func(i Info) bool { return i.ID == snapshot }) {
			return nil, errs.E(op, errkind.NotFound, snapshot, "it is not among the snapshots that are kept")
		}
		var err error
		if then, err = d.Load(ctx, disk, key, snapshot); err != nil {
			return nil, errs.Wrap(op, disk.String(), err)
		}
	}
	k, err := deriveKeys(disk, key)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, disk.String(), err)
	}
	ix := &Index{header: then.header, table: then.table}
	ix.info.RestoredFrom, ix.info.Added, ix.info.Parent = snapshot, 0, ""
	ix.after(head, meta)
	if err := d.putManifest(ctx, k, ix, "rewind"); err != nil {
		return nil, errs.Wrap(op, disk.String(), err)
	}
	return ix, nil
}
