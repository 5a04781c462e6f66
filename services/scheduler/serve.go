package scheduler

import (
	"context"
	"slices"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"google.golang.org/protobuf/proto"
)

// requests of one method that may run, and mostly wait, at once.
const requestLimit = 4096

const flushTime = 5 * time.Second

// serve registers the methods of the scheduler. Who may call what is the
// catalogue's word, checked by the bus before a handler runs.
func (l *leader) serve(ctx context.Context) (*bus.Service, error) {
	svc, err := l.conn.Serve(ctx, bus.ServiceConfig{Name: "scheduler", Limit: requestLimit,
		Description: "Where sessions run, and the truth about them."})
	if err != nil {
		return nil, err
	}
	for _, err := range []error{
		led(l, svc, "wake", l.wake),
		led(l, svc, "sleep", l.sleep),
		led(l, svc, "delete", l.delete),
		led(l, svc, "join", l.join),
		led(l, svc, "lease", l.lease),
		led(l, svc, "commit_manifest", l.commitManifest),
		led(l, svc, "report", l.report),
		led(l, svc, "restore", l.restore),
		led(l, svc, "show", l.show),
		led(l, svc, "list", l.list),
		led(l, svc, "hosts", l.hosts),
		led(l, svc, "drain", l.drainCall),
		led(l, svc, "remove_host", l.removeHost),
		led(l, svc, "explain", l.explain),
		led(l, svc, "peers", l.peers),
		led(l, svc, "add_peer", l.addPeer),
		led(l, svc, "remove_peer", l.removePeer),
		bus.Handle(svc, "transfer", l.transfer), // it outlives the leadership that it ends
	} {
		if err != nil {
			_ = svc.Stop(ctx)
			return nil, err
		}
	}
	// Only now may a caller be told that the scheduler serves.
	if err := l.conn.NATS().FlushTimeout(flushTime); err != nil {
		_ = svc.Stop(ctx)
		return nil, errs.E("serve", errkind.Unavailable, "scheduler", err)
	}
	if err := svc.Announce(); err != nil {
		l.log.Warn("cannot say that this replica serves; callers ask again by themselves", "error", err)
	}
	return svc, nil
}

// led serves a method for as long as this replica leads. Whoever waits when it
// ends is told to ask the next leader, who knows all that was committed.
func led[Req, Resp proto.Message](l *leader, svc *bus.Service, method string, h func(context.Context, bus.Request, Req) (Resp, error)) error {
	return bus.Handle(svc, method, func(ctx context.Context, r bus.Request, req Req) (Resp, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(l.ctx, cancel)()
		resp, err := h(ctx, r, req)
		if err != nil && l.ctx.Err() != nil {
			return resp, errs.E("scheduler."+method, errkind.NotLeader, "", "this replica does not lead any more")
		}
		return resp, err
	})
}

// show answers with one session, also one that is deleted but remembered.
func (l *leader) show(ctx context.Context, _ bus.Request, req *schedulerv1.ShowRequest) (*schedulerv1.ShowReply, error) {
	const op = "scheduler.show"
	k, err := ids.ParseSessionKey(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	if err := l.rep.Verify(ctx); err != nil {
		return nil, errs.Wrap(op, k.String(), err)
	}
	out, live := l.find(req.GetTenant(), k)
	if out == nil {
		return nil, errs.E(op, errkind.NotFound, k.String(), "there is no such session")
	}
	reply := &schedulerv1.ShowReply{Record: out}
	if live != nil && live.State == core.Active {
		l.rep.View(func(st *core.State) {
			if h := st.Host(live.Host); h != nil {
				reply.HostKey = h.Key
			}
		})
	}
	return reply, nil
}

// find returns the record of a session, and the session if it is not deleted.
func (l *leader) find(tenant string, k ids.SessionKey) (out *schedulerv1.SessionRecord, live *core.Session) {
	l.rep.View(func(st *core.State) {
		if s := st.Session(k); s != nil && (tenant == "" || s.Tenant.String() == tenant) {
			out, live = record(s, true), s
		} else if t := st.Tombstone(k); t != nil && (tenant == "" || t.Tenant.String() == tenant) {
			out = deletedRecord(t)
		}
	})
	return out, live
}

// explain answers with the plan that a wake of a session would get now; that of
// its last placement is in its last event placed.
func (l *leader) explain(ctx context.Context, _ bus.Request, req *schedulerv1.ExplainRequest) (*schedulerv1.ExplainReply, error) {
	const op = "scheduler.explain"
	k, err := ids.ParseSessionKey(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	if err := l.rep.Verify(ctx); err != nil {
		return nil, errs.Wrap(op, k.String(), err)
	}
	rec, s := l.find(req.GetTenant(), k)
	if s == nil {
		return nil, errs.E(op, errkind.NotFound, k.String(), "there is no such session")
	}
	p := l.explained(s)
	return &schedulerv1.ExplainReply{Record: rec, Now: protoPlan(&p)}, nil
}

const (
	listDefault = 100
	listMax     = 1000
)

// list answers with a page of sessions in order of their keys.
func (l *leader) list(ctx context.Context, _ bus.Request, req *schedulerv1.ListRequest) (*schedulerv1.ListReply, error) {
	if err := l.rep.Verify(ctx); err != nil {
		return nil, errs.Wrap("scheduler.list", "", err)
	}
	limit := int(req.GetLimit())
	if limit == 0 {
		limit = listDefault
	}
	limit = min(limit, listMax)
	var recs []*schedulerv1.SessionRecord
	match := func(a core.Actor, t ids.Tenant, k ids.SessionKey) bool {
		return k.String() > req.GetAfter() && (req.GetTenant() == "" || t.String() == req.GetTenant()) &&
			(req.GetIssuer() == "" || a.Issuer == req.GetIssuer()) && (req.GetSubject() == "" || a.Subject == req.GetSubject())
	}
	var sessions []*core.Session
	var tombs []*core.Tombstone
	l.rep.View(func(st *core.State) {
		sessions = st.Sessions()
		if req.GetDeleted() {
			tombs = st.Tombstones()
			tombs = slices.DeleteFunc(tombs, func(t *core.Tombstone) bool { return st.Session(t.Key) != nil })
		}
	})
	sessions = slices.DeleteFunc(sessions, func(s *core.Session) bool { return !match(s.Actor, s.Tenant, s.Key) })
	slices.SortFunc(sessions, byKey)
	for _, s := range sessions[:min(len(sessions), limit+1)] {
		recs = append(recs, record(s, false))
	}
	for _, t := range tombs {
		if match(t.Actor, t.Tenant, t.Key) {
			recs = append(recs, deletedRecord(t))
		}
	}
	slices.SortFunc(recs, func(a, b *schedulerv1.SessionRecord) int {
		return slices.Compare([]string{a.GetSession().GetSession()}, []string{b.GetSession().GetSession()})
	})
	reply := &schedulerv1.ListReply{Records: recs}
	if len(recs) > limit {
		reply.Records = recs[:limit]
		reply.Next = recs[limit-1].GetSession().GetSession()
	}
	return reply, nil
}
