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
		bus.Handle(svc, "wake", l.wake),
		bus.Handle(svc, "sleep", l.sleep),
		bus.Handle(svc, "delete", l.delete),
		bus.Handle(svc, "join", l.join),
		bus.Handle(svc, "lease", l.lease),
		bus.Handle(svc, "commit_manifest", l.commitManifest),
		bus.Handle(svc, "report", l.report),
		bus.Handle(svc, "restore", l.restore),
		bus.Handle(svc, "show", l.show),
		bus.Handle(svc, "list", l.list),
		bus.Handle(svc, "hosts", l.hosts),
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
	return svc, nil
}

// show answers with one session, also one that is deleted but remembered.
func (l *leader) show(_ context.Context, _ bus.Request, req *schedulerv1.ShowRequest) (*schedulerv1.ShowReply, error) {
	const op = "scheduler.show"
	k, err := ids.ParseSessionKey(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	var out *schedulerv1.SessionRecord
	l.rep.View(func(st *core.State) {
		if s := st.Session(k); s != nil && (req.GetTenant() == "" || s.Tenant.String() == req.GetTenant()) {
			out = record(s, true)
		} else if t := st.Tombstone(k); t != nil && (req.GetTenant() == "" || t.Tenant.String() == req.GetTenant()) {
			out = deletedRecord(t)
		}
	})
	if out == nil {
		return nil, errs.E(op, errkind.NotFound, k.String(), "there is no such session")
	}
	return &schedulerv1.ShowReply{Record: out}, nil
}

const (
	listDefault = 100
	listMax     = 1000
)

// list answers with a page of sessions in order of their keys.
func (l *leader) list(_ context.Context, _ bus.Request, req *schedulerv1.ListRequest) (*schedulerv1.ListReply, error) {
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
