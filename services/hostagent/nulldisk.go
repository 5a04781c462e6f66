package hostagent

import (
	"context"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

// nullDisks stands in for a store where the driver uses no disks: it keeps the records and their
// rules, in memory, and no bytes. It serves tests and benchmarks of the control plane.
type nullDisks struct {
	mu    sync.Mutex
	disks map[disk.Key]*nullDisk
}

type nullDisk struct {
	rec      disk.Record
	attached bool
}

func newNullDisks() *nullDisks { return &nullDisks{disks: map[disk.Key]*nullDisk{}} }

func (n *nullDisks) find(op string, k disk.Key) (*nullDisk, error) {
	d := n.disks[k]
	if d == nil {
		return nil, errs.E(op, errkind.NotFound, k.String(), "this host has no disk of the session")
	}
	return d, nil
}

func (n *nullDisks) Attach(_ context.Context, w disk.Want) (disk.Attachment, error) {
	const op = "attach disk"
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.disks[w.Key]
	switch {
	case d == nil && !w.Fresh:
		return disk.Attachment{}, errs.E(op, errkind.NotFound, w.Key.String(), "this host has no disk of the session")
	case d == nil:
		d = &nullDisk{rec: disk.Record{
			Format: disk.Format, Session: w.Session, Generation: w.Generation, State: disk.Blank,
			Size: w.Size, Image: w.Image, Ephemeral: w.Ephemeral,
		}}
		n.disks[w.Key] = d
	case w.Fresh && d.rec.State != disk.Blank:
		return disk.Attachment{}, errs.E(op, errkind.Conflict, w.Key.String(), "asked for a fresh disk, but this generation was already active here")
	case !w.Fresh && !d.rec.Usable(w.Head, w.LastActive):
		return disk.Attachment{}, errs.E(op, errkind.StaleEpoch, w.Key.String(), "the local disk is not the newest")
	case d != nil && d.rec.VMWritten && !w.Raw:
		return disk.Attachment{}, errs.E(op, errkind.Refused, w.Key.String(), errkind.VMWritten+"; it wakes in a virtual machine only")
	case d.attached && d.rec.Attached != w.Epoch:
		return disk.Attachment{}, errs.E(op, errkind.Busy, w.Key.String(), "the disk is attached for another epoch")
	}
	created := d.rec.State == disk.Blank
	if !w.LastActive.IsZero() && d.rec.State != disk.Clean {
		d.rec.State, d.rec.Epoch = disk.Dirty, w.LastActive
	}
	d.rec.Attached, d.attached = w.Epoch, true
	d.rec.VMWritten = d.rec.VMWritten || w.Raw
	return disk.Attachment{Record: d.rec, Created: created}, nil
}

func (n *nullDisks) Activate(k disk.Key, epoch ids.Epoch) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	d, err := n.find("activate disk", k)
	if err != nil {
		return err
	}
	if d.rec.Attached != epoch {
		return errs.E("activate disk", errkind.StaleEpoch, k.String(), "the disk is attached for another epoch")
	}
	d.rec.State, d.rec.Epoch = disk.Dirty, epoch
	return nil
}

func (n *nullDisks) LetGo(disk.Key) error { return nil }

func (n *nullDisks) Detach(_ context.Context, k disk.Key) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if d := n.disks[k]; d != nil {
		d.attached = false
	}
	return nil
}

func (n *nullDisks) Delete(_ context.Context, k disk.Key) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.disks, k)
	return nil
}

func (n *nullDisks) Seal(_ context.Context, k disk.Key, epoch ids.Epoch) (disk.Manifest, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d, err := n.find("seal disk", k)
	if err != nil {
		return disk.Manifest{}, err
	}
	atRest := !d.attached && d.rec.Attached.Compare(epoch) < 0
	if d.rec.Attached != epoch && !atRest {
		return disk.Manifest{}, errs.E("seal disk", errkind.StaleEpoch, k.String(), "the disk belongs to another epoch")
	}
	d.attached = false
	m := disk.Manifest{Session: k.Session, Generation: k.Generation, Epoch: epoch, Parent: d.rec.Base, Image: d.rec.Image, Size: d.rec.Size}
	if d.rec.State == disk.Clean {
		m.Parent, m.ID = "", d.rec.Base
		return m, nil
	}
	if d.rec.State != disk.Dirty {
		d.rec.State, d.rec.Epoch = disk.Dirty, epoch
	}
	m.ID = "n" + k.Generation.String() + "-" + epoch.String()
	return m, nil
}

func (n *nullDisks) Commit(m disk.Manifest) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	d, err := n.find("commit disk", disk.Key{Session: m.Session, Generation: m.Generation})
	if err != nil {
		return err
	}
	d.rec.State, d.rec.Base = disk.Clean, m.ID
	return nil
}

func (n *nullDisks) Checkpoint(_ context.Context, k disk.Key, epoch ids.Epoch) (disk.Manifest, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d, err := n.find("checkpoint disk", k)
	if err != nil {
		return disk.Manifest{}, err
	}
	if !d.attached || d.rec.Attached != epoch {
		return disk.Manifest{}, errs.E("checkpoint disk", errkind.StaleEpoch, k.String(), "the disk is not attached for this epoch")
	}
	return disk.Manifest{
		ID: d.rec.Base + "c", Session: k.Session, Generation: k.Generation, Epoch: epoch, Parent: d.rec.Base, Image: d.rec.Image, Size: d.rec.Size,
	}, nil
}

func (n *nullDisks) Checkpointed(m disk.Manifest) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	d, err := n.find("checkpoint disk", disk.Key{Session: m.Session, Generation: m.Generation})
	if err == nil {
		d.rec.Base = m.ID
	}
	return err
}

func (n *nullDisks) Get(k disk.Key) (disk.Record, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d, err := n.find("read disk record", k)
	if err != nil {
		return disk.Record{}, err
	}
	return d.rec, nil
}

func (n *nullDisks) Drop(_ context.Context, k disk.Key, epoch ids.Epoch) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	d, err := n.find("drop disk", k)
	if err != nil {
		return err
	}
	if d.attached {
		return errs.E("drop disk", errkind.Busy, k.String(), "the disk is in use")
	}
	if err := d.rec.Droppable(epoch); err != nil {
		return err
	}
	delete(n.disks, k)
	return nil
}

func (n *nullDisks) List() (disk.Inventory, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var inv disk.Inventory
	for k, d := range n.disks {
		inv.Disks = append(inv.Disks, disk.Disk{ID: k, Record: d.rec, Mounted: d.attached})
	}
	return inv, nil
}

func (n *nullDisks) Sweep(_ context.Context, judge func(disk.Disk) disk.Verdict) (disk.Swept, error) {
	inv, err := n.List()
	n.mu.Lock()
	defer n.mu.Unlock()
	var out disk.Swept
	for _, d := range inv.Disks {
		switch v := judge(d); {
		case v == disk.Remove:
			delete(n.disks, d.ID)
			out.Deleted = append(out.Deleted, d.ID)
		case v == disk.KeepDetached && d.Mounted && n.disks[d.ID] != nil:
			n.disks[d.ID].attached = false
			out.Detached = append(out.Detached, d.ID)
		}
	}
	return out, err
}

func (n *nullDisks) Space() (disk.Space, error) { return disk.Space{Free: 1 << 40}, nil }
func (n *nullDisks) Close() error               { return nil }

func (n *nullDisks) Dirty(disk.Key) (bool, error) { return true, nil }
func (n *nullDisks) Doubt(disk.Key) error         { return nil }

func (n *nullDisks) Usage(disk.Key) (disk.Usage, error) { return disk.Usage{}, nil }
func (n *nullDisks) Grow(_ context.Context, k disk.Key, size uint64) (uint64, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d, err := n.find("grow disk", k)
	if err != nil {
		return 0, err
	}
	d.rec.Size = max(d.rec.Size, size)
	return d.rec.Size, nil
}

func (n *nullDisks) View(_ context.Context, k disk.Key, _ ids.Epoch) (*disk.View, error) {
	return nil, errs.E("look into a disk", errkind.Unimplemented, k.String(), "disks in memory hold no files")
}

func (n *nullDisks) SetWriters(disk.Key, ids.Epoch, disk.Writers) error { return nil }

// nullSaves makes manifests of disks in memory, which name nothing that is stored.
type nullSaves struct {
	n *nullDisks
	h *host
}

func (s nullSaves) Save(ctx context.Context, on saver.Session) (saver.Result, error) {
	m, err := s.n.Checkpoint(ctx, on.Key, on.Epoch)
	if err != nil {
		return saver.Result{}, err
	}
	return s.commit(ctx, on, m, false)
}

func (s nullSaves) Seal(ctx context.Context, on saver.Session) (saver.Result, error) {
	m, err := s.n.Seal(ctx, on.Key, on.Epoch)
	if err != nil {
		return saver.Result{}, err
	}
	return s.commit(ctx, on, m, true)
}

func (s nullSaves) commit(ctx context.Context, on saver.Session, m disk.Manifest, sealed bool) (saver.Result, error) {
	r := saver.Result{Info: archive.Info{ID: m.ID, Parent: m.Parent, Epoch: m.Epoch, TakenAt: time.Now(), Size: m.Size, Image: m.Image}}
	if m.Parent == m.ID || m.ID == "" || m.Parent == "" && s.n.clean(on.Key) {
		r.Same = true
		return r, nil
	}
	if err := s.h.commitManifest(ctx, savingRef(on), s.h.manifest(on.Generation, r.Info), sealed); err != nil {
		return r, err
	}
	if sealed {
		return r, s.n.Commit(m)
	}
	return r, s.n.Checkpointed(m)
}

func (n *nullDisks) clean(k disk.Key) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.disks[k]
	return d != nil && d.rec.State == disk.Clean
}

func (nullSaves) Fetch(_ context.Context, on saver.Session, _ saver.Wanted) (saver.Fetched, error) {
	return saver.Fetched{}, errs.E("restore disk", errkind.NotFound, on.Key.String(), "disks in memory are not saved")
}

func (nullSaves) Stop(context.Context, disk.Key) error { return nil }
