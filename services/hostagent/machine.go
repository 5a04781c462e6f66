package hostagent

import (
	"context"
	"errors"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
)

const (
	// stillHold is how long a guest keeps its file system frozen when nobody thaws it.
	stillHold = 10 * time.Second
	// goOnTime bounds the attempts to let a machine go on.
	goOnTime = 30 * time.Second
	// askTime bounds a question to a guest that nobody waits for.
	askTime = 2 * time.Second
)

// raw reports whether sandboxes of a tier write the image of their disk themselves.
func (h *host) raw(tier string) bool { return h.caps[driver.Tier(tier)].RawDisk }

// machine is a virtual machine that writes its disk. It implements disk.Writers.
type machine struct {
	h     *host
	id    ids.SandboxID
	guest *hostend.Conn
}

// minds has the store of disks know who can stop the writes to a raw disk.
func (h *host) minds(sb *sandbox) error {
	if !h.raw(string(sb.Tier)) {
		return nil
	}
	k := disk.Key{Session: sb.Session, Generation: sb.Generation}
	return h.disks.SetWriters(k, sb.Epoch, &machine{h: h, id: sb.ID, guest: sb.guest})
}

// Still asks the guest, for half of the time; one that does not freeze its file system is paused.
func (m *machine) Still(ctx context.Context) (release func() error, crashConsistent bool, err error) {
	if m.guest != nil && m.guest.OwnDisk() {
		wait := stillHold / 2
		if d, ok := ctx.Deadline(); ok {
			wait = time.Until(d) / 2
		}
		began := time.Now()
		gctx, cancel := context.WithTimeout(ctx, wait)
		err = m.guest.Freeze(gctx, stillHold)
		cancel()
		if err == nil {
			return func() error { return m.thaw(began) }, false, nil
		}
		m.h.log.Warn("a guest does not freeze its file system; its machine is paused", "sandbox", m.id, "error", err)
	}
	release, perr := m.Pause(ctx)
	if perr != nil {
		return nil, false, errors.Join(err, perr)
	}
	return release, true, nil
}

// thaw ends a freeze, which nobody but the guest can say to have lasted. One that does not answer thaws
// by itself.
func (m *machine) thaw(began time.Time) error {
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	expired, err := m.guest.Thaw(ctx)
	switch {
	case err != nil:
		return err
	case expired || time.Since(began) >= stillHold:
		return errs.E("thaw disk", errkind.Deadline, string(m.id), "the guest had gone on by itself")
	}
	return nil
}

// Pause stops the machine itself.
func (m *machine) Pause(ctx context.Context) (func() error, error) {
	f, ok := m.h.drv.(driver.Freezer)
	if !ok {
		return nil, errs.E("pause machine", errkind.Unimplemented, string(m.id), "its driver cannot pause it")
	}
	if err := f.Freeze(ctx, m.id); err != nil {
		return nil, errors.Join(err, m.goOn(f)) // whatever came of it
	}
	return func() error { return m.goOn(f) }, nil
}

// goOn lets a machine go on, again until it does. One that is gone, or cannot be paused, needs nothing.
func (m *machine) goOn(f driver.Freezer) error {
	ctx, cancel := context.WithTimeout(context.Background(), goOnTime)
	defer cancel()
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := f.Thaw(ctx, m.id)
		if err == nil || errs.Is(err, errkind.NotFound) || errs.Is(err, errkind.Unimplemented) {
			return nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// goesOn lets a machine go on that an earlier process may have paused and died.
func (h *host) goesOn(sb *sandbox) error {
	f, ok := h.drv.(driver.Freezer)
	if !ok || !h.raw(string(sb.Tier)) {
		return nil
	}
	return (&machine{h: h, id: sb.ID}).goOn(f)
}

// usage measures a disk, or asks the guest that alone knows. What a guest says is its own claim, about
// its own disk.
func (h *host) usage(ctx context.Context, rec inventory.Record, sb *sandbox) (disk.Usage, error) {
	u, err := h.disks.Usage(disk.Key{Session: rec.Session, Generation: rec.Generation})
	if !errs.Is(err, errkind.Unimplemented) || sb.guest == nil {
		return u, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	said, err := sb.guest.Usage(ctx)
	if err != nil {
		return disk.Usage{}, err
	}
	if said.Size > disk.MaxSize || said.Used > said.Size || said.Free > said.Size-said.Used {
		return disk.Usage{}, errs.E("measure disk", errkind.Invalid, string(sb.ID), "the guest says what cannot be")
	}
	return disk.Usage{Size: said.Size, Used: said.Used, Free: said.Free}, nil
}

// growInside tells a machine that its disk has grown to bytes, and returns how large the file system is.
// One that does not grow now does so when it wakes next.
func (h *host) growInside(ctx context.Context, sb *sandbox, bytes uint64) (uint64, error) {
	const op = "grow disk"
	r, ok := h.drv.(driver.DiskResizer)
	if !ok || sb == nil {
		return 0, errs.E(op, errkind.Unimplemented, "", "the machine cannot be told; the file system grows at its next wake")
	}
	if err := r.ResizeDisk(ctx, sb.ID, bytes); err != nil {
		return 0, err
	}
	if sb.guest == nil || !sb.guest.OwnDisk() {
		return bytes, nil
	}
	n, err := sb.guest.Grow(ctx, bytes)
	return min(n, bytes), err
}

// unwritten says of a disk that is about to be sealed that a machine may have had things in memory which
// were not written out: it was not ended in order, or nobody knows.
func (h *host) unwritten(o *operation) bool {
	rec, err := h.disks.Get(o.diskKey())
	if err != nil || !rec.VMWritten || rec.State == disk.Clean {
		return false
	}
	if o.sb == nil {
		return true
	}
	o.sb.activate.Lock()
	defer o.sb.activate.Unlock()
	return !o.sb.quiet
}
