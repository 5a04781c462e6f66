package hostagent

import (
	"context"
	"errors"
	"os"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

// sealTime bounds a sleep, which may have much to save.
const sealTime = 30 * time.Minute

// endTime bounds a drop or delete; the next command goes on where it stopped.
const endTime = 2 * time.Minute

// stopWait bounds the attempts to stop one sandbox.
const stopWait = 30 * time.Second

// timed runs one step after another and notes their times.
type timed struct {
	ctx    context.Context
	began  time.Time
	timing corev1.Timing
	err    error
}

func newTimed(ctx context.Context) *timed { return &timed{ctx: ctx, began: time.Now()} }

// sleepStep is one step of a sleep. One that only takes compute away needs no lease.
type sleepStep struct {
	name      string
	takesAway bool
	do        func(context.Context) error
}

// do runs a step unless an earlier one failed.
func (t *timed) do(name string, f func(context.Context) error) {
	if t.err == nil {
		t.err = t.ctx.Err()
	}
	if t.err != nil {
		return
	}
	ctx, span := obs.Start(t.ctx, name)
	start := time.Now()
	err := f(ctx)
	obs.End(span, err)
	t.timing.Steps = append(t.timing.Steps, &corev1.Step{
		Name: name, Start: durationpb.New(start.Sub(t.began)), Took: durationpb.New(time.Since(start)),
	})
	t.timing.Total = durationpb.New(time.Since(t.began))
	t.err = errs.Wrap(name, "", err)
}

// sleep stops processes, takes the compute away, commits the manifest, and answers only then. Each
// step is idempotent, so a sleep that failed goes on with the next request.
func (s *session) sleep(o *operation) (proto.Message, error) {
	ctx, cancel := context.WithTimeout(o.ctx, sealTime)
	defer cancel()
	h := s.h
	t := newTimed(ctx)
	began := time.Now()
	var r saver.Result
	for _, step := range s.sleepTable(o, &r) {
		t.do(step.name, func(ctx context.Context) error {
			if !step.takesAway {
				if err := h.may(step.name); err != nil {
					return err
				}
			}
			err := step.do(ctx)
			if err == nil && h.steps.Fault != nil {
				err = h.steps.Fault(step.name)
			}
			return err
		})
	}
	h.meters.sleep(time.Since(began), t.err)
	if t.err != nil {
		return nil, errs.Wrap("sleep", s.key.String(), t.err)
	}
	h.meters.saved(r, nil)
	if !r.Same && h.vault != nil {
		h.ops.Go(func() { h.sweepStored(h.saving(o.rec), r.ID) })
	}
	return &hostv1.SleepReply{Manifest: h.manifest(o.rec.Generation, r.Info), Timing: &t.timing, LastActivity: timestamppb.New(o.rec.LastActivity)}, nil
}

// sleepTable lists the steps of a sleep; r is what came of the last one.
func (s *session) sleepTable(o *operation, r *saver.Result) []sleepStep {
	h := s.h
	return []sleepStep{
		{"host.store", false, func(ctx context.Context) error { return s.storeFirst(ctx, o) }},
		{"host.guest.quiesce", false, func(ctx context.Context) error { return s.quiesce(ctx, o.sb) }},
		{"host.driver.stop", true, func(ctx context.Context) error { return s.remove(ctx, o) }},
		{"host.disk.seal", false, func(ctx context.Context) (err error) {
			// Whatever comes of it: nobody needs the disk's key until the session is opened or closed again.
			defer func() { _ = h.saves.Stop(h.ctx, o.diskKey()) }()
			if !o.idle() { // else it was asked before anything was stopped
				err = h.storeReady(ctx)
			}
			if err == nil {
				*r, err = h.saves.Seal(ctx, h.sealing(o))
			} else {
				err = errors.Join(err, h.disks.Detach(ctx, o.diskKey()))
			}
			return s.kept(o, err)
		}},
	}
}

// sealing names the disk of a sleep.
func (h *host) sealing(o *operation) saver.Session {
	on := h.saving(o.rec)
	if req, ok := o.req.(*hostv1.SleepRequest); ok {
		on.Head = req.GetParent()
	}
	on.Unflushed = h.unwritten(o)
	return on
}

// idle reports whether it is a sleep that nobody forces, of a session whose compute is there.
func (o *operation) idle() bool {
	req, ok := o.req.(*hostv1.SleepRequest)
	return ok && !req.GetForce() && req.GetIdleSince() != nil && o.sb != nil
}

// storeFirst keeps a session awake that nobody forces to sleep while its files could not be saved.
func (s *session) storeFirst(ctx context.Context, o *operation) error {
	if !o.idle() {
		return nil
	}
	err := s.h.storeReady(ctx)
	s.tellSaved(o.rec, o.sb, err)
	if err == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, derr := s.decide(core.Recall{}, nil)
	return errors.Join(err, derr)
}

// kept says of a disk that could not be saved that it is whole here.
func (s *session) kept(o *operation, err error) error {
	switch errs.Kind(err) {
	case errkind.Unavailable, errkind.Deadline, errkind.NoCapacity, errkind.Exhausted, errkind.NotLeader, errkind.DataLoss, errkind.Denied:
	default:
		return err
	}
	s.h.log.Warn("a session stopped and its disk cannot be saved yet", "session", s.key, "error", err)
	s.h.tell(refOf(o.rec), telling{what: "unsaved", reason: "The session stopped, and its files are whole on its host, but they cannot be saved outside it yet."})
	return errs.E("save disk", errkind.Unsaved, s.key.String(), err)
}

func (o *operation) diskKey() disk.Key {
	return disk.Key{Session: o.rec.Session, Generation: o.rec.Generation}
}

// recalled is the answer to a sleep that an open took back. mu is held.
func (s *session) recalled() error {
	return errs.E("sleep", errkind.Busy, s.key.String(), &core.Refusal{
		Kind: errkind.Busy, Reason: "the session was opened before it slept", Since: time.Now()})
}

// quiesce asks the guest to end its processes, unless the sleep was taken back. A guest that does
// not answer is killed anyway.
func (s *session) quiesce(ctx context.Context, sb *sandbox) error {
	s.mu.Lock()
	_, err := s.decide(core.Stop{}, nil)
	s.mu.Unlock()
	if err != nil || sb == nil || sb.guest == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.h.cfg.Grace+5*time.Second)
	defer cancel()
	q, err := sb.guest.Quiesce(ctx, s.h.cfg.Grace)
	sb.activate.Lock()
	sb.quiet = err == nil && q.Remaining == 0
	sb.activate.Unlock()
	if err != nil || q.Remaining > 0 {
		s.h.log.Warn("processes did not end in time", "session", s.key, "remaining", q.Remaining, "error", err)
	}
	return nil
}

// remove takes all compute away; the disk stays attached.
func (s *session) remove(ctx context.Context, o *operation) error {
	if o.sb != nil && o.sb.guest != nil {
		_ = o.sb.guest.Close()
	}
	if o.rec.Sandbox == "" {
		return nil
	}
	if err := s.h.disks.LetGo(o.diskKey()); err != nil {
		return err
	}
	all := []ids.SandboxID{ids.SandboxID(o.rec.Sandbox)}
	if o.sb == nil && len(o.rec.Reply) == 0 {
		claimed, err := s.claimed(ctx)
		if err != nil {
			return err
		}
		all = append(all, claimed...)
	}
	for _, id := range all {
		if err := s.h.stop(ctx, id); err != nil {
			return err
		}
		if err := os.RemoveAll(s.h.runFolder(id)); err != nil {
			return err
		}
	}
	return nil
}

// claimed lists what the session has claimed, as the driver knows it: a process that died in a wake wrote
// down no name of it, and it holds the disk.
func (s *session) claimed(ctx context.Context) (out []ids.SandboxID, err error) {
	found, err := s.h.drv.List(ctx)
	for _, f := range found {
		if f.Session == s.key && f.ID.IsWarm() {
			out = append(out, f.ID)
		}
	}
	return out, err
}

// stop ends what leaves a sandbox, stops it, and takes its link away.
func (h *host) stop(ctx context.Context, id ids.SandboxID) error {
	unbound := h.net.unbind(ctx, id)
	if err := h.stopCompute(ctx, id); err != nil {
		return errors.Join(err, unbound)
	}
	return h.net.remove(ctx, id)
}

// stopCompute stops a sandbox, again while a mount is busy or the runtime does not answer.
func (h *host) stopCompute(ctx context.Context, id ids.SandboxID) error {
	deadline := time.Now().Add(stopWait)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := h.drv.Stop(ctx, id)
		if err == nil || ctx.Err() != nil || time.Now().After(deadline) ||
			!errs.Is(err, errkind.Busy) && !errs.Is(err, errkind.Unavailable) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

func refOf(r inventory.Record) *corev1.SessionRef {
	return &corev1.SessionRef{
		Tenant: string(r.Tenant), Session: string(r.Session),
		Generation: stamp(ids.Epoch(r.Generation)), Epoch: stamp(r.Epoch),
	}
}

// drop takes all compute away and leaves the disk as it is.
func (s *session) drop(o *operation) error {
	ctx, cancel := context.WithTimeout(o.ctx, endTime)
	defer cancel()
	if err := s.remove(ctx, o); err != nil {
		return errs.Wrap("remove compute", s.key.String(), err)
	}
	if err := s.h.saves.Stop(ctx, o.diskKey()); err != nil {
		return errs.Wrap("remove compute", s.key.String(), err)
	}
	return errs.Wrap("remove compute", s.key.String(), s.h.disks.Detach(ctx, o.diskKey()))
}

// erase removes compute and disk.
func (s *session) erase(o *operation) (proto.Message, error) {
	ctx, cancel := context.WithTimeout(o.ctx, endTime)
	defer cancel()
	if err := s.remove(ctx, o); err != nil {
		return nil, errs.Wrap("delete", s.key.String(), err)
	}
	tenant := o.rec.Tenant
	if r, ok := o.req.(*hostv1.DeleteRequest); ok {
		tenant = ids.Tenant(r.GetSession().GetTenant())
	}
	clean, err := s.h.eraseDisk(ctx, tenant, o.diskKey())
	if err != nil {
		return nil, errs.Wrap("delete", s.key.String(), err)
	}
	return &hostv1.DeleteReply{Removed: clean}, nil
}

// settled returns the stored outcome of the epoch. mu is held.
func (s *session) settled(req proto.Message) proto.Message {
	var out proto.Message
	switch req.(type) {
	case *hostv1.WakeRequest:
		out = &hostv1.WakeReply{}
	case *hostv1.SleepRequest:
		out = &hostv1.SleepReply{}
	default:
		return nil
	}
	if err := fromJSON(s.rec.Reply, out); err != nil && len(s.rec.Reply) > 0 {
		s.h.log.Warn("a settled epoch has no stored answer", "session", s.key, "error", err)
	}
	return out
}
