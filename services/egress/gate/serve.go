package gate

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

// serve takes the words of the host's own agent until the service is stopped.
func (g *gate) serve(ctx context.Context) (*bus.Service, error) {
	svc, err := g.conn.Serve(ctx, bus.ServiceConfig{Name: "gate"})
	if err != nil {
		return nil, err
	}
	for _, add := range []func() error{
		func() error { return bus.Handle(svc, "bind", own(g, g.bind)) },
		func() error { return bus.Handle(svc, "unbind", own(g, g.unbind)) },
		func() error { return bus.Handle(svc, "sync", own(g, g.sync)) },
	} {
		if err := add(); err != nil {
			return nil, err
		}
	}
	return svc, nil
}

// own refuses whoever is not the host's own agent. The bus does so too.
func own[Req, Resp any](g *gate, h func(context.Context, Req) (Resp, error)) func(context.Context, bus.Request, Req) (Resp, error) {
	return func(ctx context.Context, r bus.Request, req Req) (Resp, error) {
		if r.Caller.Role != subjects.RoleHost || r.Caller.Host != g.host {
			var none Resp
			return none, errs.E("gate."+r.Method, errkind.Denied, string(g.host), "only the host's own agent may say what its links are")
		}
		return h(ctx, req)
	}
}

// lease sets when the host's lease ends: the latest that was heard, but 0 ends it now.
func (g *gate) lease(until int64) {
	g.leaseMu.Lock()
	defer g.leaseMu.Unlock()
	if d := time.Duration(until); until == 0 || d > g.until {
		g.until = d
		g.table.Lease(d)
	}
}

// bind makes a link a session's.
func (g *gate) bind(_ context.Context, req *egressv1.BindRequest) (*egressv1.BindReply, error) {
	g.lease(req.GetLeaseUntil())
	s, err := g.table.Bind(req.GetBinding())
	if err != nil {
		return nil, err
	}
	return &egressv1.BindReply{PolicyGeneration: s.Policy().Generation(), Notice: s.Notice()}, nil
}

// unbind ends it, and forgets the session's secrets.
func (g *gate) unbind(_ context.Context, req *egressv1.UnbindRequest) (*egressv1.UnbindReply, error) {
	g.table.Unbind(req.GetSession(), req.GetSandbox())
	g.secrets.ended(req.GetSession())
	return &egressv1.UnbindReply{}, nil
}

// sync takes the complete list. One binding of it that cannot be is not made, and ends no other.
func (g *gate) sync(_ context.Context, req *egressv1.SyncRequest) (*egressv1.SyncReply, error) {
	g.lease(req.GetLeaseUntil())
	if err := g.table.Sync(req.GetBoot(), req.GetBindings()); err != nil {
		g.log.Warn("not all bindings of the host were taken", "error", err)
	}
	return &egressv1.SyncReply{Roots: g.roots(), Closed: g.closed()}, nil
}

// closed says why nothing leaves now.
func (g *gate) closed() string {
	if why := g.table.Closed(); why != "" {
		return why
	}
	if err := g.spool.Ready(""); err != nil {
		return "what leaves cannot be recorded: " + err.Error()
	}
	return ""
}
