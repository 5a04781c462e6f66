package scheduler

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

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

// erasedPage bounds how many deleted sessions one answer has the host erase;
// tidyUp asks for the others. While the store is away there may be many.
const erasedPage = 200

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
	if err := l.mayJoin(ctx, h); err != nil {
		return nil, errs.Wrap(op, h.String(), err)
	}
	if req.GetAfter() == "" {
		if err := l.joins(ctx, h, req); err != nil {
			return nil, err
		}
	} else if err := l.rep.Verify(ctx); err != nil {
		return nil, errs.Wrap(op, h.String(), err)
	}
	return l.owned(h, ids.SessionKey(req.GetAfter())), nil
}

// joins grants a lease and records the join.
func (l *leader) joins(ctx context.Context, h ids.Host, req *schedulerv1.JoinRequest) error {
	const op = "scheduler.join"
	turn := l.leases.turn(h)
	turn.Lock()
	defer turn.Unlock()
	// The lease comes first: what the join places on the host needs one, and
	// one that is counted too long on this side does no harm.
	fresh := l.leases.grant(h, req.GetBoot())
	l.leases.say(h, req.GetBoot(), req.GetLoad())
	out, err := l.apply(ctx, core.Entry{Join: &core.Host{ID: h, Boot: req.GetBoot(), Key: req.GetHostKey(), Tiers: req.GetTiers(),
		Capacity: limitsOf(req.GetCapacity()), Zone: req.GetZone(), Labels: req.GetLabels(),
		Lease: l.cfg.Lease, CPUPercent: l.cfg.CPUPercent, PIDsPercent: l.cfg.PIDsPercent, DiskPercent: l.cfg.DiskPercent}})
	if err != nil {
		return errs.Wrap(op, h.String(), err)
	}
	if out.Refused != nil {
		l.leases.forget(h)
		return refused(op, h.String(), out.Refused)
	}
	if fresh {
		l.driver.joined(h)
	}
	l.tidy.now()
	l.drains.now()
	l.queue.room()
	return nil
}

// mayJoin refuses a host that was removed before its join becomes an entry of
// the log: it may ask for as long as it runs.
func (l *leader) mayJoin(ctx context.Context, h ids.Host) error {
	gone := false
	l.rep.View(func(st *core.State) { gone = st.Removed(h) })
	if !gone {
		return nil
	}
	if err := l.rep.Verify(ctx); err != nil {
		return err
	}
	return errs.Errorf("check host", errkind.Denied, "host %s %s; it may join under another id", h, errkind.HostRemoved)
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
	if z := req.GetZone(); z != "" && !ids.IsToken(z) {
		return errs.Errorf("read request", errkind.Invalid, "the zone is %.40q; it must be one token of a-z, 0-9, _ and -, as plans name it", z)
	}
	for k, v := range req.GetLabels() {
		if !ids.IsToken(k) || v != "" && !ids.IsToken(v) {
			return errs.Errorf("read request", errkind.Invalid, "the label %.40q=%.40q must be made of tokens of a-z, 0-9, _ and -", k, v)
		}
	}
	return nil
}

// owned reads what a host owns, and what it may let go of, from a state that
// holds its join. Both lists are cut at the same key.
func (l *leader) owned(h ids.Host, after ids.SessionKey) *schedulerv1.JoinReply {
	reply := &schedulerv1.JoinReply{Lease: durationpb.New(l.cfg.Lease), Complete: true}
	var all []*core.Session
	l.rep.View(func(st *core.State) {
		all = append(st.OnHost(h), st.Stale(h)...)
		for _, t := range st.Tombstones() {
			for _, e := range t.Erase {
				if e.Host == h && !e.Done && after == "" && len(reply.Erased) < erasedPage {
					reply.Erased = append(reply.Erased, protoRef(t.Tenant, e.Ref(t)))
				}
			}
		}
	})
	all = slices.DeleteFunc(all, func(s *core.Session) bool { return s.Key <= after })
	slices.SortFunc(all, byKey)
	all = slices.Compact(all)
	if len(all) > ownedPage {
		all = all[:ownedPage]
		reply.Complete, reply.Next = false, all[ownedPage-1].Key.String()
	}
	for _, s := range all {
		switch {
		case s.Host == h || s.Newest == h:
			reply.Owned = append(reply.Owned, ownedSession(s))
		case isStale(s, h):
			reply.Stale = append(reply.Stale, sessionRef(s))
		}
	}
	return reply
}

// isStale reports whether a disk of s on h is older than what is saved: s was
// active elsewhere since, under the epoch that it still has. Until then h's
// disk may be what the next wake takes.
func isStale(s *core.Session, h ids.Host) bool {
	left := slices.ContainsFunc(s.Left, func(l core.Left) bool { return l.Host == h })
	return s.Host != "" && s.Host != h && s.Newest != h && s.LastActive == s.Epoch && !left
}

func byKey(a, b *core.Session) int { return cmp.Compare(a.Key, b.Key) }

// lease renews; a host that is unknown, lost or of another boot must join. A
// leader that no majority follows any more grants nothing.
func (l *leader) lease(ctx context.Context, r bus.Request, req *schedulerv1.LeaseRequest) (*schedulerv1.LeaseReply, error) {
	const op = "scheduler.lease"
	h, err := sameHost(r, req.GetHost())
	if err != nil {
		return nil, errs.Wrap(op, req.GetHost(), err)
	}
	if err := l.rep.Verify(ctx); err != nil {
		return nil, errs.Wrap(op, h.String(), err)
	}
	lost := true // also when the loss was recorded while the host joined again
	term := l.cfg.Lease
	l.rep.View(func(st *core.State) {
		if rec := st.Host(h); rec != nil {
			lost = rec.Lost || rec.Boot != req.GetBoot()
			if rec.Lease > 0 { // a longer one is recorded by the next join, before it is given
				term = min(term, rec.Lease)
			}
		}
	})
	if lost || !l.leases.renew(h, req.GetBoot()) {
		l.m.fenced(ctx, placeLease)
		return nil, errs.E(op, errkind.StaleEpoch, h.String(), "this boot holds no lease; join again")
	}
	if l.leases.say(h, req.GetBoot(), req.GetLoad()) {
		l.queue.room()
	}
	return &schedulerv1.LeaseReply{Lease: durationpb.New(term)}, nil
}

// commitManifest moves the head of a session that the calling host owns.
func (l *leader) commitManifest(ctx context.Context, r bus.Request, req *schedulerv1.CommitManifestRequest) (*schedulerv1.CommitManifestReply, error) {
	const op = "scheduler.commit_manifest"
	_, ref, err := parseRef(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	m := req.GetManifest()
	entry := core.Entry{Manifest: &core.ManifestCmd{Ref: ref, Host: r.Caller.Host, Manifest: manifestOf(m), Sealed: req.GetSealed()}}
	if max(len(m.GetId()), len(m.GetParent()), len(m.GetImageDigest()), len(m.GetRestoredFrom())) > maxID {
		return nil, errs.E(op, errkind.TooLarge, ref.Session.String(), "an id of the manifest is too long")
	}
	if m.GetGeneration() != nil && generationOf(m.GetGeneration()) != ref.Generation || m.GetEpoch() != nil && epochOf(m.GetEpoch()) != ref.Epoch {
		l.m.fenced(ctx, entry.Name())
		return nil, errs.E(op, errkind.StaleEpoch, ref.Session.String(), "the manifest is of another generation or epoch than the request")
	}
	out, err := l.apply(ctx, entry)
	if err != nil {
		return nil, errs.Wrap(op, ref.Session.String(), err)
	}
	if out.Refused != nil {
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
		return nil, refused(op, k.String(), out.Refused)
	}
	return &schedulerv1.RestoreReply{Record: record(out.Session, true)}, nil
}

// report records that compute ended by itself, or that a stale disk is gone.
func (l *leader) report(ctx context.Context, r bus.Request, req *schedulerv1.ReportRequest) (*schedulerv1.ReportReply, error) {
	const op = "scheduler.report"
	_, ref, err := parseRef(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	var e core.Entry
	switch req.GetWhat() {
	case "exited":
		e.Exited = &core.Exited{Ref: ref, Host: r.Caller.Host, Reason: cut(req.GetReason(), 512)}
		if s := l.session(ref.Session); s != nil {
			e.Exited.Candidates = l.candidates(s, *s.Terms)
		}
	case "dropped":
		e.Dropped = &core.Dropped{Session: ref.Session, Generation: ref.Generation, Epoch: ref.Epoch, Host: r.Caller.Host}
	default:
		return nil, errs.Errorf(op, errkind.Invalid, "%.40q cannot be reported; exited and dropped can", req.GetWhat())
	}
	out, err := l.apply(ctx, e)
	if err != nil {
		return nil, errs.Wrap(op, ref.Session.String(), err)
	}
	if out.Refused != nil {
		return nil, refused(op, ref.Session.String(), out.Refused)
	}
	reply := &schedulerv1.ReportReply{}
	if out.Session != nil {
		reply.State = out.Session.State
	}
	return reply, nil
}

// hosts lists every host of the cell.
func (l *leader) hosts(ctx context.Context, _ bus.Request, _ *schedulerv1.HostsRequest) (*schedulerv1.HostsReply, error) {
	if err := l.rep.Verify(ctx); err != nil {
		return nil, errs.Wrap("scheduler.hosts", "", err)
	}
	reply := &schedulerv1.HostsReply{}
	l.rep.View(func(st *core.State) {
		for _, h := range st.Hosts() {
			reply.Hosts = append(reply.Hosts, l.host(st, h))
		}
	})
	return reply, nil
}

// hostRecord is one host as it is now, nil if it is not known.
func (l *leader) hostRecord(id ids.Host) (out *schedulerv1.HostRecord) {
	l.rep.View(func(st *core.State) {
		if h := st.Host(id); h != nil {
			out = l.host(st, h)
		}
	})
	return out
}

func (l *leader) host(st *core.State, h *core.Host) *schedulerv1.HostRecord {
	u := st.Usage(h.ID)
	out := &schedulerv1.HostRecord{Host: h.ID.String(), Boot: h.Boot, Tiers: append([]corev1.Tier(nil), h.Tiers...),
		Capacity: protoLimits(h.Capacity), Zone: h.Zone, Labels: h.Labels, Draining: h.Draining,
		Sessions: uint32(u.Sessions), Active: uint32(u.Held), Lost: h.Lost, DrainDeadline: protoTime(h.DrainDeadline),
		Drained: h.Drained, Unsaved: uint32(st.Unsaved(h.ID)),
		Used: protoLimits(core.Limits{CPUMillis: uint32(min(u.CPUMillis, math.MaxUint32)), MemoryBytes: u.MemoryBytes,
			PIDs: uint32(min(u.PIDs, math.MaxUint32)), DiskBytes: u.DiskBytes})}
	if held, ok := l.leases.of(h.ID); ok && !h.Lost {
		out.Alive, out.LeaseLeft = true, durationpb.New(max(time.Until(held.until)-l.cfg.LeaseDrift, 0))
		out.Unhealthy = cmp.Or(held.load.unhealthy, l.leases.sick(h.ID))
		out.TierFacts = held.load.tiers // never changed once said
	}
	return out
}
