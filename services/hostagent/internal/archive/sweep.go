package archive

import (
	"context"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Swept says what a sweep deleted, and how many objects it left though nothing that it knows needs
// them: they are of a newer epoch, or it cannot tell of which.
type Swept struct {
	Manifests, Packs, Left int
	Bytes                  uint64
}

// Sweep deletes the packs and manifests of a disk that neither head and its history nor the
// manifests named in inFlight and theirs need, where they are of the given epoch or an older one.
// In flight is every manifest of this host whose commit may have happened or may yet happen. What a
// newer owner wrote is never deleted, and all that it built on is reachable from the last head of
// this epoch; so a sweep by an owner that was replaced, with a head that is old, does no harm.
// alive is asked before each deletion; its error ends the sweep. Manifests go before packs, so that
// none stays whose packs are gone. Nothing is deleted unless every manifest that marks could be read
// and checked. Kinds: those of Load; alive's.
func (d *Depot) Sweep(ctx context.Context, disk Disk, epoch ids.Epoch, head string, alive func() error, inFlight ...string) (Swept, error) {
	const op = "sweep disk"
	var out Swept
	if epoch.IsZero() || head == "" && len(inFlight) == 0 {
		return out, errs.E(op, errkind.Invalid, disk.String(), "a sweep needs an epoch and a head")
	}
	needed, err := d.mark(ctx, disk, append([]string{head}, inFlight...))
	if err != nil {
		return out, errs.Wrap(op, disk.String(), err)
	}
	manifests, packs, err := d.dead(ctx, disk, epoch, needed, &out)
	if err != nil {
		return out, errs.Wrap(op, disk.String(), err)
	}
	for i, o := range append(manifests, packs...) {
		err := alive()
		if err == nil {
			err = d.fault("sweep.delete")
		}
		if err == nil {
			err = d.remove(ctx, o.key)
		}
		if err != nil {
			return out, errs.Wrap(op, disk.String(), err)
		}
		if i < len(manifests) {
			out.Manifests++
		} else {
			out.Packs++
		}
		out.Bytes += uint64(o.size)
	}
	return out, errs.Wrap(op, disk.String(), d.fault("sweep.done"))
}

// mark returns the keys of every object that the roots and their histories need.
func (d *Depot) mark(ctx context.Context, disk Disk, roots []string) (map[string]bool, error) {
	needed := map[string]bool{}
	one := func(id string) (*header, error) {
		key := disk.manifest(id)
		if needed[key] {
			return d.header(ctx, disk, id)
		}
		if err := d.fault("sweep.mark"); err != nil {
			return nil, err
		}
		h, err := d.header(ctx, disk, id)
		if err != nil {
			return nil, err
		}
		needed[key] = true
		for _, p := range h.packs {
			needed[disk.pack(p.name)] = true
		}
		return h, nil
	}
	for _, root := range roots {
		if root == "" {
			continue
		}
		h, err := one(root)
		if err != nil {
			return nil, err
		}
		for _, past := range h.history {
			if _, err := one(past.ID); err != nil {
				return nil, err
			}
		}
	}
	return needed, nil
}

// dead lists what is not needed and not newer than epoch.
func (d *Depot) dead(ctx context.Context, disk Disk, epoch ids.Epoch, needed map[string]bool, out *Swept) (manifests, packs []object, err error) {
	if err := d.fault("sweep.list"); err != nil {
		return nil, nil, err
	}
	inPacks, inManifests := disk.prefix()+"packs/", disk.prefix()+"manifests/"
	var unsure []object
	err = d.list(ctx, disk.prefix(), func(page []object) error {
		for _, o := range page {
			if needed[o.key] {
				continue
			}
			if name, ok := strings.CutPrefix(o.key, inPacks); ok {
				if p, err := parsePackName(name); err == nil && p.epoch.Compare(epoch) <= 0 {
					packs = append(packs, o)
					continue
				}
			} else if id, ok := strings.CutPrefix(o.key, inManifests); ok && ParseID(id) == nil {
				unsure = append(unsure, o)
				continue
			}
			out.Left++
		}
		return nil
	})
	for _, o := range unsure {
		if err != nil {
			return nil, nil, err
		}
		h, herr := d.header(ctx, disk, strings.TrimPrefix(o.key, inManifests))
		switch {
		case herr == nil && h.info.Epoch.Compare(epoch) <= 0:
			manifests = append(manifests, o)
		case herr == nil || errs.Is(herr, errkind.DataLoss):
			out.Left++ // newer, or nobody can tell
		default:
			err = herr
		}
	}
	return manifests, packs, err
}
