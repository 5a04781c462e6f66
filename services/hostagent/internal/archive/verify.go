package archive

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"lukechampine.com/blake3"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Damage is an object that is missing or is not what its name says.
type Damage struct {
	Object, Reason string
	Snapshots      []string // that need it, newest first
}

// Verified is the outcome of one part of a verification.
type Verified struct {
	Objects int
	Bytes   uint64
	Damaged []Damage
	// Snapshots and Total are the session's snapshots and objects in all.
	Snapshots, Total int
	Next             string // pass as after to go on; empty when all was looked at
}

// target is one object to look at.
type target struct {
	key       string
	size      uint32 // of a pack
	id        string // of a manifest
	pack      packName
	snapshots []string
}

// Verify reads every object that head and its history need and checks it against its name; no key
// is needed. It stops after budget bytes (0: no bound) and goes on after the object named by after.
// Damage is a finding, not an error. Kinds: Invalid, Unavailable.
func (d *Depot) Verify(ctx context.Context, disk Disk, head, after string, budget uint64) (Verified, error) {
	const op = "verify disk"
	var out Verified
	todo, err := d.targets(ctx, disk, head)
	if err != nil {
		return out, errs.Wrap(op, disk.String(), err)
	}
	out.Total = len(todo)
	for _, t := range todo {
		if t.id != "" {
			out.Snapshots++
		}
	}
	for i, t := range todo {
		if t.key <= after {
			continue
		}
		reason, n, err := d.look(ctx, disk, t)
		if err != nil {
			return out, errs.Wrap(op, disk.String(), err)
		}
		out.Objects++
		out.Bytes += n
		if reason != "" {
			out.Damaged = append(out.Damaged, Damage{strings.TrimPrefix(t.key, disk.prefix()), reason, t.snapshots})
		}
		if budget > 0 && out.Bytes >= budget && i+1 < len(todo) {
			out.Next = t.key
			break
		}
	}
	return out, nil
}

// targets lists the objects that are needed, in the order of their keys. What a damaged manifest
// needs besides is not known.
func (d *Depot) targets(ctx context.Context, disk Disk, head string) ([]target, error) {
	by := map[string]*target{}
	snapshots := []string{head}
	for i := 0; i < len(snapshots); i++ {
		id := snapshots[i]
		by[disk.manifest(id)] = &target{key: disk.manifest(id), id: id, snapshots: []string{id}}
		h, err := d.header(ctx, disk, id)
		if errs.Is(err, errkind.DataLoss) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if i == 0 {
			for _, past := range h.history {
				snapshots = append(snapshots, past.ID)
			}
		}
		for _, p := range h.packs {
			key := disk.pack(p.name)
			if by[key] == nil {
				by[key] = &target{key: key, size: p.size, pack: p.name}
			}
			by[key].snapshots = append(by[key].snapshots, id)
		}
	}
	out := make([]target, 0, len(by))
	for _, t := range by {
		out = append(out, *t)
	}
	slices.SortFunc(out, func(a, b target) int { return strings.Compare(a.key, b.key) })
	return out, nil
}

// look reads one object, and once more when it seems damaged: the way here may be what is broken.
func (d *Depot) look(ctx context.Context, disk Disk, t target) (reason string, n uint64, err error) {
	for range 2 {
		if err := d.fault("verify.read"); err != nil {
			return "", n, err
		}
		var b []byte
		if t.id != "" {
			b, err = d.getManifest(ctx, disk, t.id)
		} else {
			b, err = d.getAll(ctx, t.key, maxPack)
		}
		n += uint64(len(b))
		if errs.Is(err, errkind.DataLoss) {
			reason = "it is missing or cut short"
			continue
		}
		if err != nil {
			return "", n, err
		}
		if reason = t.wrong(disk, b); reason == "" {
			return "", n, nil
		}
	}
	return reason, n, nil
}

// wrong says what an object is not, or nothing.
func (t target) wrong(disk Disk, b []byte) string {
	if t.id == "" {
		switch {
		case len(b) != int(t.size):
			return fmt.Sprintf("it has %d bytes instead of %d", len(b), t.size)
		case short(blake3.Sum256(b)) != t.pack.sum:
			return "its content is not what its name says"
		}
		return ""
	}
	h, need, err := openHeader(t.id, b)
	switch {
	case err != nil:
		return err.Error()
	case h == nil:
		return errCut.Error()
	case h.disk != disk:
		return "it is of disk " + h.disk.String()
	}
	if err := checkBody(b, need); err != nil {
		return err.Error()
	}
	return ""
}
