package hostagent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
)

// callTime bounds one call to another service that has no tighter bound.
const callTime = 10 * time.Second

// ownership is a positive, fresh and complete answer of scheduler.
type ownership struct {
	owned  map[ids.SessionKey]*schedulerv1.OwnedSession
	erased []*corev1.SessionRef
	// asked is when the first page was asked for: what changed here since is not covered.
	asked time.Duration
	// losses is what lease.asking said then.
	losses int
	stale  []*corev1.SessionRef
}

// join announces this boot, takes a lease, and reads everything that this host owns.
func (h *host) join(ctx context.Context) (ownership, error) {
	own := ownership{owned: map[ids.SessionKey]*schedulerv1.OwnedSession{}, losses: h.lease.asking(), asked: h.lease.now()}
	c := h.cfg.Capacity
	req := &schedulerv1.JoinRequest{
		Host: string(h.id), Boot: h.boot, HostKey: h.key.Public().String(), Zone: h.cfg.Zone, Labels: h.cfg.Labels,
		Capacity: &corev1.Limits{CpuMillis: c.CPUMillis, MemoryBytes: c.MemoryBytes, Pids: c.PIDs, DiskBytes: c.DiskBytes},
		Load:     h.hostLoad(),
	}
	for _, t := range h.tiers.offered() {
		req.Tiers = append(req.Tiers, tierOf(string(t)))
	}
	for {
		reply, err := h.joinPage(ctx, req)
		if err != nil {
			return ownership{}, err
		}
		for _, o := range reply.GetOwned() {
			key, err := ids.ParseSessionKey(o.GetSession().GetSession())
			if err != nil {
				return ownership{}, errs.E("join", errkind.Internal, string(h.id), err)
			}
			own.owned[key] = o
		}
		own.erased = append(own.erased, reply.GetErased()...)
		own.stale = append(own.stale, reply.GetStale()...)
		if reply.GetComplete() {
			return own, nil
		}
		if reply.GetNext() == "" || reply.GetNext() <= req.After {
			return ownership{}, errs.E("join", errkind.Internal, string(h.id), "the list of what this host owns is not complete")
		}
		req.After = reply.GetNext()
	}
}

func (h *host) joinPage(ctx context.Context, req *schedulerv1.JoinRequest) (*schedulerv1.JoinReply, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	sent := h.lease.now()
	reply, err := bus.Invoke[*schedulerv1.JoinReply](ctx, h.conn, "scheduler", "join", req)
	if err != nil {
		return nil, err
	}
	if req.GetAfter() == "" {
		h.lease.granted(sent, reply.GetLease().AsDuration())
	}
	return reply, nil
}

// renewAgain is the pause after a renewal that failed: it took a third of the lease already, and
// another third of waiting would have everything frozen for one lost answer.
const renewAgain = 100 * time.Millisecond

// retellPause bounds how often news alone make the host renew its lease.
const retellPause = 50 * time.Millisecond

// keepLease renews the lease every third of its time until ctx ends. Whoever lost it joins again.
func (h *host) keepLease(ctx context.Context) {
	pause := h.lease.pause()
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		case <-h.retell:
			select { // what else changes in this moment goes with it
			case <-time.After(retellPause):
			case <-ctx.Done():
				return
			}
		}
		pause = h.lease.pause()
		if err := h.renew(ctx); err != nil && ctx.Err() == nil {
			h.log.Warn("cannot renew the lease", "left", h.lease.left(), "error", err)
			if errs.Is(err, errkind.StaleEpoch) || errs.Is(err, errkind.NotFound) {
				h.lease.lost()
				h.askRejoin()
				continue
			}
			pause = min(pause, renewAgain)
		}
	}
}

func (h *host) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, max(h.lease.pause(), time.Second))
	defer cancel()
	sent := h.lease.now()
	reply, err := bus.Invoke[*schedulerv1.LeaseReply](ctx, h.conn, "scheduler", "lease", &schedulerv1.LeaseRequest{Host: string(h.id), Boot: h.boot, Load: h.hostLoad()})
	if err == nil && !h.lease.granted(sent, reply.GetLease().AsDuration()) {
		h.askRejoin() // it was lost for a moment, or is not had yet
	}
	return err
}

func (h *host) askRejoin() {
	select {
	case h.rejoin <- struct{}{}:
	default:
	}
}

// commitManifest moves the session's head, again while the answer is not known. sealed: nothing was
// written to the disk since.
func (h *host) commitManifest(ctx context.Context, ref *corev1.SessionRef, m *corev1.Manifest, sealed bool) error {
	req := &schedulerv1.CommitManifestRequest{Session: ref, Manifest: m, Sealed: sealed}
	err := h.persist(ctx, func(ctx context.Context) error {
		if err := h.may("commit_manifest"); err != nil { // also between two tries
			return err
		}
		_, err := bus.Invoke[*schedulerv1.CommitManifestReply](ctx, h.conn, "scheduler", "commit_manifest", req)
		return err
	})
	if errs.Is(err, errkind.StaleEpoch) {
		h.meters.fenced("commit_manifest")
	}
	return err
}

// persist repeats an idempotent call while it may yet go well.
func (h *host) persist(ctx context.Context, f func(context.Context) error) error {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		cctx, cancel := context.WithTimeout(ctx, callTime)
		err := f(cctx)
		cancel()
		switch errs.Kind(err) {
		case errkind.Unavailable, errkind.Deadline, errkind.NotLeader, errkind.Exhausted:
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// report tells everybody, and scheduler for sure, that compute ended without being asked.
func (h *host) report(rec inventory.Record, c core.Report) {
	ref := refOf(rec)
	h.log.Warn("a sandbox ended by itself", "session", rec.Session, "epoch", rec.Epoch, "what", c.What, "reason", c.Reason)
	h.meters.lost(c.What)
	h.ops.Add(1)
	go func() {
		defer h.ops.Done()
		h.tell(ref, telling{what: c.What, reason: c.Reason})
		err := h.persist(h.ctx, func(ctx context.Context) error {
			_, err := bus.Invoke[*schedulerv1.ReportReply](ctx, h.conn, "scheduler", "report",
				&schedulerv1.ReportRequest{Session: ref, What: "exited", Reason: c.Reason})
			return err
		})
		if err != nil && h.ctx.Err() == nil {
			h.log.Warn("scheduler did not take the report of a lost sandbox", "session", rec.Session, "error", err)
		}
	}()
}

// telling is one of this service's events of a session.
type telling struct {
	what, reason string
	done, total  uint64
	// again: it may happen several times in one epoch. Otherwise a second telling has the same id.
	again bool
}

// tell publishes an event of a session.
func (h *host) tell(ref *corev1.SessionRef, t telling) {
	ctx, cancel := context.WithTimeout(h.ctx, callTime)
	defer cancel()
	subject := subjects.Session(ids.Tenant(ref.GetTenant()), ids.SessionKey(ref.GetSession()), t.what)
	e, at := ref.GetEpoch(), timestamppb.Now()
	id := fmt.Sprintf("host-%s-%s-%d-%d-%s", h.id, ref.GetSession(), e.GetIncarnation(), e.GetIndex(), t.what)
	if t.again {
		id += fmt.Sprintf("-%d", at.AsTime().UnixNano())
	}
	ev := &hostv1.Event{Session: ref, Host: string(h.id), At: at, What: t.what, Reason: t.reason, DoneBytes: t.done, TotalBytes: t.total}
	if _, err := h.conn.Publish(ctx, subject, ev, bus.WithID(id)); err != nil && h.ctx.Err() == nil {
		h.log.Warn("cannot publish an event", "event", t.what, "session", ref.GetSession(), "error", err)
	}
}

// fetchKeys asks credentials for what grants are checked with, and what was revoked since. It is asked
// several times a second, so it is in no trace.
func (h *host) fetchKeys(ctx context.Context, req *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error) {
	ctx = obs.Untraced(ctx)
	return bus.Invoke[*credentialsv1.JwksReply](ctx, h.conn, "credentials", "jwks", req)
}
