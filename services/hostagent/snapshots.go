package hostagent

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/frozen"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

const (
	// lookEvery is how often the host looks which disks are due.
	lookEvery = time.Second
	// savers is how many disks are saved at once beside the sessions that go to sleep.
	savers = 2
	// lastSaveBackoff is the longest pause after a snapshot that could not be taken.
	lastSaveBackoff = 5 * time.Minute
)

// saved is what a host remembers of the disk of one epoch.
type saved struct {
	every   time.Duration // of the terms
	next    time.Time
	failed  int // in a row
	running bool
	unsaved bool // it was said that the disk cannot be saved
	quota   int  // how full its user was told last that it is
	asked   bool // a guest is being asked how full it is
}

// memo is what is remembered of a sandbox's disk. session.mu is held.
func (sb *sandbox) memo() *saved {
	if sb.saved == nil {
		sb.saved = &saved{}
	}
	return sb.saved
}

// snapshots saves the disks of awake sessions at the interval of their plan, until ctx ends.
func (h *host) snapshots(ctx context.Context) {
	places := make(chan struct{}, savers)
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, s := range h.all() {
				if rec, sb, ok := s.due(now); ok {
					h.ops.Go(func() {
						places <- struct{}{}
						defer func() { <-places }()
						s.snapshot(ctx, rec, sb)
					})
				}
			}
		}
	}
}

// due reports whether a snapshot of the session is due, and takes it upon the caller.
func (s *session) due(now time.Time) (inventory.Record, *sandbox, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.st.Phase != core.Awake || s.sb == nil || s.sb.memo().running {
		return inventory.Record{}, nil, false
	}
	sv := s.sb.memo()
	if sv.next.IsZero() { // just woken or taken over
		sv.every = everyOf(termsOf(s.rec))
		sv.next = now.Add(sv.every)
	}
	if sv.every <= 0 || now.Before(sv.next) {
		return inventory.Record{}, nil, false
	}
	sv.running = true
	return s.rec, s.sb, true
}

// everyOf is the time between two snapshots of a session; zero: none are taken by themselves.
func everyOf(t *corev1.Terms) time.Duration {
	if ephemeral(t) {
		return 0
	}
	return t.GetSnapshots().GetEvery().AsDuration()
}

// snapshot saves the disk if it was written to since the last time.
func (s *session) snapshot(ctx context.Context, rec inventory.Record, sb *sandbox) {
	on := s.h.saving(rec)
	err := s.h.save(ctx, on, sb)
	s.mu.Lock()
	sv := sb.memo()
	every := sv.every
	sv.running = false
	sv.next = time.Now().Add(every)
	if err != nil {
		sv.failed++
		sv.next = time.Now().Add(min(every<<min(sv.failed, 6), max(every, lastSaveBackoff)))
	} else {
		sv.failed = 0
	}
	s.mu.Unlock()
	if ctx.Err() == nil {
		s.tellSaved(rec, sb, err)
	}
}

// save takes one snapshot, of everything that was written before it was asked for: the guest writes
// out what it holds itself, then the host. A guest that does not answer is saved all the same, as
// after a power cut: nothing depends on its being well.
func (h *host) save(ctx context.Context, on saver.Session, sb *sandbox) error {
	if err := h.may("snapshot"); err != nil {
		return err
	}
	if err := flush(ctx, sb); err != nil {
		if ctx.Err() != nil {
			return err
		}
		h.log.Warn("a guest does not write out its files; the snapshot is crash-consistent", "session", on.Session, "error", err)
		on.Unflushed = true
	}
	// What a machine has in memory shows nowhere: one that says nothing may have written anything.
	unknown := on.Unflushed && sb != nil && h.raw(string(sb.Tier))
	if dirty, err := h.disks.Dirty(on.Key); err != nil || !dirty && !unknown {
		return err
	}
	r, err := h.saves.Save(ctx, on)
	h.meters.saved(r, err)
	return err
}

// tellSaved says once that a disk cannot be saved, and once that it can be again. What a sleep or a
// delete ended is neither. Users hear that it is so; why, with the names of the store, is in the log.
func (s *session) tellSaved(rec inventory.Record, sb *sandbox, err error) {
	switch errs.Kind(err) {
	case errkind.Superseded, errkind.StaleEpoch, errkind.NotFound:
		return
	}
	s.mu.Lock()
	was := sb.memo().unsaved
	sb.memo().unsaved = err != nil
	s.mu.Unlock()
	switch {
	case err != nil:
		s.h.log.Warn("cannot save a disk", "session", rec.Session, "error", err)
		if !was {
			s.h.tell(refOf(rec), telling{what: "unsaved", again: true,
				reason: "The files cannot be saved outside their host at the moment; nothing is lost, and the session goes on."})
		}
	case was:
		s.h.tell(refOf(rec), telling{what: "saved", reason: "The files are saved again.", again: true})
	}
}

// markFrozen leaves word for the watchdog, which thaws a disk whose hostagent died in between.
func (h *host) markFrozen(k disk.Key, mountpoint string) (unmark func(), err error) {
	return frozen.Mark(frozen.Dir(h.cfg.Dir), k.String(), mountpoint)
}
