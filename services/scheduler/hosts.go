package scheduler

import (
	"cmp"
	"context"
	"slices"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"google.golang.org/protobuf/types/known/durationpb"
)

// maxID bounds the id of a manifest or of an image.
const maxID = 256

// ownedPage is how many owned sessions fit in one answer.
const ownedPage = 1000

// sameHost refuses a host that speaks for another.
func sameHost(r bus.Request, named string) (ids.Host, error) {
	h, err := ids.ParseHost(named)
	if err != nil {
		return "", err
	}
	if r.Caller.Host != h {
		return "", errs.Errorf("check caller", errkind.Denied, "host %s may not speak for host %s", r.Caller.Host, h)
	}
	return h, nil
}

// join records a host's boot, grants a lease, and tells it all that it owns.
func (l *leader) join(ctx context.Context, r bus.Request, req *schedulerv1.JoinRequest) (*schedulerv1.JoinReply, error) {
	const op = "scheduler.join"
	h, err := sameHost(r, req.GetHost())
	if err != nil {
		return nil, errs.Wrap(op, req.GetHost(), err)
	}
	if err := checkJoin(req); err != nil {
		return nil, errs.Wrap(op, h.String(), err)
	}
	if req.GetAfter() == "" {
		out, err := l.apply(ctx, core.Entry{Join: &core.Host{ID: h, Boot: req.GetBoot(), Key: req.GetHostKey(), Tiers: req.GetTiers(),
			Capacity: limitsOf(req.GetCapacity()), Zone: req.GetZone(), Labels: req.GetLabels(), CPUPercent: l.cfg.CPUPercent}})
		if err != nil {
			return nil, errs.Wrap(op, h.String(), err)
		}
		if out.Refused != nil {
			return nil, refused(op, h.String(), out.Refused)
		}
		if l.leases.grant(h, req.GetBoot()) {
			l.driver.joined(h)
		}
		l.eraseNow()
	}
	return l.owned(h, ids.SessionKey(req.GetAfter())), nil
}

func checkJoin(req *schedulerv1.JoinRequest) error {
	switch {
	case !ids.IsToken(req.GetBoot()):
		return errs.E("read request", errkind.Invalid, "", "the boot must be one token of a-z, 0-9, _ and -")
	case len(req.GetHostKey()) > 256, len(req.GetTiers()) > 16, len(req.GetLabels()) > 64, len(req.GetZone()) > 63:
		return errs.E("read request", errkind.TooLarge, "", "host key, tiers, labels or zone is too long")
	case len(req.GetTiers()) == 0:
		return errs.E("read request", errkind.Invalid, "", "the host offers no tier")
	case req.GetCapacity().GetMemoryBytes() == 0:
		return errs.E("read request", errkind.Invalid, "", "the host has no memory to give")
	}
	for k, v := range req.GetLabels() {
		if len(k) > 63 || len(v) > 255 {
			return errs.E("read request", errkind.TooLarge, "", "a label is too long")
		}
	}
	return nil
}

// owned reads what a host owns, from a state that holds its join.
func (l *leader) owned(h ids.Host, after ids.SessionKey) *schedulerv1.JoinReply {
	reply := &schedulerv1.JoinReply{Lease: durationpb.New(l.cfg.Lease), Complete: true}
	var mine []*core.Session
	l.rep.View(func(st *core.State) {
		for _, s := range st.Sessions() {
			if s.Host == h && s.Key > after {
				mine = append(mine, s)
			}
		}
		for _, t := range st.Tombstones() {
			for _, e := range t.Erase {
				if e.Host == h && !e.Done && after == "" {
					reply.Erased = append(reply.Erased, protoRef(t.Tenant, e.Ref(t)))
				}
			}
		}
	})
	slices.SortFunc(mine, byKey)
	if len(mine) > ownedPage {
		mine = mine[:ownedPage]
		reply.Complete, reply.Next = false, mine[ownedPage-1].Key.String()
	}
	for _, s := range mine {
		reply.Owned = append(reply.Owned, ownedSession(s))
	}
	return reply
}

func byKey(a, b *core.Session) int { return cmp.Compare(a.Key, b.Key) }

// lease renews; a host that is unknown, lost or of another boot must join.
func (l *leader) lease(_ context.Context, r bus.Request, req *schedulerv1.LeaseRequest) (*schedulerv1.LeaseReply, error) {
	const op = "scheduler.lease"
	h, err := sameHost(r, req.GetHost())
	if err != nil {
		return nil, errs.Wrap(op, req.GetHost(), err)
	}
	lost := true // also when the loss was recorded while the host joined again
	l.rep.View(func(st *core.State) {
		if rec := st.Host(h); rec != nil {
			lost = rec.Lost || rec.Boot != req.GetBoot()
		}
	})
	if lost || !l.leases.renew(h, req.GetBoot()) {
		return nil, errs.E(op, errkind.StaleEpoch, h.String(), "this boot holds no lease; join again")
	}
	return &schedulerv1.LeaseReply{Lease: durationpb.New(l.cfg.Lease)}, nil
}

// commitManifest moves the head of a session that the calling host owns.
func (l *leader) commitManifest(ctx context.Context, r bus.Request, req *schedulerv1.CommitManifestRequest) (*schedulerv1.CommitManifestReply, error) {
	const op = "scheduler.commit_manifest"
	_, ref, err := parseRef(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	m := req.GetManifest()
	if max(len(m.GetId()), len(m.GetParent()), len(m.GetImageDigest()), len(m.GetRestoredFrom())) > maxID {
		return nil, errs.E(op, errkind.TooLarge, ref.Session.String(), "an id of the manifest is too long")
	}
	if m.GetGeneration() != nil && generationOf(m.GetGeneration()) != ref.Generation || m.GetEpoch() != nil && epochOf(m.GetEpoch()) != ref.Epoch {
		l.m.fenced(ctx, "commit_manifest")
		return nil, errs.E(op, errkind.StaleEpoch, ref.Session.String(), "the manifest is of another generation or epoch than the request")
	}
	out, err := l.apply(ctx, core.Entry{Manifest: &core.ManifestCmd{Ref: ref, Host: r.Caller.Host, Manifest: manifestOf(m)}})
	if err != nil {
		return nil, errs.Wrap(op, ref.Session.String(), err)
	}
	if out.Refused != nil {
		l.m.fenced(ctx, "commit_manifest")
		return nil, refused(op, ref.Session.String(), out.Refused)
	}
	return &schedulerv1.CommitManifestReply{Head: out.Session.Manifest}, nil
}

// restore notes the snapshot that the next wake of a session brings back.
func (l *leader) restore(ctx context.Context, _ bus.Request, req *schedulerv1.RestoreRequest) (*schedulerv1.RestoreReply, error) {
	const op = "scheduler.restore"
	t, err := ids.ParseTenant(req.GetTenant())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	k, err := ids.ParseSessionKey(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	if len(req.GetHead()) > maxID || len(req.GetSnapshot()) > maxID {
		return nil, errs.E(op, errkind.TooLarge, k.String(), "the id of the head or of the snapshot is too long")
	}
	out, err := l.apply(ctx, core.Entry{Restore: &core.Restore{Tenant: t, Session: k, Generation: generationOf(req.GetGeneration()),
		Head: req.GetHead(), Snapshot: req.GetSnapshot(), AsOf: timeOf(req.GetAsOf())}})
	if err != nil {
		return nil, errs.Wrap(op, k.String(), err)
	}
	if out.Refused != nil {
		if out.Refused.Kind == errkind.StaleEpoch {
			l.m.fenced(ctx, "restore")
		}
		return nil, refused(op, k.String(), out.Refused)
	}
	return &schedulerv1.RestoreReply{Record: record(out.Session, true)}, nil
}

// report records that compute ended by itself.
func (l *leader) report(ctx context.Context, r bus.Request, req *schedulerv1.ReportRequest) (*schedulerv1.ReportReply, error) {
	const op = "scheduler.report"
	_, ref, err := parseRef(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	if req.GetWhat() != "exited" {
		return nil, errs.Errorf(op, errkind.Invalid, "%.40q cannot be reported; exited can", req.GetWhat())
	}
	reason := req.GetReason()
	if len(reason) > 512 {
		reason = reason[:512]
	}
	var terms core.Terms
	if s := l.session(ref.Session); s != nil {
		terms = *s.Terms
	}
	out, err := l.apply(ctx, core.Entry{Exited: &core.Exited{Ref: ref, Host: r.Caller.Host, Reason: reason,
		Candidates: l.candidates([]ids.SessionKey{ref.Session}, terms)}})
	if err != nil {
		return nil, errs.Wrap(op, ref.Session.String(), err)
	}
	if out.Refused != nil {
		l.m.fenced(ctx, "report")
		return nil, refused(op, ref.Session.String(), out.Refused)
	}
	return &schedulerv1.ReportReply{State: out.Session.State}, nil
}

// hosts lists every host that ever joined.
func (l *leader) hosts(context.Context, bus.Request, *schedulerv1.HostsRequest) (*schedulerv1.HostsReply, error) {
	reply := &schedulerv1.HostsReply{}
	l.rep.View(func(st *core.State) {
		for _, h := range st.Hosts() {
			u := st.Usage(h.ID)
			reply.Hosts = append(reply.Hosts, &schedulerv1.HostRecord{Host: h.ID.String(), Boot: h.Boot,
				Tiers: append([]corev1.Tier(nil), h.Tiers...), Capacity: protoLimits(h.Capacity), Zone: h.Zone, Labels: h.Labels,
				Draining: h.Draining, Alive: l.leases.alive(h.ID) && !h.Lost, Sessions: uint32(u.Sessions), Active: uint32(u.Held)})
		}
	})
	return reply, nil
}
