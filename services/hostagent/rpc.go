package hostagent

import (
	"context"
	"errors"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

func (h *host) endpoints(s *bus.Service) error {
	return errors.Join(
		bus.Handle(s, "wake", h.rpcWake),
		bus.Handle(s, "sleep", h.rpcSleep),
		bus.Handle(s, "delete", h.rpcDelete),
		bus.Handle(s, "activity", h.rpcActivity),
		bus.Handle(s, "inventory", h.rpcInventory),
		bus.Handle(s, "snapshots", h.rpcSnapshots),
		bus.Handle(s, "verify", h.rpcVerify),
		bus.Handle(s, "grow", h.rpcGrow),
		bus.Handle(s, "prepare", h.rpcPrepare),
		bus.Handle(s, "retire", h.rpcRetire),
		bus.Handle(s, "warm", h.rpcWarm),
		bus.Handle(s, "notice", h.rpcNotice),
	)
}

// target is the session that a request names, checked and ready to be acted on.
func (h *host) target(ctx context.Context, op string, ref *corev1.SessionRef) (*session, error) {
	if _, err := ids.ParseTenant(ref.GetTenant()); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	key, err := ids.ParseSessionKey(ref.GetSession())
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	if grant.GenerationOf(ref.GetGeneration()).IsZero() {
		return nil, errs.E(op, errkind.Invalid, key.String(), "the generation is missing")
	}
	select {
	case <-h.ready:
	case <-ctx.Done():
		return nil, errs.E(op, errkind.Unavailable, key.String(), "this host is still taking over what runs on it")
	}
	return h.session(key), nil
}

func (h *host) rpcWake(ctx context.Context, _ bus.Request, req *hostv1.WakeRequest) (*hostv1.WakeReply, error) {
	const op = "host.wake"
	s, err := h.target(ctx, op, req.GetSession())
	if err != nil {
		return nil, err
	}
	// After a lease that was lost it may be a session which comes back to its newest disk: it waits.
	_ = h.lease.wait(ctx)
	if err := h.may("wake"); err != nil {
		return nil, err
	}
	if !h.offers(req.GetTerms().GetTier()) {
		return nil, errs.Errorf(op, errkind.Unimplemented, "this host has no tier %s", tierName(req.GetTerms().GetTier()))
	}
	out, err := s.act(ctx, core.Wake{
		Generation: grant.GenerationOf(req.GetSession().GetGeneration()), Epoch: grant.EpochOf(req.GetSession().GetEpoch()),
	}, req)
	if err != nil {
		return nil, err
	}
	return reply[*hostv1.WakeReply](op, out)
}

func (h *host) rpcSleep(ctx context.Context, _ bus.Request, req *hostv1.SleepRequest) (*hostv1.SleepReply, error) {
	const op = "host.sleep"
	s, err := h.target(ctx, op, req.GetSession())
	if err != nil {
		return nil, err
	}
	if req.GetReason() == drainReason {
		h.keeper.drain()
	}
	ev := core.Sleep{
		Generation: grant.GenerationOf(req.GetSession().GetGeneration()), Epoch: grant.EpochOf(req.GetSession().GetEpoch()),
		Force: req.GetForce(), Why: h.sleepWhy(req.GetReason()),
	}
	// Who forces it for another reason than a drain wants no compute left, and nothing saved: it may be an
	// epoch that was given up.
	if !req.GetForce() || req.GetReason() == drainReason {
		k := disk.Key{Session: s.key, Generation: ev.Generation}
		ev.AtRest = h.atRest(k, ev.Epoch, req)
		ev.Missing = req.GetForce() && h.lacks(k)
	}
	if err := h.may("sleep"); err != nil && !s.slept(ev) {
		return nil, err
	}
	if at := req.GetIdleSince(); at != nil {
		ev.IdleSince = at.AsTime()
	}
	out, err := s.act(ctx, ev, req)
	if r := core.RefusalOf(err); r != nil && r.Kind == errkind.Busy && !r.Since.IsZero() {
		return &hostv1.SleepReply{Busy: true, LastActivity: timestamppb.New(r.Since)}, nil
	}
	if r := core.RefusalOf(err); r != nil && r.Kind == errkind.NotFound && ev.Missing {
		return &hostv1.SleepReply{Missing: true}, nil
	}
	if err != nil {
		return nil, err
	}
	return reply[*hostv1.SleepReply](op, out)
}

// slept reports whether the sleep has an answer already, which needs no lease.
func (s *session) slept(ev core.Sleep) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.st.Slept && s.st.Generation == ev.Generation && s.st.Epoch == ev.Epoch
}

func (h *host) rpcDelete(ctx context.Context, _ bus.Request, req *hostv1.DeleteRequest) (*hostv1.DeleteReply, error) {
	const op = "host.delete"
	s, err := h.target(ctx, op, req.GetSession())
	if err != nil {
		return nil, err
	}
	return s.delete(ctx, grant.GenerationOf(req.GetSession().GetGeneration()), req)
}

// delete removes everything of a generation. Of one that a newer has followed only a disk can be
// left. The reply says whether the store is clean, too.
func (s *session) delete(ctx context.Context, g ids.Generation, req *hostv1.DeleteRequest) (*hostv1.DeleteReply, error) {
	out, err := s.act(ctx, core.Delete{Generation: g}, req)
	if r := core.RefusalOf(err); r != nil && r.Kind == errkind.StaleEpoch {
		clean, err := s.h.eraseDisk(ctx, ids.Tenant(req.GetSession().GetTenant()), disk.Key{Session: s.key, Generation: g})
		return &hostv1.DeleteReply{Removed: clean}, err
	}
	if err != nil {
		return nil, err
	}
	return reply[*hostv1.DeleteReply]("host.delete", out)
}

// reply is what an operation answered, which is of the type that its request has.
func reply[T any](op string, out any) (T, error) {
	t, ok := out.(T)
	if !ok {
		return t, errs.Errorf(op, errkind.Internal, "the operation answered %T", out)
	}
	return t, nil
}

func (h *host) rpcActivity(ctx context.Context, _ bus.Request, req *hostv1.ActivityRequest) (*hostv1.ActivityReply, error) {
	const op = "host.activity"
	s, err := h.target(ctx, op, req.GetSession())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.awakeIn(op, req.GetSession()); err != nil {
		return nil, err
	}
	return &hostv1.ActivityReply{Busy: s.st.Work > 0, IdleSince: timestamppb.New(s.st.LastActivity)}, nil
}

// awakeIn refuses unless the session is awake in exactly this generation and epoch. mu is held.
func (s *session) awakeIn(op string, ref *corev1.SessionRef) error {
	g, e := grant.GenerationOf(ref.GetGeneration()), grant.EpochOf(ref.GetEpoch())
	if s.st.Generation != g || s.st.Epoch != e || s.st.Phase != core.Awake {
		s.h.meters.fenced(op)
		return errs.Errorf(op, errkind.StaleEpoch, "the session is not awake here in generation %s and epoch %s", g, e)
	}
	return nil
}

func (h *host) rpcInventory(ctx context.Context, _ bus.Request, _ *hostv1.InventoryRequest) (*hostv1.InventoryReply, error) {
	const op = "host.inventory"
	found, err := h.drv.List(ctx)
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	inv, err := h.disks.List()
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	out := &hostv1.InventoryReply{Strays: inv.Strays}
	out.Warm, _ = h.warmSandboxes()
	for _, f := range found {
		if f.Session == "" && h.keeper.has(f.ID) {
			continue
		}
		rec, ours := h.describe(ctx, f)
		if !ours {
			for _, part := range f.Parts {
				out.Strays = append(out.Strays, string(f.ID)+": "+part)
			}
			continue
		}
		out.Sandboxes = append(out.Sandboxes, rec)
	}
	all, err := h.net.list(ctx)
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	for _, l := range h.net.strays(found, all) {
		out.Strays = append(out.Strays, l.Sandbox+": link "+l.Name)
	}
	for _, d := range inv.Disks {
		ref := &corev1.SessionRef{Session: string(d.ID.Session), Generation: stamp(ids.Epoch(d.ID.Generation)), Epoch: stamp(d.Epoch)}
		out.Disks = append(out.Disks, &hostv1.DiskRecord{
			Session: ref, Clean: d.State == disk.Clean, Manifest: d.Base, SizeBytes: d.Size, AllocatedBytes: d.Allocated, Mounted: d.Mounted,
		})
	}
	return out, nil
}

// describe tells what is known of a sandbox; ours is false if it belongs to no session here.
func (h *host) describe(ctx context.Context, f driver.Found) (rec *hostv1.SandboxRecord, ours bool) {
	h.mu.Lock()
	s := h.sessions[f.Session]
	h.mu.Unlock()
	if s == nil {
		return nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.has(f) || s.st.Phase == core.Absent {
		return nil, false
	}
	rec = &hostv1.SandboxRecord{
		Session: refOf(s.rec), Tier: tierOf(string(f.Tier)), Container: string(f.ID), Claimed: f.ID.IsWarm(),
		LastActivity: timestamppb.New(s.st.LastActivity), Execs: uint32(s.st.Work),
	}
	if m, ok := h.drv.(driver.Meter); ok {
		if st, err := m.Stats(ctx, f.ID); err == nil {
			rec.Processes, rec.MemoryBytes = st.Processes, st.MemoryBytes
		}
	}
	return rec, true
}
