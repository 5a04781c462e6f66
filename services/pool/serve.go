package pool

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

const (
	// requestLimit is how many requests of one method may run, and mostly wait, at once: beside those of one
	// pool that wait there is room for more.
	requestLimit = 2 * core.MaxWaiting
	// maxFile is the largest pool file in bytes.
	maxFile = 64 << 10
	// maxHosts is how many hosts a reservation may name.
	maxHosts = 8
)

// led serves a method for as long as this instance leads; then the next leader is asked.
func led[Req, Resp proto.Message](l *leader, svc *bus.Service, method string, h func(context.Context, bus.Request, Req) (Resp, error)) error {
	return bus.Handle(svc, method, func(ctx context.Context, r bus.Request, req Req) (Resp, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(l.ctx, cancel)()
		resp, err := h(ctx, r, req)
		if l.ctx.Err() != nil {
			var none Resp
			return none, errs.E("pool."+method, errkind.NotLeader, "", "this instance does not lead any more")
		}
		return resp, err
	})
}

var errNoPool = errors.New("there is no pool")

// reserve answers from memory: it reads and writes nothing that is stored.
func (l *leader) reserve(ctx context.Context, _ bus.Request, req *poolv1.ReserveRequest) (*poolv1.ReserveReply, error) {
	const op = "pool.reserve"
	if req.GetSession() == "" || req.GetTenant() == "" || req.GetAttempt() == "" || req.GetTemplate() == "" {
		return nil, errs.E(op, errkind.Invalid, "", "tenant, session, attempt and template must all be named")
	}
	if len(req.GetHosts()) > maxHosts {
		return nil, errs.Errorf(op, errkind.Invalid, "%d hosts are named, more than %d", len(req.GetHosts()), maxHosts)
	}
	none := &poolv1.ReserveReply{Verdict: poolv1.Verdict_VERDICT_NO_POOL}
	e := l.entry(req.GetTemplate())
	if e == nil || e.tier != req.GetTier() || e.terms == nil {
		return none, nil
	}
	a, err := e.reserve(ctx, core.Ask{Tenant: req.GetTenant(), Session: req.GetSession(), Attempt: req.GetAttempt(), Hosts: req.GetHosts()})
	switch {
	case errors.Is(err, errNoPool):
		return none, nil
	case err != nil:
		return nil, errs.Wrap(op, req.GetSession(), err)
	}
	l.m.reserved(e.name, a)
	out := &poolv1.ReserveReply{Verdict: verdicts[a.Verdict], Waited: durationpb.New(a.Waited)}
	if a.Verdict == core.Reserved {
		out.Reservation, out.Host = a.Reservation, a.Host
	}
	return out, nil
}

var verdicts = map[core.Verdict]poolv1.Verdict{core.Reserved: poolv1.Verdict_VERDICT_RESERVED,
	core.Exhausted: poolv1.Verdict_VERDICT_EXHAUSTED, core.OverShare: poolv1.Verdict_VERDICT_OVER_SHARE}

// settle notes what became of a wake. Idempotent.
func (l *leader) settle(_ context.Context, _ bus.Request, req *poolv1.SettleRequest) (*poolv1.SettleReply, error) {
	e := l.entry(req.GetTemplate())
	if e == nil || e.tier != req.GetTier() {
		return &poolv1.SettleReply{}, nil
	}
	warm := req.GetWarm()
	if warm != "" {
		if _, err := ids.ParseSandboxID(warm); err != nil {
			return nil, errs.Wrap("pool.settle", req.GetSession(), err)
		}
	}
	now := time.Now()
	e.mu.Lock()
	e.core.Settle(core.Settled{Reservation: req.GetReservation(), Tenant: req.GetTenant(), Host: req.GetHost(), Warm: ids.SandboxID(warm)}, now)
	e.grant(now)
	var told []event
	if warm != "" {
		told = append(told, e.claimed(req, now))
	}
	e.mu.Unlock()
	e.poke.now()
	if h := l.fleet.of(req.GetHost()); h != nil && warm == "" {
		h.poke.now()
	}
	l.m.settled(e.name, req)
	l.publish(told...)
	return &poolv1.SettleReply{}, nil
}

// show answers with one pool, or all.
func (l *leader) show(_ context.Context, _ bus.Request, req *poolv1.ShowRequest) (*poolv1.ShowReply, error) {
	if name := req.GetTemplate(); name != "" {
		e := l.entry(name)
		if e == nil {
			return nil, noPool(name)
		}
		return &poolv1.ShowReply{Pools: []*poolv1.Status{e.status()}}, nil
	}
	out := &poolv1.ShowReply{}
	for _, e := range l.entries() {
		out.Pools = append(out.Pools, e.status())
	}
	return out, nil
}

func noPool(name string) error {
	return errs.E("", errkind.NotFound, "", fmt.Sprintf("no pool is declared for template %q", name))
}

// apply declares the pools of a file, or says what would follow.
func (l *leader) apply(ctx context.Context, _ bus.Request, req *poolv1.ApplyRequest) (*poolv1.ApplyReply, error) {
	if n := len(req.GetFile()); n > maxFile {
		return nil, errs.Errorf("", errkind.TooLarge, "the file is %d bytes long; it may be %d", n, maxFile)
	}
	specs, err := l.cfg.parse(req.GetFile())
	if err != nil {
		return nil, errs.E("", errkind.Invalid, "", err) // the sentence alone: it has the line
	}
	if req.GetDryRun() {
		out, err := l.preview(specs)
		return &poolv1.ApplyReply{Pools: out}, err
	}
	if err := l.declare(ctx, specs); err != nil {
		return nil, err
	}
	out := &poolv1.ApplyReply{}
	for _, s := range specs {
		if e := l.entry(s.GetTemplate()); e != nil {
			out.Pools = append(out.Pools, e.status())
		}
	}
	return out, nil
}

// remove ends a pool: what waits in it is retired.
func (l *leader) remove(ctx context.Context, _ bus.Request, req *poolv1.RemoveRequest) (*poolv1.RemoveReply, error) {
	return &poolv1.RemoveReply{}, l.undeclare(ctx, req.GetTemplate())
}

// declareFile declares them, once in the life of the process.
func (l *leader) declareFile(ctx context.Context) {
	for len(l.file) > 0 && ctx.Err() == nil {
		err := l.declare(ctx, l.file)
		if err == nil || errs.Is(err, errkind.Conflict) {
			l.file = nil
		}
		if err != nil && ctx.Err() == nil {
			l.log.Warn("the pools of the configuration are not declared", "file", l.cfg.Pools, "error", err)
		}
		if len(l.file) > 0 {
			sleep(ctx, time.Second)
		}
	}
}
