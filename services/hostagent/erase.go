package hostagent

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/blobstore"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

// eraseEvery is how often what could not be erased from the store is tried again.
const eraseEvery = time.Minute

// eraseWait bounds how long a delete waits for the store. After a delete that waited in vain, the
// deletes of the next eraseRest do not wait.
const (
	eraseWait = time.Second
	eraseRest = 5 * time.Second
)

// tidyEvery is how often what killed writers left in the store is removed, and its least age.
const tidyEvery = time.Hour

// sweepTime bounds one sweep of what a sleeping session does not need any more.
const sweepTime = 2 * time.Minute

// sweepStored removes from the store what no snapshot of a session that fell asleep needs.
func (h *host) sweepStored(on saver.Session, head string) {
	select {
	case h.sweeping <- struct{}{}:
		defer func() { <-h.sweeping }()
	case <-h.ctx.Done():
		return
	}
	ctx, cancel := context.WithTimeout(h.ctx, sweepTime)
	defer cancel()
	_, err := h.vault.Sweep(ctx, on.Disk(), on.Epoch, head, func() error { return h.may("store.sweep") })
	if err != nil && h.ctx.Err() == nil {
		h.log.Warn("the store was not swept", "session", on.Session, "error", err)
	}
}

// eraseNote is the file that says that a generation is to be erased; toErase reads its name.
func (h *host) eraseNote(d archive.Disk) string {
	return filepath.Join(h.eraseDir(), string(d.Tenant)+"."+string(d.Session)+"."+d.Generation.String())
}

// noteErase writes down, for sure, that the store still has to be cleaned of a generation. What is
// there is sealed with a key that is destroyed; it only takes space.
func (h *host) noteErase(d archive.Disk) error {
	const op = "note erasure"
	f, err := os.OpenFile(h.eraseNote(d), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return errs.E(op, errkind.Internal, string(d.Session), err)
	}
	if err := errors.Join(f.Sync(), f.Close(), syncFolder(h.eraseDir())); err != nil {
		return errs.E(op, errkind.Internal, string(d.Session), err)
	}
	return nil
}

// eraseDisk removes a disk from this host, with all that was made of it, and from the store. It reports
// whether the store is clean. A store that does not answer must not hold up the session's end: erasures
// cleans it later, and scheduler asks again.
func (h *host) eraseDisk(ctx context.Context, t ids.Tenant, k disk.Key) (clean bool, err error) {
	if err := h.saves.Stop(ctx, k); err != nil {
		return false, err
	}
	stored := h.vault != nil && t != ""
	d := archive.Disk{Tenant: t, Session: k.Session, Generation: k.Generation}
	if stored { // noted first: after a crash nobody may ask for a disk again that is not here
		if err := h.noteErase(d); err != nil {
			return false, err
		}
	}
	if err := h.disks.Delete(ctx, k); err != nil {
		return false, err
	}
	return !stored || h.eraseNow(ctx, d), nil
}

// eraseNow cleans the store of a generation and reports whether it is clean. If the store does not answer
// within eraseWait, erasures goes on. A file system that hangs ignores ctx: while an erasure hangs in it,
// eraseNow starts no other.
func (h *host) eraseNow(ctx context.Context, d archive.Disk) bool {
	if h.eraseHung.Load() > 0 || h.lease.now() < time.Duration(h.eraseAfter.Load()) {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, eraseWait)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- h.eraseStored(ctx, d) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
		h.eraseHung.Add(1)
		go func() {
			<-done
			h.eraseHung.Add(-1)
		}()
	}
	if err == nil {
		return true
	}
	h.log.Debug("the store is not clean of a deleted session yet", "session", d.Session, "error", err)
	h.eraseAfter.Store(int64(h.lease.now() + eraseRest))
	select {
	case h.erase <- struct{}{}:
	default:
	}
	return false
}

func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// eraseStored cleans the store of a generation and then forgets that it had to.
func (h *host) eraseStored(ctx context.Context, d archive.Disk) error {
	if err := h.vault.Erase(ctx, d); err != nil {
		return err
	}
	err := os.Remove(h.eraseNote(d))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// erasures tries again what could not be erased from the store, until ctx ends.
func (h *host) erasures(ctx context.Context) {
	if h.vault == nil {
		return
	}
	tick := time.NewTicker(eraseEvery)
	defer tick.Stop()
	var tidied time.Time
	for {
		if time.Since(tidied) > tidyEvery {
			tidied = time.Now()
			if _, err := blobstore.Tidy(ctx, h.bucket, tidyEvery); err != nil && ctx.Err() == nil {
				h.log.Warn("what killed writers left in the store is still there", "error", err)
			}
		}
		for _, d := range h.toErase() {
			if err := h.eraseStored(ctx, d); err != nil && ctx.Err() == nil {
				h.log.Warn("a deleted disk still takes space in the store", "session", d.Session, "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-h.erase:
		}
	}
}

func (h *host) toErase() []archive.Disk {
	entries, err := os.ReadDir(h.eraseDir())
	if err != nil {
		return nil
	}
	var out []archive.Disk
	for _, e := range entries {
		tenant, rest, _ := strings.Cut(e.Name(), ".")
		session, generation, _ := strings.Cut(rest, ".")
		t, err1 := ids.ParseTenant(tenant)
		k, err2 := ids.ParseSessionKey(session)
		g, err3 := ids.ParseGeneration(generation)
		if err := errors.Join(err1, err2, err3); err != nil {
			h.log.Warn("a note of an erasure cannot be read", "name", e.Name(), "error", err)
			continue
		}
		out = append(out, archive.Disk{Tenant: t, Session: k, Generation: g})
	}
	return out
}
