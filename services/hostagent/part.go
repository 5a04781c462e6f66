package hostagent

import (
	"context"
	"errors"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
)

// leaseLost is what streams end with when a host could not keep its lease.
const leaseLost = "this host lost its lease"

// partAtOnce is how many sessions are parted with at once.
const partAtOnce = 8

// of returns what scheduler says of the very epoch that is here, nil if it is not this host's.
func (own ownership) of(k ids.SessionKey, st core.State) *schedulerv1.OwnedSession {
	o := own.owned[k]
	if o == nil || grant.GenerationOf(o.GetSession().GetGeneration()) != st.Generation || grant.EpochOf(o.GetSession().GetEpoch()) != st.Epoch {
		return nil
	}
	return o
}

// names reports whether a sandbox is that of a session that this host owns awake.
func (own ownership) names(f driver.Found) bool {
	o := own.owned[f.Session]
	switch o.GetState() {
	case corev1.State_STATE_ACTIVE, corev1.State_STATE_WAKING, corev1.State_STATE_SLEEPING:
		return grant.GenerationOf(o.GetSession().GetGeneration()) == f.Generation && grant.EpochOf(o.GetSession().GetEpoch()) == f.Epoch
	}
	return false
}

// keeps reports whether compute in this phase agrees with what scheduler says of its epoch, or the
// command that is under way settles it.
func keeps(o *schedulerv1.OwnedSession, p core.Phase) bool {
	switch o.GetState() {
	case corev1.State_STATE_ACTIVE, corev1.State_STATE_WAKING:
		return p == core.Awake
	case corev1.State_STATE_SLEEPING:
		return p == core.Awake || p == core.Sleeping
	}
	return false
}

// torn reports whether a session was told to be awake whose record says that it wakes, with nobody
// at it: the process before died between its answer and the record. takeOver finds out what is there.
func torn(o *schedulerv1.OwnedSession, p core.Phase) bool {
	return p == core.Waking && (o.GetState() == corev1.State_STATE_ACTIVE || o.GetState() == corev1.State_STATE_SLEEPING)
}

// settle lets things run and begin again after a lease that was lost, and after a start: once this host
// has removed the compute of what it does not own, by an answer that was asked for after the loss. It
// does nothing while the lease holds. An error means that the host is not settled.
func (h *host) settle(ctx context.Context, own ownership) error {
	const op = "compare this host with what it owns"
	if !h.lease.over() {
		return nil
	}
	if h.lease.asking() == own.losses {
		if err := h.part(ctx, own); err != nil {
			return errs.E(op, errkind.Unavailable, string(h.id), err)
		}
		if h.lease.settle(own.losses) {
			h.log.Info("this host knows what it owns", "sessions", len(own.owned))
			return nil
		}
	}
	return errs.E(op, errkind.Unavailable, string(h.id), "the lease was lost meanwhile; it is asked for again")
}

// part removes all compute that is not owned, warm sandboxes too, frozen as it may be, and returns once it is gone. Nothing
// begins on this host meanwhile.
func (h *host) part(ctx context.Context, own ownership) error {
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	found, err := h.drv.List(ctx)
	if err != nil {
		return err
	}
	if !h.credible(own, found) {
		return errs.E("believe scheduler", errkind.Unavailable, string(h.id), "it says that this host owns nothing")
	}
	return h.partWith(ctx, own, found)
}

func (h *host) partWith(ctx context.Context, own ownership, found []driver.Found) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	failed := []error{h.keeper.retireAll(ctx)} // they are nobody's, and may have stood still for long
	places := make(chan struct{}, partAtOnce)
	each := func(f func() error) {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			if err := f(); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = append(failed, err)
			}
		})
	}
	for _, s := range h.all() {
		each(func() error { return s.part(ctx, own) })
	}
	wg.Wait()
	for _, f := range found {
		if !own.names(f) && !h.isOurs(f) {
			h.log.Info("removing a sandbox that this host does not own", "sandbox", f.ID, "parts", f.Parts)
			each(func() error { return h.stop(ctx, f.ID) })
		}
	}
	wg.Wait()
	return errors.Join(failed...)
}

// part ends what is here of a session in an epoch that this host does not own.
func (s *session) part(ctx context.Context, own ownership) error {
	for range 4 { // an operation, its follower, the removal, one more
		s.mu.Lock()
		o := own.of(s.key, s.st)
		op := s.op
		switch {
		case op != nil && o != nil, op == nil && (s.st.Phase == core.Absent || s.st.Phase == "" || keeps(o, s.st.Phase) || torn(o, s.st.Phase)):
			s.mu.Unlock()
			return nil
		case op != nil && (op.op == core.OpWake || op.op == core.OpSleep):
			op.cancel()
		case op == nil:
			cmds, err := s.decide(core.Disown{Why: leaseLost}, nil)
			if err != nil {
				s.mu.Unlock()
				return err
			}
			op, _, _ = s.command(cmds, nil)
		}
		s.mu.Unlock()
		if op == nil {
			continue
		}
		select {
		case <-op.done:
		case <-ctx.Done():
			return errs.E("end "+string(op.op), errkind.Deadline, s.key.String(), ctx.Err())
		}
	}
	return errs.E("end what is not owned", errkind.Busy, s.key.String(), "it does not come to rest")
}
