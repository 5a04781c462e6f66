package lifecycle

import (
	"context"
	"slices"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
)

func (s *service) serve(micro *bus.Service) error {
	if err := bus.Handle(micro, "open", s.open); err != nil {
		return err
	}
	if err := bus.Handle(micro, "close", s.close); err != nil {
		return err
	}
	if err := bus.Handle(micro, "delete", s.delete); err != nil {
		return err
	}
	if err := bus.Handle(micro, "tier_policy", s.tierPolicy); err != nil {
		return err
	}
	return bus.Handle(micro, "status", s.status)
}

// tierPolicy shows an operator the policy in force.
func (s *service) tierPolicy(context.Context, bus.Request, *lifecyclev1.TierPolicyRequest) (*lifecyclev1.TierPolicyReply, error) {
	return &lifecyclev1.TierPolicyReply{Source: s.source.Source, Text: string(s.source.Text)}, nil
}

// open applies the terms and asks scheduler for the session to be active.
func (s *service) open(ctx context.Context, _ bus.Request, req *lifecyclev1.OpenRequest) (*lifecyclev1.OpenReply, error) {
	v := req.GetVerified()
	if err := complete(v); err != nil {
		return nil, err
	}
	cmds, refusal := s.decideOpen(ctx, core.OpenAsked{Verified: v, Ask: req.GetAsk(), Fleet: s.fleet.known()})
	var reply *lifecyclev1.OpenReply
	for _, cmd := range cmds {
		switch c := cmd.(type) {
		case core.Publish:
			s.tell(ctx, c)
		case core.Wake:
			wake, err := s.wake(ctx, c.Admission)
			if err != nil {
				return nil, err
			}
			reply = &lifecyclev1.OpenReply{Wake: wake, Terms: wake.GetTerms()}
		}
	}
	if refusal != nil {
		return nil, errs.E("open", errkind.Refused, "", refusal)
	}
	return reply, nil
}

// decideOpen decides; a refusal that hangs on what hosts offer is decided again by
// what they offer now. When that cannot be known, scheduler has the last word.
func (s *service) decideOpen(ctx context.Context, e core.OpenAsked) ([]core.Command, error) {
	cmds, refusal := core.Decide(s.policy, e, s.now())
	if refusal == nil || !e.Fleet.Known {
		return cmds, refusal
	}
	blind := e
	blind.Fleet = core.Fleet{}
	if _, err := core.Decide(s.policy, blind, s.now()); err != nil {
		return cmds, refusal
	}
	fresh, err := s.fleet.fresh(ctx, fleetFresh)
	if err != nil {
		s.log.Warn("an open is not refused by what hosts offered before: scheduler cannot be asked", "error", err)
	}
	e.Fleet = fresh
	return core.Decide(s.policy, e, s.now())
}

// wake asks scheduler, and tells of it beside that. A session that is older than
// the newest of several keys is known by scheduler alone: then its answer says
// whom to tell, and an event under another key would lead nowhere.
func (s *service) wake(ctx context.Context, a *corev1.Admission) (*schedulerv1.WakeReply, error) {
	keys := a.GetKeys()
	if len(keys) == 1 {
		s.resuming(ctx, a, keys[0])
	}
	asking, cancel := context.WithDeadline(ctx, a.GetDeadline().AsTime())
	defer cancel()
	reply, err := bus.Invoke[*schedulerv1.WakeReply](asking, s.conn, "scheduler", "wake", &schedulerv1.WakeRequest{Admission: a})
	if len(keys) > 1 {
		key := keys[0]
		if found := reply.GetSession().GetSession(); err == nil && slices.Contains(keys, found) {
			key = found
		}
		s.resuming(ctx, a, key)
	}
	return reply, err
}

// resuming tells that a wake of the session was asked for.
func (s *service) resuming(ctx context.Context, a *corev1.Admission, key string) {
	tenant := a.GetActor().GetTenant()
	s.tell(ctx, core.Publish{Name: "resume", Tenant: tenant, Session: key, Body: &lifecyclev1.Resume{
		Session: &corev1.SessionRef{Tenant: tenant, Session: key},
		Cause:   a.GetCause(), Terms: a.GetTerms(), RequestId: a.GetRequestId()}})
}

// close is a sleep that the user asked for; it does not ask whether the sandbox is busy.
func (s *service) close(ctx context.Context, _ bus.Request, req *lifecyclev1.CloseRequest) (*lifecyclev1.CloseReply, error) {
	v := req.GetVerified()
	if err := complete(v); err != nil {
		return nil, err
	}
	reply, err := bus.Invoke[*schedulerv1.SleepReply](ctx, s.conn, "scheduler", "sleep", &schedulerv1.SleepRequest{
		Tenant: v.GetActor().GetTenant(), Session: v.GetKeys()[0], Keys: v.GetKeys(), Reason: "close",
		RequestId: v.GetRequestId(), BodyHash: v.GetBodyHash()})
	if err != nil {
		return nil, err
	}
	return &lifecyclev1.CloseReply{Session: reply.GetSession(), State: reply.GetState()}, nil
}

func (s *service) delete(ctx context.Context, _ bus.Request, req *lifecyclev1.DeleteRequest) (*lifecyclev1.DeleteReply, error) {
	v := req.GetVerified()
	if err := complete(v); err != nil {
		return nil, err
	}
	reply, err := bus.Invoke[*schedulerv1.DeleteReply](ctx, s.conn, "scheduler", "delete", &schedulerv1.DeleteRequest{
		Tenant: v.GetActor().GetTenant(), Session: v.GetKeys()[0], Keys: v.GetKeys(),
		RequestId: v.GetRequestId(), BodyHash: v.GetBodyHash(), StoredAt: v.GetStoredAt()})
	if err != nil {
		return nil, err
	}
	return &lifecyclev1.DeleteReply{Session: reply.GetSession(), State: reply.GetState()}, nil
}

// status lists one principal's sessions; identity fixed the principal.
func (s *service) status(ctx context.Context, _ bus.Request, req *schedulerv1.ListRequest) (*schedulerv1.ListReply, error) {
	if req.GetTenant() == "" || req.GetIssuer() == "" || req.GetSubject() == "" {
		return nil, errs.E("status", errkind.Invalid, "", "tenant, issuer and subject must all be named")
	}
	return bus.Invoke[*schedulerv1.ListReply](ctx, s.conn, "scheduler", "list", req)
}

// complete refuses what identity would never send.
func complete(v *lifecyclev1.Verified) error {
	switch {
	case v.GetActor().GetTenant() == "" || v.GetActor().GetIssuer() == "" || v.GetActor().GetSubject() == "":
		return errs.E("verify request", errkind.Invalid, "", "the actor is incomplete")
	case len(v.GetKeys()) == 0:
		return errs.E("verify request", errkind.Invalid, "", "there is no session key")
	case v.GetRequestId() == "":
		return errs.E("verify request", errkind.Invalid, "", "there is no request id")
	}
	return nil
}

// tell publishes an event beside the critical path, in order and again until
// the stream took it: an open answers while the stream has no leader, which is
// 4 to 8 s after a node of the bus died. After a minute without a stream an
// event is logged and lost; what it told is in scheduler's events and in the
// audit too.
func (s *service) tell(ctx context.Context, p core.Publish) {
	tenant, err1 := ids.ParseTenant(p.Tenant)
	session, err2 := ids.ParseSessionKey(p.Session)
	if err1 != nil || err2 != nil {
		s.log.Warn("event without a valid session", "event", p.Name, "tenant", p.Tenant)
		return
	}
	if !s.events.Offer(ctx, subjects.Session(tenant, session, p.Name), p.Body) {
		s.log.Warn("event not published: too many wait for a bus that can be written", "event", p.Name)
	}
}
