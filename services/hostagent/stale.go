package hostagent

import (
	"context"
	"errors"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

var errNoRoom = errors.New("there is no room")

// dropStale removes the image of a session that lives on elsewhere, and tells scheduler. What may yet be
// the newest is refused by the store of disks, whatever scheduler says; what changed here since it was
// asked is left to the next sweep.
func (h *host) dropStale(ctx context.Context, ref *corev1.SessionRef, asked time.Duration) error {
	const op = "drop a stale disk"
	key, err := ids.ParseSessionKey(ref.GetSession())
	if err != nil {
		return errs.E(op, errkind.Internal, "", err)
	}
	if err := h.may("disk.drop"); err != nil {
		return err
	}
	k := disk.Key{Session: key, Generation: grant.GenerationOf(ref.GetGeneration())}
	s := h.session(key)
	s.mu.Lock()
	rests := s.op == nil && s.touched < asked && (s.st.Phase == core.Absent || s.st.Phase == "")
	if rests {
		err = h.disks.Drop(ctx, k, grant.EpochOf(ref.GetEpoch())) // short, and no wake may begin meanwhile
		if err == nil || errs.Is(err, errkind.NotFound) {
			err = errors.Join(err, s.passed(k.Generation, grant.EpochOf(ref.GetEpoch())))
		}
	}
	s.mu.Unlock()
	switch {
	case !rests, errs.Is(err, errkind.Busy), errs.Is(err, errkind.Refused):
		return nil
	case err != nil && !errs.Is(err, errkind.NotFound):
		return err
	case err == nil:
		h.log.Info("removed the disk of a session that lives on elsewhere", "session", key)
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	_, err = bus.Invoke[*schedulerv1.ReportReply](ctx, h.conn, "scheduler", "report",
		&schedulerv1.ReportRequest{Session: ref, What: "dropped", Reason: "the image here was older than the session"})
	return errs.Wrap(op, key.String(), err)
}

// passed notes that the session lives on elsewhere in this epoch: a late command of an earlier one must
// not make a disk here that scheduler does not know of. mu is held.
func (s *session) passed(g ids.Generation, e ids.Epoch) error {
	if c := g.Compare(s.st.Generation); c < 0 || c == 0 && e.Compare(s.st.Epoch) <= 0 {
		return nil
	}
	st := core.State{Phase: core.Absent, Generation: g, Epoch: e, Spent: true, LastActivity: s.st.LastActivity}
	rec := s.rec
	rec.Generation, rec.Epoch, rec.Phase, rec.Spent, rec.Slept = g, e, string(core.Absent), true, false
	rec.Sandbox, rec.Reply, rec.Place, rec.Changed = "", nil, nil, time.Now().UTC()
	if err := s.h.inv.Put(rec); err != nil {
		return err
	}
	s.st, s.rec, s.touched = st, rec, s.h.lease.now()
	return nil
}

// lacks reports whether there surely is no disk of the session's generation here.
func (h *host) lacks(k disk.Key) bool {
	_, err := h.disks.Get(k)
	return errs.Is(err, errkind.NotFound)
}

// atRest reports whether a disk of the session's generation is here, in nobody's use, that is the head or
// can follow it.
func (h *host) atRest(k disk.Key, epoch ids.Epoch, req *hostv1.SleepRequest) bool {
	inv, err := h.disks.Get(k)
	return err == nil && inv.Savable(epoch, req.GetParent(), grant.EpochOf(req.GetLastActiveEpoch()))
}
