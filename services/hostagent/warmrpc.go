package hostagent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/shelf"
)

const (
	// maxDigest is the longest digest of a template.
	maxDigest = 128
	// maxRetire is how many one request retires at most.
	maxRetire = 1024
)

func (h *host) rpcPrepare(ctx context.Context, _ bus.Request, req *hostv1.PrepareRequest) (*hostv1.PrepareReply, error) {
	const op = "host.prepare"
	if err := h.heard(ctx, op, req.GetTerm()); err != nil {
		return nil, err
	}
	if err := h.may("prepare"); err != nil {
		return nil, err
	}
	o, err := h.orderOf(req)
	if err != nil {
		return nil, errs.Wrap(op, req.GetWarm(), err)
	}
	w, err := h.keeper.begin(o, h.memory())
	if err != nil {
		return nil, h.refusal(op, err)
	}
	select {
	case <-w.made:
	case <-ctx.Done():
		return nil, errs.E(op, errs.Kind(ctx.Err()), req.GetWarm(), ctx.Err())
	}
	if w.err != nil {
		return nil, errs.Wrap(op, req.GetWarm(), w.err)
	}
	if it, ok := h.keeper.get(w.name); ok {
		return &hostv1.PrepareReply{Warm: warmSandbox(it)}, nil
	}
	return nil, errs.E(op, errkind.Superseded, req.GetWarm(), "it was taken or removed at once")
}

// orderOf checks what a prepare asks for.
func (h *host) orderOf(req *hostv1.PrepareRequest) (o order, err error) {
	const op = "prepare sandbox"
	t := req.GetTerms()
	bad := func(why string) error { return errs.E(op, errkind.Invalid, req.GetWarm(), why) }
	name, err := ids.ParseSandboxID(req.GetWarm())
	if err != nil || !name.IsWarm() {
		return o, bad("that is no name of a warm sandbox")
	}
	if _, err := ids.ParseTemplate(t.GetTemplate()); err != nil {
		return o, bad("the terms name no template")
	}
	if len(req.GetTemplateDigest()) > maxDigest {
		return o, bad("the template's digest is none")
	}
	if !h.offers(t.GetTier()) || !h.drv.Capabilities()[driver.Tier(tierName(t.GetTier()))].Warm {
		return o, errs.Errorf(op, errkind.Unimplemented, "this host has no tier %s that can be prepared", tierName(t.GetTier()))
	}
	o.deadline = time.Now().Add(wakeTime)
	if d := req.GetDeadline(); d != nil {
		o.deadline = d.AsTime()
	}
	switch left := time.Until(o.deadline); {
	case left <= 0:
		return o, errs.E(op, errkind.Expired, req.GetWarm(), "by this host's clock it was asked for too long ago")
	case left > shelf.MaxAhead:
		return o, bad("by this host's clock the deadline is too far ahead")
	}
	ref, err := h.imageRef(t)
	if err != nil {
		return o, err
	}
	o.terms, o.most = t, int(req.GetCap())
	o.Item = shelf.Item{Name: name, Kind: kindOf(t), TemplateDigest: req.GetTemplateDigest(), ImageRef: ref, Memory: t.GetLimits().GetMemoryBytes()}
	return o, h.spare()
}

// spare refuses when sessions need all that this host has.
func (h *host) spare() error {
	const op = "prepare sandbox"
	if why := h.unhealthy(); why != "" {
		return errs.E(op, errkind.Unavailable, "", why)
	}
	if sp, err := h.disks.Space(); err != nil || sp.Room() == 0 && !h.bare {
		return errs.E(op, errkind.NoCapacity, "", errors.Join(errNoRoom, err))
	}
	if !h.bare && memAvailable() < min(memTotal()/16, 512<<20) {
		return errs.E(op, errkind.NoCapacity, "", "this host has little memory left")
	}
	return nil
}

func (h *host) rpcRetire(ctx context.Context, _ bus.Request, req *hostv1.RetireRequest) (*hostv1.RetireReply, error) {
	const op = "host.retire"
	if err := h.heard(ctx, op, req.GetTerm()); err != nil {
		return nil, err
	}
	if n := len(req.GetWarm()); n > maxRetire {
		return nil, errs.Errorf(op, errkind.Invalid, "%d sandboxes are named, more than %d", n, maxRetire)
	}
	var names []ids.SandboxID
	for _, n := range req.GetWarm() {
		name, err := ids.ParseSandboxID(n)
		if err != nil || !name.IsWarm() {
			return nil, errs.E(op, errkind.Invalid, n, "that is no name of a warm sandbox")
		}
		names = append(names, name)
	}
	h.log.Info("retiring warm sandboxes", "sandboxes", len(names), "reason", req.GetReason())
	going, claimed := h.keeper.retire(names)
	if err := awaitGone(ctx, going); err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	out := &hostv1.RetireReply{}
	for _, n := range names {
		if !slices.Contains(claimed, n) {
			out.Gone = append(out.Gone, string(n))
		}
	}
	return out, nil
}

func (h *host) rpcWarm(ctx context.Context, _ bus.Request, req *hostv1.WarmRequest) (*hostv1.WarmReply, error) {
	if err := h.heard(ctx, "host.warm", req.GetTerm()); err != nil {
		return nil, err
	}
	active := map[shelf.Kind]uint32{}
	for _, s := range h.all() {
		if c := s.compute.Load(); c != nil && c.awake {
			active[c.kind]++
		}
	}
	all, uses := h.warmSandboxes()
	out := &hostv1.WarmReply{Boot: h.boot, Warm: all}
	for kind := range active {
		if _, ok := uses[kind]; !ok {
			uses[kind] = shelf.Use{}
		}
	}
	for kind, u := range uses {
		out.Uses = append(out.Uses, &hostv1.PoolUse{
			Template: kind.Template, Tier: tierOf(kind.Tier), Active: active[kind], Claimed: u.Claimed, Missed: u.Missed})
	}
	slices.SortFunc(out.Uses, func(a, b *hostv1.PoolUse) int {
		return strings.Compare(a.Template+"/"+a.Tier.String(), b.Template+"/"+b.Tier.String())
	})
	return out, nil
}

// warmSandboxes tells of everything that nobody has claimed, and of the demand.
func (h *host) warmSandboxes() (out []*hostv1.WarmSandbox, uses map[shelf.Kind]shelf.Use) {
	all, uses := h.keeper.list()
	for _, it := range all {
		out = append(out, warmSandbox(it))
	}
	return out, uses
}

func warmSandbox(it shelf.Item) *hostv1.WarmSandbox {
	out := &hostv1.WarmSandbox{
		Warm: string(it.Name), Template: it.Kind.Template, Tier: tierOf(it.Kind.Tier), TemplateDigest: it.TemplateDigest,
		ImageDigest: it.ImageDigest, MemoryBytes: it.Memory, Stale: it.Stale, State: warmState(it.State),
	}
	if !it.MadeAt.IsZero() {
		out.MadeAt = timestamppb.New(it.MadeAt)
	}
	return out
}

// warmState: what a wake has is as good as gone.
func warmState(s shelf.State) hostv1.WarmState {
	switch s {
	case shelf.Preparing:
		return hostv1.WarmState_WARM_STATE_PREPARING
	case shelf.Ready:
		return hostv1.WarmState_WARM_STATE_READY
	}
	return hostv1.WarmState_WARM_STATE_RETIRING
}
